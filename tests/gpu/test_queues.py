"""The rule by which ``tests/protocol/cc/circle.cc`` orders the kernels of a hardware queue."""

import json
import os
import subprocess
import sys

import pytest

from tests.gpu.queues import LATE_SMS

pytestmark = pytest.mark.gpu


@pytest.mark.alone  # other processes on the GPU can hold the late kernel up
@pytest.mark.parametrize(("queues", "num_begun"), [(1, 0), (8, LATE_SMS)])
def test_what_begins_behind_a_launch_that_waits_for_room(queues: int, num_begun: int):
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "CUDA_MODULE_LOADING": "EAGER"}
    command = [sys.executable, "-m", "tests.gpu.queues"]
    done = subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert not told["is_launch_over"], "the launch found room beside the kernel in front of it"
    assert told["num_begun"] == num_begun
    assert told["num_begun_at_last"] == LATE_SMS
    assert told["is_same"]
