"""The doctor on a Hopper GPU: the kernel runs, and JSON says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import PATIENCE_S

pytestmark = pytest.mark.gpu


def test_the_kernel_runs_a_layer():
    done = subprocess.run(
        [sys.executable, "-m", "flashmoe_megatron", "--json", "--require", "kernel"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    layer = answer["bf16_layer"]
    assert (layer["backend"], layer["ranks"], layer["why_not_kernel"]) == ("kernel", 1, None)
    assert 0 < layer["rel_l2"] < 1e-2
    assert answer["library"]["loads"]
    assert answer["symmetric_memory"] == {"allocates": True}
    assert [gpu["compute_capability"] for gpu in answer["gpus"]] == ["9.0"]
    assert int(answer["driver"]["cuda"].partition(".")[0]) >= 13
    assert answer["status"] == 0
