"""transformers' Trainer and accelerate reach flashmoe by ``install()`` and the configuration."""

import importlib.util
from pathlib import Path

import pytest

from tests.deepspeed.harness import FUSED
from tests.programs import run_python
from tests.side_by_side import compare_noted

STEPS = 4

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("accelerate", "transformers")
]


def test_trainer_and_accelerate_autoep(tmp_path: Path, with_transformers: Path) -> None:
    out = tmp_path / "records.jsonl"
    program = ("-m", "tests.deepspeed.huggingface", "--out", out)
    run_python(*program, ranks=2, forked_from=with_transformers, HF_HUB_OFFLINE="1")
    for stock, fused in compare_noted(out, {"trainer": 1e-5, "accelerate": 1e-5}).values():
        assert stock["calls"] == []
        assert fused["report"] == {f"model.layers.{layer}.mlp": FUSED for layer in range(2)}
        assert fused["calls"] == [STEPS, STEPS]
        assert len(set(stock["losses"])) == STEPS
