"""The example of the README, shortened: its own comparison with DeepSpeed's layers decides."""

from pathlib import Path

from tests.programs import run_python

PROGRAM = "examples/pretrain_moe_deepspeed.py"
SHORT = ["--num-layers", "1", "--seq-length", "64", "--data-megabytes", "1", "--eval-iters", "2"]


def test_pretraining(tmp_path: Path, with_transformers: Path) -> None:
    ran = run_python(
        PROGRAM,
        "--train-iters",
        "20",
        *SHORT,
        "--output",
        tmp_path,
        ranks=2,
        forked_from=with_transformers,
    )
    assert "blocks.0.moe: fused" in ran.stdout
    assert "difference over the first 20 iterations" in ran.stdout
    assert "failed:" not in ran.stdout


def test_pretraining_with_another_gate(tmp_path: Path, with_transformers: Path) -> None:
    words = ["--train-iters", "8", *SHORT, "--output", tmp_path, "--flashmoe-gate", "xmoe"]
    ran = run_python(PROGRAM, *words, ranks=2, forked_from=with_transformers)
    assert "blocks.0.moe: fused" in ran.stdout
    assert "the checkpoint loaded into a new engine" in ran.stdout
    assert "failed:" not in ran.stdout
