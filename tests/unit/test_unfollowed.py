"""A backward that some ranks do not have is refused by name, and the group goes on in step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import Backend
from flashmoe_megatron.errors import FlashMoEError
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.ranks import UNFOLLOWED, unfollowed_ranks
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights
from tests.distributed import RankPool
from tests.unit import cases
from tests.unit.test_hosts import make_backend as over_hosts

WAYS = ("no_grad", "frozen", "eval")
TOKENS = {2: [37, 20], 4: [9, 0, 33, 16]}


@dataclass(frozen=True)
class Case:
    """A backend, and who has no backward.

    Attributes:
        kind: The backend's name, or how many hosts there are.
        without: The ranks that have none.
        options: The backend's.
    """

    kind: str
    without: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, group: dist.ProcessGroup, config: Any) -> Backend:
        options = BackendOptions(**self.options)
        if self.kind == "reference":
            return ReferenceBackend(config, group, options=options)
        if self.kind == "scheduled":
            grid = HostGrid(2, 2, dist.get_rank(group)) if config.num_ranks == 4 else None
            return ScheduledBackend(config, group, options=options, grid=grid, degrees=(2, 3))
        return over_hosts(group, config, int(self.kind), **self.options)


class Layer:
    """One rank's tokens and experts, whose calls train or not."""

    def __init__(self, backend: Backend, inputs: cases.Inputs, rank: int) -> None:
        self.backend, self.rank, self.inputs = backend, rank, inputs
        self.leaves: list[torch.Tensor] = []

    def forward(self, way: str = "trains") -> torch.Tensor:
        """Calls with new leaves; ``way`` says why no backward follows."""
        config, inputs, rank = self.backend.config, self.inputs, self.rank
        first = rank * config.num_local_experts
        experts = slice(first, first + config.num_local_experts)
        own = (inputs.x[rank], inputs.probs[rank], *inputs.fc1[experts], *inputs.fc2[experts])
        needs = way in ("trains", "no_grad", "experts")
        self.leaves = [one.clone().requires_grad_(needs) for one in own]
        x, probs = self.leaves[:2]
        if way == "experts":  # as where all else is frozen
            x, probs = x.detach(), probs.detach()
        count = config.num_local_experts
        weights = ExpertWeights(tuple(self.leaves[2 : 2 + count]), tuple(self.leaves[2 + count :]))
        with torch.inference_mode() if way == "eval" else torch.set_grad_enabled(way != "no_grad"):
            return moe_apply(self.backend, x, probs, inputs.routing_map[rank], weights)

    def step(self) -> list[torch.Tensor]:
        """Trains on all ranks: the output and all gradients."""
        out = self.forward()
        out.backward(self.inputs.grad_out[self.rank])
        return [out.detach(), *(one.grad for one in self.leaves if one.grad is not None)]


def told_by(call: Callable[[], object]) -> str:
    try:
        call()
    except FlashMoEError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the call was not refused")


def disagree(
    group: dist.ProcessGroup, case: Case, inputs: cases.Inputs, ways: tuple[str, ...]
) -> list[str]:
    """What each rank is told, way by way."""
    rank = dist.get_rank(group)
    config = cases.make_config(num_ranks=dist.get_world_size(group), max_tokens=64)
    layer = Layer(case.make(group, config), inputs, rank)
    want = layer.step()
    said = []
    has_backward = rank not in case.without
    for way in ways:
        mine = ("experts" if way == "frozen" else "trains") if has_backward else way
        calls = []
        for _ in range(2):  # micro-batches
            calls.append((layer.forward(mine), layer.leaves))
            assert torch.equal(calls[-1][0], want[0]), "a forward alone is right"
            assert layer.backend.unfollowed == case.without
        if has_backward:
            said += [told_by(out.sum().backward) for out, _ in reversed(calls)]
            assert all(one.grad is None for _, leaves in calls for one in leaves)
        said.append(told_by(layer.forward))
        for got, value in zip(layer.step(), want, strict=True):
            assert torch.equal(got, value), "all agree again"
        layer.forward(mine)  # nobody begins a backward of it
        for got, value in zip(layer.step(), want, strict=True):
            assert torch.equal(got, value)
    return said


def check_said(found: list[list[str]], case: Case, *, num_ways: int) -> None:
    """Everyone names who has none; whoever has none hears the first of the others."""
    names = ", ".join(map(str, case.without))
    first = min(set(range(len(found))) - set(case.without))
    for rank, said in enumerate(found):
        is_without = rank in case.without
        assert len(said) == num_ways * (1 if is_without else 3)
        for text in said:
            assert text.startswith(
                f"ConfigError: rank {first if is_without else rank}: this rank has a backward"
            )
            assert f"none follows this forward on rank {names}, where grad mode was off" in text
            assert "(x.requires_grad_())" in text


CASES = {
    **{
        f"{kind}-{num_ranks}-{keep}": (num_ranks, Case(kind, without, {"keep": keep}))
        for kind in ("reference", "scheduled")
        for num_ranks, without in ((2, (1,)), (4, (0, 2)))
        for keep in ("all", "inputs", "preactivations")
    },
    "replicas": (4, Case("reference", (1, 2), {"spare_slots": 1, "placement": "launch"})),
    "bound": (2, Case("reference", (0,), {"row_bound": 9.0})),
    "scheduled-bound": (2, Case("scheduled", (0,), {"row_bound": 9.0})),
    "two steps": (4, Case("scheduled", (3,), {"exchange": "2dh", "row_bound": 9.0})),
    "hosts": (4, Case("2", (0, 3))),
    "hosts-inputs": (4, Case("4", (2,), {"keep": "inputs"})),
    "hosts-bound": (4, Case("2", (1,), {"row_bound": 1e6})),
    "hosts-overlap": (4, Case("2", (1,), {"host_overlap": 2})),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_without_a_backward_are_named(ranks: RankPool, name: str) -> None:
    num_ranks, case = CASES[name]
    config = cases.make_config(num_ranks=num_ranks)
    inputs = cases.make_inputs(config, cases.skewed, TOKENS[num_ranks], dtype=torch.float32)
    ways = WAYS if case.options.get("keep") == "inputs" else WAYS[:2]
    found = ranks.run(disagree, case, inputs, ways, num_ranks=num_ranks)
    check_said(found, case, num_ways=len(ways))


def refuse_as_well(group: dist.ProcessGroup, kind: str, inputs: cases.Inputs) -> list[str]:
    """Rank 1 has no backward and rank 0 or 1 refuses its call: the refusal is what all hear."""
    rank = dist.get_rank(group)
    config = cases.make_config(num_ranks=2, max_tokens=64)
    layer = Layer(Case(kind, (1,)).make(group, config), inputs, rank)
    good = inputs.routing_map[rank]
    said = []
    for refusing in (0, 1):
        if rank == refusing:
            inputs.routing_map[rank] = torch.ones_like(good)
        said.append(told_by(lambda: layer.forward("no_grad" if rank == 1 else "trains")))
        inputs.routing_map[rank] = good
    layer.step()
    return said


@pytest.mark.parametrize("kind", ["reference", "scheduled"])
def test_a_rank_without_a_backward_hears_and_tells_refusals(ranks: RankPool, kind: str) -> None:
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.skewed, TOKENS[2], dtype=torch.float32)
    for said in ranks.run(refuse_as_well, kind, inputs, num_ranks=2):
        for refusing, text in enumerate(said):
            assert text.startswith(f"RoutingError: rank {refusing}: token 0 selects 8 experts")


def share_experts(group: dist.ProcessGroup, inputs: cases.Inputs) -> list[str]:
    """Rank 3 of four, whose experts rank 2 shares, has no backward: [0, 2] and [1, 3] exchange."""
    rank = dist.get_rank(group)
    place, part = rank // 2, rank % 2
    made = [dist.new_group(members) for members in ([0, 2], [1, 3], [0, 1], [2, 3])]
    try:
        config = cases.make_config(num_ranks=2, max_tokens=64)
        backend = ScheduledBackend(config, made[part], degrees=(2, 2), tensor_group=made[2 + place])
        layer = Layer(backend, inputs, place)
        want = layer.step()
        out = layer.forward("no_grad" if rank == 3 else "trains")
        assert torch.equal(out, want[0])
        said = [] if rank == 3 else [told_by(out.sum().backward)]
        said.append(told_by(layer.forward))
        for got, value in zip(layer.step(), want, strict=True):
            assert torch.equal(got, value)
        return said
    finally:
        for one in made:
            if one is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(one)


def test_ranks_that_share_experts_hear_of_each_other(ranks: RankPool) -> None:
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.skewed, TOKENS[2], dtype=torch.float32)
    for rank, said in enumerate(ranks.run(share_experts, inputs)):
        assert len(said) == (1 if rank == 3 else 2)
        assert all("none follows this forward on rank 1," in text for text in said)


def test_one_rank_needs_nobody() -> None:
    """It tells nobody, and evaluates between a forward and its backward."""
    config = cases.make_config()
    inputs = cases.make_inputs(config, cases.skewed, [20], dtype=torch.float32)
    for make in (ReferenceBackend, ScheduledBackend):
        layer = Layer(make(config), inputs, 0)
        want = layer.step()
        out, leaves = layer.forward(), layer.leaves
        assert torch.equal(layer.forward("no_grad"), want[0])
        out.backward(inputs.grad_out[0])
        for got, value in zip([out.detach(), *(one.grad for one in leaves)], want, strict=True):
            assert torch.equal(got, value)


def test_counts_keep_room_for_the_mark() -> None:
    """A mark is none of a number of rows, and a refusal is a refusal with and without it."""
    most = 2**31 - 1
    marked = [UNFOLLOWED, UNFOLLOWED + most, UNFOLLOWED - 1]
    assert unfollowed_ranks([0, most, -1, *marked]) == (3, 4, 5)
