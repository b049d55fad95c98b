"""The calibration command, as a user runs it on 2 ranks, and what it refuses."""

import contextlib
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.measured.__main__ import main
from flashmoe_megatron.measured.calibration import read_entries
from flashmoe_megatron.measured.two_gpus import measure
from flashmoe_megatron.telemetry.totals import Totals
from tests.distributed import RankPool
from tests.programs import run_python
from tests.unit import cases

LAYER = [
    "--hidden",
    "64",
    "--intermediate",
    "128",
    "--num-experts",
    "4",
    "--topk",
    "2",
    "--tokens",
    "48",
    "--gated",
]
QUICK = [*LAYER, "--dtype", "float32", "--iterations", "2", "--grads", "own"]


def test_a_layer_is_measured_on_two_ranks(tmp_path: Path, with_torch: Path) -> None:
    file = tmp_path / "t2.json"
    program = ("-m", "flashmoe_megatron.calibrate", file)
    done = run_python(*program, *QUICK, ranks=2, forked_from=with_torch)
    first = read_entries(file)
    assert [entry.direction for entry in first] == ["forward", "backward"]
    for entry in first:
        assert entry.time_ms > 0
        assert (entry.hidden, entry.num_tokens, entry.gpu) == (64, 48, "cpu")
        assert (entry.bounded, entry.keep, entry.grads) == (False, "all", "own")
        assert f"{entry.time_ms:.4f} ms: {entry.describe()}" in done.stdout
    other = ["--topk", "1", "--row-bound", "1.5", "--keep", "inputs", "--grads", "main_grad"]
    other += ["--activation", "quick_gelu", "--clamp-value", "7", "--linear-offset", "1"]
    other += ["--glu-interleave", "8"]
    run_python(*program, *QUICK, *other, ranks=2, forked_from=with_torch)
    second = read_entries(file)
    assert second[:2] == first
    assert [entry.topk for entry in second[2:]] == [1, 1]
    for entry in second[2:]:
        assert (entry.bounded, entry.keep, entry.grads) == (True, "inputs", "main_grad")
        assert (entry.clamp_value, entry.linear_offset, entry.glu_interleave) == (7, 1, 8)
        assert "quick_gelu clamp_value=7 linear_offset=1 glu_interleave=8, 48" in entry.describe()


ITERATIONS = 3


def launches_that_are_averaged(group: dist.ProcessGroup) -> list[str]:
    """The directions of the launches that a rank adds up."""
    layer = FlashMoELayer(
        cases.make_config(num_ranks=2), group=group, device="cpu", dtype=torch.float32
    )
    added = []
    add = Totals.add
    with mock.patch.object(
        Totals, "add", lambda totals, record: (added.append(record.direction), add(totals, record))
    ):
        measure(layer, num_tokens=16, iterations=ITERATIONS)
    return added


def test_launches_that_warm_up_are_not_averaged() -> None:
    """The first ones load kernels and make tables, which T(2) must not contain."""
    want = ["forward", "backward"] * ITERATIONS
    with contextlib.closing(RankPool(2)) as world:
        assert world.run(launches_that_are_averaged) == [want] * 2


@pytest.mark.parametrize(
    ("ranks", "changes", "words"),
    [
        (None, [], "no ranks, wanted 2"),
        ("4", [], "4 ranks, wanted 2"),
        ("2", ["--iterations", "0"], "--iterations 0: wanted 1 to 80"),
        ("2", ["--row-bound", "0.5"], "row_bound=0.5: wanted a number of at least 1"),
        ("2", ["--row-bound", "auto"], "--row-bound auto: wanted the bound that the run will"),
        ("2", ["--hidden", "65"], "hidden=65: must be an int, a positive multiple"),
        ("2", ["--num-experts", "3"], "num_experts=3: must be an int, a positive multiple"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    ranks: str | None,
    changes: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    assert main(["layer", str(tmp_path / "t2.json"), *QUICK, *changes]) == 1
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_without_a_folder_is_refused_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["layer", str(tmp_path / "times" / "t2.json"), *QUICK]) == 1
    assert f"there is no folder {tmp_path / 'times'}" in capsys.readouterr().err


def test_another_file_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = tmp_path / "results.json"
    file.write_text("{}")
    assert main(["layer", str(file), *QUICK]) == 1
    assert "wanted an object of format, version and entries" in capsys.readouterr().err
    assert file.read_text() == "{}"
