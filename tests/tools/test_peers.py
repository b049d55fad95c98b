"""The league table: what is measured of each layer is true, and nothing drops out of it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.correctness import GATE
from flashmoe_megatron.bench.problem import Problem, make_problem
from flashmoe_megatron.bench.shapes import Shape
from tools.bench import bench_peers, common, peers_report
from tools.bench.bench_peers import ALL, GROUPS, examined, expected, main
from tools.bench.peers import PEERS, Layer, stacked
from tools.bench.peers_report import values

SMALL = Shape(513, 64, 64, 8, 2, gated=True)


@pytest.fixture
def problem() -> Problem:
    return stacked(make_problem(SMALL))


@pytest.mark.parametrize("name", ["flashmoe", "flashmoe-preactivations", "torch"])
def test_samples_agree_with_float64_and_notice_errors(problem: Problem, name: str):
    want = expected(problem)
    layer = PEERS[name](problem)
    found = examined(problem, layer, want)
    assert max(found["errors"].values()) < GATE
    assert found["repeats"]

    def broken() -> torch.Tensor:
        return layer.forward() * 1.1

    errors = examined(problem, layer._replace(forward=broken), want)["errors"]
    assert all(abs(error - 0.1) < GATE for error in errors.values())


def test_bits_that_do_not_repeat_are_told(problem: Problem):
    calls = iter(range(9))
    weight = problem.x.detach().clone().requires_grad_()
    leaves = (problem.x, problem.topk_weight, *problem.parameters)

    def forward() -> torch.Tensor:
        rest = sum(leaf.sum() for leaf in leaves) * 0
        return weight * (1 + next(calls)) + rest

    found = examined(problem, Layer(forward, leaves), expected(problem))
    assert not found["repeats"]


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "peers.jsonl"
    monkeypatch.setattr(common, "cublas_tflops", lambda timer: 500.0)
    monkeypatch.setattr(common, "has_gpu", lambda: True)
    shapes = {"small": SMALL, "40x64x64x4x2": Shape(40, 64, 64, 4, 2, gated=True)}
    monkeypatch.setattr(bench_peers, "ALL", shapes)
    command = ["--shapes", *shapes, "--turns", "2", "--turn-ms", "0", "--settle-ms", "0"]
    command += ["--out", str(out)]
    assert main([*command, *arguments]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_record_goes_on_where_it_stopped(tmp_path: Path, monkeypatch, capsys):
    arguments = ("--peers", "flashmoe", "torch", "sonicmoe")
    names = [row["shape"] for row in run(tmp_path, monkeypatch, *arguments, "--shapes", "small")]
    assert names == ["small"]
    rows = run(tmp_path, monkeypatch, *arguments)
    assert [row["shape"] for row in rows] == ["small", "40x64x64x4x2"]
    assert rows[0]["command"].endswith(f"--settle-ms 0 {' '.join(arguments)} --shapes small")
    for row in rows:
        assert set(row["layers"]) == {"flashmoe", "torch"}
        for found in row["layers"].values():
            assert len(found["forward"]) == len(found["forward_and_backward"]) == 2
    told = capsys.readouterr().out
    assert told.count("sonicmoe is left out: No module named") == 2  # once a call
    assert run(tmp_path, monkeypatch, *arguments, "--minutes", "0") == rows
    added = run(tmp_path, monkeypatch, *arguments, "--tokens", "48")[len(rows) :]
    assert [row["sizes"]["tokens"] for row in added] == [48, 48]  # other sizes are not done


@pytest.mark.parametrize(
    "change",
    [
        ("--tokens", "48"),
        ("--peers", "torch"),
        ("--turns", "4"),
        ("--turn-ms", "0.1"),
        ("--settle-ms", "0.1"),
        ("--only-graphed", "flashmoe"),
    ],
)
def test_what_differs_from_the_record_is_not_done(tmp_path: Path, monkeypatch, change):
    monkeypatch.setattr(bench_peers, "measure", lambda shape, names, options: {})
    monkeypatch.setattr(common, "machine", lambda commit: {})
    before = run(tmp_path, monkeypatch)
    assert run(tmp_path, monkeypatch) == before
    changed = run(tmp_path, monkeypatch, *change)
    assert len(changed) == 2 * len(before)
    assert run(tmp_path, monkeypatch, *change) == run(tmp_path, monkeypatch) == changed


def test_turns_settle_as_long_as_the_clock_takes(tmp_path: Path, monkeypatch):
    assert bench_peers.parse([]).settle_ms == stopwatch.SETTLE_MS
    asked: list[float] = []
    monkeypatch.setattr(bench_peers, "turn_ms", lambda call, times, ms: asked.append(ms) or 1.0)
    chosen = ("--peers", "flashmoe", "torch", "--shapes", "small")
    run(tmp_path, monkeypatch, *chosen, "--settle-ms", "0.5")
    assert asked == [0.5] * (2 * 2 * 2), "two layers, both passes, two turns"
    run(tmp_path, monkeypatch, *chosen)
    assert asked[8:] == [0] * (2 * 2 * 4), "without settling two more turns warm up"


def test_layers_timed_from_graphs_alone_are_compared(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(bench_peers, "replayed", lambda call: call)  # graphs want a GPU
    chosen = ("--peers", "flashmoe", "torch", "--graphed", "torch", "--only-graphed", "flashmoe")
    (row,) = run(tmp_path, monkeypatch, *chosen, "--shapes", "small")
    timed = {name for name, found in row["layers"].items() if "forward" in found}
    assert timed == {"flashmoe from a graph", "torch", "torch from a graph"}
    assert max(row["layers"]["flashmoe"]["errors"].values()) < GATE
    said = capsys.readouterr().out
    assert "  flashmoe from a graph: " in said
    assert "  flashmoe: " not in said
    record = tmp_path / "peers.jsonl"
    assert peers_report.main([str(record), "--out", str(tmp_path / "league")]) == 0
    page, times = (tmp_path / "league.md").read_text(), values(row, "forward")
    for name in ("torch", "torch from a graph"):
        ratio = times["flashmoe from a graph"] / times[name]
        assert f"| {name} | F < 512 | forward | {ratio:.2f} |" in page


def test_a_layer_that_fails_is_recorded_and_shown(tmp_path: Path, monkeypatch):
    def fails(problem: Problem) -> Layer:
        raise RuntimeError("it cannot do this shape")

    monkeypatch.setitem(PEERS, "liger", fails)
    (row,) = run(tmp_path, monkeypatch, "--peers", "flashmoe", "liger", "--shapes", "small")
    assert row["layers"]["liger"] == {"failed": "RuntimeError: it cannot do this shape"}
    page = peers_report.page([row])
    assert "| liger |  | 0 of 0 | 1 |" in page
    assert "| small (513, 64, 64, 8, 2) |" in page


def row_of(name: str, intermediate: int, ours: float, theirs: float) -> dict[str, Any]:
    times = {"errors": {"out": 1e-3, "grad_x": 2e-3}, "repeats": True, "kept_bytes": 2_000_000}
    layers = {
        layer: {**times, "forward": [time, 9.0, 0.1], "forward_and_backward": [3 * time] * 3}
        for layer, time in (("flashmoe", ours), ("sonicmoe", theirs))
    }
    sizes = {**vars(SMALL), "intermediate": intermediate}
    return {"measurement": "peers", "shape": name, "sizes": sizes, "layers": layers}


def test_report_says_what_is_lost(tmp_path: Path, capsys):
    rows = [row_of("8x64", 64, 2.0, 1.0), row_of("wide", 2048, 1.0, 1.25)]
    record, tmp_path = tmp_path / "peers.jsonl", tmp_path / "made"
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert peers_report.main([str(record), "--out", str(tmp_path / "league")]) == 0
    page = (tmp_path / "league.md").read_text()
    assert "| 513, 64, 64, 8, 2 | 2 | 1 (2.00) |" in page
    assert "| sonicmoe | F < 512 | forward | 2.00 | 2.00 | 2.00 |" in page
    assert "| sonicmoe | F >= 1024 | forward_and_backward | 0.80 | 0.80 | 0.80 |" in page
    assert "| wide (513, 64, 2048, 8, 2) | 2 | 2 (1.00) |" in page
    assert "| sonicmoe | 2.0e-03 | 2 of 2 | 0 |" in page
    assert all((tmp_path / f"league.{ending}").stat().st_size > 1000 for ending in ("png", "svg"))
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "league.md")


@pytest.mark.parametrize(("name", "others"), [("turns", [3, 7]), ("graphed", [["liger"], []])])
def test_rows_of_several_settings_share_no_report(tmp_path: Path, name: str, others: list[Any]):
    record = tmp_path / "peers.jsonl"
    rows = [{**row_of("8x64", 64, 2.0, 1.0), name: other} for other in others]
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = " and ".join(map(json.dumps, others))
    with pytest.raises(SystemExit, match=re.escape(f"rows with {name} {found}: wanted one")):
        peers_report.main([str(record), "--out", str(tmp_path / "league")])
    assert list(tmp_path.iterdir()) == [record]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is no record: .* No such file"),
        ("", "has rows of nothing: wanted those of bench_peers"),
        ("nonsense", "is no record: Expecting value"),
        ("[1]", "is no record: line 1 is .*, wanted a JSON object"),
        ('{"measurement": "gate"}', "has rows of gate: wanted those of bench_peers"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str | None, said: str):
    record = tmp_path / "peers.jsonl"
    if text is not None:
        record.write_text(text)
    with pytest.raises(SystemExit, match=said):
        peers_report.main([str(record), "--out", str(tmp_path / "league")])


def test_an_error_that_is_no_number_is_the_largest(tmp_path: Path):
    row = row_of("8x64", 64, 2.0, 1.0)
    row["layers"]["sonicmoe"]["errors"] = {"out": 1e-3, "grad_x": math.nan, "grad_probs": 2e-3}
    assert "| sonicmoe | nan | 1 of 1 | 0 |" in peers_report.page([row])


def test_pages_and_pictures_of_names_with_dots(tmp_path: Path):
    record = tmp_path / "peers.jsonl"
    record.write_text(json.dumps(row_of("8x64", 64, 2.0, 1.0)) + "\n")
    for name in ("v1.1", "v1.2"):
        assert peers_report.main([str(record), "--out", str(tmp_path / name)]) == 0
    made = {f"{name}.{ending}" for name in ("v1.1", "v1.2") for ending in ("md", "png", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == {*made, "peers.jsonl"}


def test_shapes_have_experts_of_every_width():
    assert len(ALL) == sum(map(len, GROUPS.values())) == 28
    widths = [shape.intermediate for shape in GROUPS["between"].values()]
    assert any(width < 512 for width in widths)
    assert any(512 <= width < 1024 for width in widths)
    assert any(width >= 1024 for width in widths)
