"""The program that times what a layer does on the host."""

import re

import pytest

from tests.programs import run_python


@pytest.mark.library
def test_each_kind_of_experts_is_timed() -> None:
    options = ["--experts", "te_grouped", "one_weight", "--num-experts", "4", "--calls", "2"]
    ran = run_python("-m", "tests.megatron.host_time", *options)
    assert "flashmoe: backend kernel, 4 experts" in ran.stdout
    rows = re.findall(r"\| (\w+) \| \d+ \(\d+\) \| \d+ \(\d+\) \|", ran.stdout)
    assert rows == ["te_grouped", "one_weight"]
