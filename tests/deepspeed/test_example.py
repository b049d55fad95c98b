"""The example of the README, shortened: its own comparison with DeepSpeed's layers decides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 200


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_pretraining(tmp_path: Path) -> None:
    short = "--train-iters 20 --num-layers 1 --seq-length 64 --data-megabytes 1 --eval-iters 2"
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", "examples/pretrain_moe_deepspeed.py"),
            *short.split(),
            *("--output", str(tmp_path)),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)},
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-20_000:]
    assert "blocks.0.moe: fused" in ran.stdout
    assert "difference over the first 20 iterations" in ran.stdout
    assert "failed:" not in ran.stdout
