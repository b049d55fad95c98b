"""The program that compares loss curves, in small and on processors; and that it can say no."""

import json
from pathlib import Path

import pytest

from tests.programs import run_python
from tools.bench.bench_training.curves import draw, judge

SMALL = (
    "--train-iters 12 --noise-runs 1 --log-interval 4 --num-layers 1 "
    "--hidden-size 64 --moe-ffn-hidden-size 64 --num-attention-heads 2 --num-experts 4 "
    "--seq-length 32 --micro-batch-size 2 --data-megabytes 1 --lr 3e-3"
)


def test_small_proof(tmp_path: Path, with_megatron: Path) -> None:
    folders = ("--out", tmp_path / "training", "--output", tmp_path / "data")
    program = ("-m", "tools.bench.bench_training", "megatron")
    ran = run_python(*program, *SMALL.split(), *folders, ranks=2, forked_from=with_megatron)
    assert "within the band of noise at 12 of 12 iterations" in ran.stdout
    runs = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    names = [run["run"] for run in runs]
    assert names == ["flashmoe", "alltoall", "alltoall, ranks moved by 1"]
    for run in runs:
        assert len(run["losses"]) == len(run["iteration_ms"]) == 12
        assert run["losses"] == pytest.approx(runs[1]["losses"], rel=1e-4)
    for suffix in (".png", ".svg"):
        assert (tmp_path / f"training{suffix}").stat().st_size > 10_000

    ours, *others = (run["losses"] for run in runs)
    assert judge(ours, *others) == []
    # Another curve, as a wrong layer would give it.
    wrong = [loss * (1 + 0.02 * i) for i, loss in enumerate(ours)]
    assert judge(wrong, *others)[0].startswith("iteration 2: flashmoe is")


def test_plot_says_what_its_axes_are(tmp_path: Path) -> None:
    record = tmp_path / "training.jsonl"
    curves = {"flashmoe": [3.0, 2.01], "alltoall": [3.0, 2.0], "alltoall, moved": [3.0, 1.99]}
    record.write_text(
        "".join(json.dumps({"run": run, "losses": losses}) + "\n" for run, losses in curves.items())
    )
    png, svg = draw(record)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    first = svg.read_bytes()
    for name in ("iteration", "nats per byte", "relative distance", "band of noise", *curves):
        assert name in text
    draw(record)
    assert svg.read_bytes() == first
