"""The programs that measure and check DeepSpeed on GPUs, in small and on processors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 400


def run_module(module: str, *arguments: object) -> str:
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", "-m", module, *map(str, arguments)),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-20_000:]
    return ran.stdout


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_cases_of_several_gpus_autoep(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    cases = ["native_zero2", "autoep_zero2", "zero2_overlap"]
    run_module("tests.multi_gpu.deepspeed_worker", "--steps", 30, "--out", out, "--cases", *cases)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["case"] for record in records] == cases
    assert all(record["passed"] for record in records)
    gradients = records[0]["measured"]["gradients"]
    assert 0 < max(gradient["apart"] for gradient in gradients.values()) < 1e-2
    assert records[2]["measured"]["steps"] == 30


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_benchmark_autoep(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    short = ("--shapes", "small-top2", "--steps", 2, "--warmup", 1, "--limit-s", TIMEOUT_S // 2)
    benchmark = ("tools.bench.bench_training", "deepspeed", *short)
    printed = run_module(*benchmark, "--out", out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["family"], record["run"]) for record in records] == [
        ("native", "DeepSpeed"),
        ("native", "flashmoe"),
        ("autoep", "DeepSpeed, loop"),
        ("autoep", "flashmoe"),
    ]
    assert all(record["largest_distance"] < 1e-5 for record in records)
    for record in records:
        assert len(record["iteration_ms"]) == len(record["losses"]) == 3
        assert all(milliseconds > 0 for milliseconds in record["iteration_ms"])
    assert "losses agree" in printed
    # A bound that no distance is within.
    with pytest.raises(AssertionError, match="losses do not agree"):
        run_module(
            "tools.bench.bench_training",
            "deepspeed",
            *short,
            "--families",
            "native",
            "--bound",
            "-1",
        )
