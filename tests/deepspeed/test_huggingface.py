"""transformers' Trainer and accelerate reach flashmoe by ``install()`` and the configuration."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deepspeed.harness import FUSED

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 400
STEPS = 4

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("accelerate", "transformers")
]


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_trainer_and_accelerate_autoep(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", "-m", "tests.deepspeed.huggingface", "--out", str(out)),
        ],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-20_000:]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["job"], record["fused"]) for record in records] == [
        ("trainer", False),
        ("trainer", True),
        ("accelerate", False),
        ("accelerate", True),
    ]
    for stock, fused in (records[:2], records[2:]):
        assert stock["fused_calls"] == []
        assert fused["report"] == {f"model.layers.{layer}.mlp": FUSED for layer in range(2)}
        assert fused["fused_calls"] == [STEPS, STEPS]
        assert len(set(stock["losses"])) == STEPS
        assert fused["losses"] == pytest.approx(stock["losses"], rel=1e-5)
