"""The program that times what a layer does on the host."""

import re
import subprocess
import sys

import pytest

from tests.distributed import PATIENCE_S
from tests.megatron.stock_script import REPOSITORY


@pytest.mark.library
def test_each_kind_of_experts_is_timed() -> None:
    options = ["--experts", "te_grouped", "one_weight", "--num-experts", "4", "--calls", "2"]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.megatron.host_time", *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "flashmoe: backend kernel, 4 experts" in ran.stdout
    rows = re.findall(r"\| (\w+) \| \d+ \(\d+\) \| \d+ \(\d+\) \|", ran.stdout)
    assert rows == ["te_grouped", "one_weight"]
