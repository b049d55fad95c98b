"""The programs that measure and check DeepSpeed on GPUs, in small and on processors."""

import json
from pathlib import Path

from tests.programs import PATIENCE_S, run_python

STEPS = 30


def test_cases_of_several_gpus_autoep(tmp_path: Path, with_transformers: Path) -> None:
    out = tmp_path / "records.jsonl"
    cases = ["native_zero2", "autoep_zero2", "zero2_overlap"]
    program = ("-m", "tests.multi_gpu.deepspeed_worker", "--out", out)
    run_python(
        *program, "--steps", STEPS, "--cases", *cases, ranks=2, forked_from=with_transformers
    )
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["case"] for record in records] == cases
    assert all(record["passed"] for record in records)
    gradients = records[0]["measured"]["gradients"]
    assert 0 < max(gradient["apart"] for gradient in gradients.values()) < 1e-2
    assert records[2]["measured"]["steps"] == STEPS


def test_benchmark_autoep(tmp_path: Path, with_transformers: Path) -> None:
    """Native layers, and a bound that distances are within: tools/test_examples.py."""
    out = tmp_path / "results.jsonl"
    short = ("--shapes", "small-top2", "--steps", 2, "--warmup", 1, "--limit-s", PATIENCE_S // 2)
    benchmark = ("-m", "tools.bench.bench_training", "deepspeed", *short, "--out", out)
    no_distance = ("--families", "autoep", "--bound", -1)
    ran = run_python(*benchmark, *no_distance, ranks=2, status=1, forked_from=with_transformers)
    assert "failed: losses further apart than -1.0: autoep, small-top2, flashmoe" in ran.stdout
    assert "losses do not agree" in ran.stdout
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["run"] for record in records] == ["DeepSpeed, loop", "flashmoe"]
    assert all(record["largest_distance"] < 1e-5 for record in records)
    for record in records:
        assert len(record["iteration_ms"]) == len(record["losses"]) == 3
        assert all(milliseconds > 0 for milliseconds in record["iteration_ms"])
