"""The program that times what a layer does on the host."""

import re
from pathlib import Path

import pytest

from tests.programs import run_python


@pytest.mark.library
def test_each_kind_of_experts_is_timed(with_megatron: Path) -> None:
    options = ["--experts", "te_grouped", "one_weight", "--num-experts", "4", "--calls", "2"]
    ran = run_python("-m", "tests.megatron.host_time", *options, forked_from=with_megatron)
    assert "flashmoe: backend kernel, 4 experts" in ran.stdout
    rows = re.findall(r"\| (\w+) \| \d+ \(\d+\) \| \d+ \(\d+\) \|", ran.stdout)
    assert rows == ["te_grouped", "one_weight"]
