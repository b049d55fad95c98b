"""The example of the README, shortened: its own comparison with DeepSpeed's layers decides."""

from pathlib import Path

from tests.programs import run_python


def test_pretraining(tmp_path: Path) -> None:
    short = "--train-iters 20 --num-layers 1 --seq-length 64 --data-megabytes 1 --eval-iters 2"
    program = "examples/pretrain_moe_deepspeed.py"
    ran = run_python(program, *short.split(), "--output", tmp_path, ranks=2)
    assert "blocks.0.moe: fused" in ran.stdout
    assert "difference over the first 20 iterations" in ran.stdout
    assert "failed:" not in ran.stdout
