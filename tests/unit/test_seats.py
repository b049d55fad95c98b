"""What layers of a framework share and say, by themselves."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters import experts, gradients
from flashmoe_megatron.adapters.experts import GroupBackends, LayerExperts
from flashmoe_megatron.adapters.gradients import LayerGradients
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.measured.fit import write_fit
from flashmoe_megatron.options import FrameworkOptions
from flashmoe_megatron.separate.slices import Window
from flashmoe_megatron.telemetry.record import MOST_OWNERS
from tests.distributed import RankPool, refusal
from tests.fits import make_fit
from tests.unit import cases

CPU = torch.device("cpu")


class Seat(LayerExperts):
    """A layer of no framework."""

    WAYS_OUT_OF_DTYPE = "wanted another"

    def locate(self) -> tuple[MoEConfig, GroupBackends]:
        raise NotImplementedError

    def allow_more(self, num_tokens: int) -> str:
        raise NotImplementedError


def agreed(group: dist.ProcessGroup) -> int:
    """What a rank has room for behind a call in which the other has more tokens."""
    backends = GroupBackends(None, CPU, FrameworkOptions(), None, group)
    backends.agree_on_tokens((900, 100)[dist.get_rank(group)])
    return backends.max_tokens


def test_ranks_that_share_experts_have_room_for_the_fullest_of_them(ranks: RankPool) -> None:
    assert ranks.run(agreed, num_ranks=2) == [1024, 1024]


def other_bounds(group: dist.ProcessGroup) -> str:
    max_tokens = (128, 256)[dist.get_rank(group)]
    backends = GroupBackends(group, CPU, FrameworkOptions(), max_tokens)
    shape = cases.make_config(num_ranks=2)
    return refusal(group, lambda _: backends.backend_of(shape, torch.float32))


def test_ranks_with_other_bounds_of_tokens_hear_of_it(ranks: RankPool) -> None:
    """Their memory would be laid out in other ways."""
    said = "ConfigError: the ranks disagree on max_tokens: 128 on rank 0, 256 on rank 1; wanted one"
    assert all(one.startswith(said) for one in ranks.run(other_bounds, num_ranks=2))


def test_every_layer_has_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of number 0 are nobody's, also when numbers have gone round."""
    numbers = itertools.chain((0, 1), itertools.count(MOST_OWNERS - 2))
    monkeypatch.setattr(experts, "_layers_made", numbers)
    owners = [Seat(None, torch.float32).owner for _ in range(6)]
    assert owners == [1, 2, MOST_OWNERS - 1, 1, 2, 3]


@pytest.mark.parametrize(("keep", "asked"), [("inputs", "inputs"), ("auto", None)])
def test_a_calibration_is_of_what_all_layers_keep(
    keep: Any, asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they keep different things no file can be of all of them."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(experts, "load_calibration", lambda *_, **named: given.update(named))
    monkeypatch.setattr(
        experts,
        "choose_keep",
        lambda word, shape: ("all" if shape.hidden == 64 else "inputs") if word == "auto" else word,
    )
    settings = FrameworkOptions(keep=keep, calibration="a file", row_bound=2.0)
    shapes = [cases.CONFIG, cases.make_config(hidden=128)]
    experts._own_calibration(settings, shapes, CPU, torch.bfloat16, "written")
    assert given["keep"] == asked
    assert (given["bounded"], given["dtype"]) == (True, "bfloat16")


def test_what_is_planned_of_a_reduction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are of the last layer first: its own, then what is computed before it."""
    path = tmp_path / "fit.json"
    write_fit(path, make_fit(2, 2, product=(0, 1e-12), all_reduce=(2e-6, 1e-9)))
    seen: list[Window] = []
    slices = [5000.0, 70.0, 9000.0, 0.0, 11.0]

    def cut(windows: list[Window], _: object) -> list[float]:
        seen.extend(windows)
        return slices

    monkeypatch.setattr(gradients, "cut_gradients", cut)
    shape = cases.make_config(num_ranks=4)
    backend: Any = SimpleNamespace(config=shape, keep="all", within=None)
    layers = [
        LayerGradients(number, backend, torch.float32, 1000, 64, 128, 5_000 * (number + 1))
        for number in (0, 1)
    ]
    settings = FrameworkOptions(degree_fit=str(path), slice_gradients=True, max_tokens=1000)
    plan = gradients._planned(layers, settings, HostGrid(2, 2, 0), CPU, "all_reduce")
    assert plan.in_gap == {1: 5000.0, 0: 9000.0}
    assert plan.beside == {1: 70.0, 0: 0.0}
    # 11 bytes take 2 us as 2,000 do: smaller pieces cost more than they hide.
    assert plan.piece_bytes == pytest.approx(2000, abs=1)
    assert [window.ready for window in seen] == [128, 64, 128, 64, 128]
    for window, number in ((seen[1], 1), (seen[3], 0)):
        # Two products of two operations each, for the gradients of inputs and of weights.
        seconds = 4 * 1000 * 5_000 * (number + 1) * 1e-12
        assert window.cost_s(seconds) == 0
        assert window.cost_s(2 * seconds) == pytest.approx(seconds)
    slices[:] = [5000.0, 7000.0, 9000.0, 0.0, 8000.0]
    plan = gradients._planned(layers, settings, HostGrid(2, 2, 0), CPU, "all_reduce")
    assert plan.piece_bytes == 5000
