"""What is frozen gets no product, no buffer and no kept rows; all else keeps its bits."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import GradCounters
from flashmoe_megatron.config import Keep
from flashmoe_megatron.data_parallel import prepare_for_ddp
from flashmoe_megatron.expert_group import local_part
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.separate.steps import Steps
from flashmoe_megatron.weights import ExpertWeights, SplitWeights
from tests.distributed import RankPool
from tests.unit import cases
from tests.unit.separate import NAMES, make

CONFIG = cases.make_config(num_ranks=1)
Found = dict[str, torch.Tensor | None]
IsFrozen = Callable[[str, int, int], bool]
"""Tells of a kind of weights, a rank and a local expert whether its weight is frozen."""

FROZEN: dict[str, IsFrozen] = {
    "nothing": lambda kind, rank, expert: False,
    "fc1": lambda kind, rank, expert: kind == "fc1",
    "fc2": lambda kind, rank, expert: kind == "fc2",
    "both": lambda kind, rank, expert: True,
    "an expert": lambda kind, rank, expert: expert == 1,
    "a rank": lambda kind, rank, expert: rank == 0,
    "fc1 on a rank": lambda kind, rank, expert: (kind, rank) == ("fc1", 0),
}


def step(
    backend: Any, inputs: cases.Inputs, is_frozen: IsFrozen, rank: int = 0, **form: bool
) -> Found:
    """Forward and backward with a parameter for each expert."""
    first = rank * backend.config.num_local_experts
    own = slice(first, first + backend.config.num_local_experts)
    kinds = {}
    for kind, weights in (("fc1", inputs.fc1[own]), ("fc2", inputs.fc2[own])):
        if form.get("transposed"):
            weights = [one.t().contiguous() for one in weights]
        kinds[kind] = [
            nn.Parameter(one.clone(), requires_grad=not is_frozen(kind, rank, expert))
            for expert, one in enumerate(weights)
        ]
    x, probs = (tensor[rank].clone().requires_grad_() for tensor in (inputs.x, inputs.probs))
    out = moe_apply(backend, x, probs, inputs.routing_map[rank], ExpertWeights(**kinds, **form))
    out.backward(inputs.grad_out[rank])
    grads = {
        f"{kind} {expert}": one.grad
        for kind, parameters in kinds.items()
        for expert, one in enumerate(parameters)
    }
    return {"out": out.detach(), "x": x.grad, "probs": probs.grad, **grads}


def assert_same_but(frozen: Collection[str], got: Found, want: Found) -> None:
    for name, one in got.items():
        if name in frozen:
            assert one is None, name
        else:
            assert torch.equal(one, want[name]), name


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Experts and rows of each product that gives gradients of weights."""
    seen: list[tuple[int, int]] = []
    original = Steps.weight_grad

    def weight_grad(
        self: Steps, left: torch.Tensor, right: torch.Tensor, ends: Any, counts: Any
    ) -> torch.Tensor:
        seen.append((len(counts), len(left)))
        return original(self, left, right, ends, counts)

    monkeypatch.setattr(Steps, "weight_grad", weight_grad)
    return seen


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
@pytest.mark.parametrize("what", [what for what in FROZEN if "rank" not in what])
@pytest.mark.parametrize("name", NAMES)
def test_one_rank(
    name: str, what: str, keep: Keep, transposed: bool, products: list[tuple[int, int]]
) -> None:
    inputs = cases.make_inputs(CONFIG, cases.uniform, [37], dtype=torch.float32)
    is_frozen, experts = FROZEN[what], range(CONFIG.num_experts)
    backend = make(name, CONFIG, keep=keep)
    want = step(backend, inputs, FROZEN["nothing"], transposed=transposed)
    rows_of_all, num_of_all = backend.weight_grads.row_bytes, sum(num for num, _ in products)
    products.clear()
    backend.weight_grads = GradCounters()
    got = step(backend, inputs, is_frozen, transposed=transposed)
    wanted = {
        kind: [not is_frozen(kind, 0, expert) for expert in experts] for kind in ("fc1", "fc2")
    }
    frozen = {f"{kind} {i}" for kind, each in wanted.items() for i in experts if not each[i]}
    assert_same_but(frozen, got, want)
    counters = backend.weight_grads
    assert (counters.computed, counters.left_out) == (2 * len(experts) - len(frozen), len(frozen))
    assert sum(num for num, _ in products) == num_of_all - len(frozen)
    made = sum(
        weight.nbytes
        for kind, weights in (("fc1", inputs.fc1), ("fc2", inputs.fc2))
        for weight, is_wanted in zip(weights, wanted[kind], strict=True)
        if is_wanted
    )
    assert counters.buffer_bytes == made
    assert counters.row_bytes == (rows_of_all if any(wanted["fc1"]) else 0)
    assert (rows_of_all > 0) == (keep == "all")


def step_on_ranks(
    group: dist.ProcessGroup, name: str, keep: Keep, what: str, slots: int
) -> tuple[Found, Found]:
    rank = dist.get_rank(group)
    config = cases.make_config(num_ranks=2)
    backend = make(name, config, group, keep=keep, **({"spare_slots": slots} if slots else {}))
    inputs = cases.make_inputs(config, cases.to_one_rank, [37, 20], dtype=torch.float32)
    found = [step(backend, inputs, FROZEN[one], rank) for one in (what, "nothing")]
    return found[0], found[1]


@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
@pytest.mark.parametrize("what", ["both", "an expert", "a rank", "fc1 on a rank"])
@pytest.mark.parametrize("form", ["reference", "scheduled", "slots"])
def test_several_ranks(ranks: RankPool, form: str, what: str, keep: Keep) -> None:
    """Ranks may differ in what is frozen: none waits for another's rows or gradients."""
    name, slots = ("reference", 1) if form == "slots" else (form, 0)
    results = ranks.run(step_on_ranks, name, keep, what, slots, num_ranks=2)
    for rank, (got, want) in enumerate(results):
        frozen = {
            key
            for key in want
            if key.startswith("fc") and FROZEN[what](key[:3], rank, int(key[4:]))
        }
        assert_same_but(frozen, got, want)


@pytest.mark.parametrize("slots", [0, 1], ids=["apart", "joined"])
@pytest.mark.parametrize(
    "frozen", [("gate",), ("up",), ("gate", "up"), ("down", "fc1_bias")], ids="-".join
)
def test_gate_and_up_projections_of_their_own(frozen: tuple[str, ...], slots: int) -> None:
    """They are one product, whose other half is dropped where one of them is frozen."""
    config = cases.make_config(num_ranks=1, gated=True, activation="silu")
    inputs = cases.make_inputs(config, cases.uniform, [37], dtype=torch.float32)
    gate, up = torch.stack(inputs.fc1).chunk(2, dim=1)
    down = torch.stack(inputs.fc2)
    stacks = {"gate": gate, "up": up, "down": down}
    stacks |= {"fc1_bias": inputs.fc1[0].new_ones(len(gate), 2 * gate.shape[1])}
    found = []
    backend = make("reference", config, spare_slots=slots)
    for chosen in (frozen, set()):
        tensors = {
            name: nn.Parameter(one.clone(), requires_grad=name not in chosen)
            for name, one in stacks.items()
        }
        x = inputs.x[0].clone().requires_grad_()
        weights = SplitWeights(**{name: (one,) for name, one in tensors.items()})
        out = moe_apply(backend, x, inputs.probs[0], inputs.routing_map[0], weights)
        out.backward(inputs.grad_out[0])
        found.append({"x": x.grad, **{name: one.grad for name, one in tensors.items()}})
    assert_same_but(frozen, *found)
    assert backend.weight_grads.left_out == len(frozen)


@pytest.mark.parametrize("frozen", ["fc1", "fc2", "fc1_bias", "fc2_bias"])
@pytest.mark.parametrize("name", NAMES)
def test_a_stack_of_one_expert(name: str, frozen: str) -> None:
    """A rank with one expert trains what is not frozen, as a rank with several does."""
    config = cases.make_config(num_ranks=1, num_experts=1, topk=1)
    inputs = cases.make_inputs(config, cases.uniform, [37], dtype=torch.float32)
    stacks = {"fc1": torch.stack(inputs.fc1), "fc2": torch.stack(inputs.fc2)}
    stacks |= {"fc1_bias": torch.ones(1, config.fc1_rows), "fc2_bias": torch.ones(1, config.hidden)}
    found = []
    for chosen in ((frozen,), ()):
        tensors = {
            kind: nn.Parameter(one.clone(), requires_grad=kind not in chosen)
            for kind, one in stacks.items()
        }
        x = inputs.x[0].clone().requires_grad_()
        weights = ExpertWeights(**{kind: (one,) for kind, one in tensors.items()})
        out = moe_apply(make(name, config), x, inputs.probs[0], inputs.routing_map[0], weights)
        out.backward(inputs.grad_out[0])
        found.append({"x": x.grad, **{kind: one.grad for kind, one in tensors.items()}})
    assert_same_but({frozen}, *found)


def test_a_merged_weight_gets_its_full_gradient() -> None:
    """A parametrized weight is no leaf, and autograd asks for its gradient as a whole."""
    layer = FlashMoELayer(CONFIG, device="cpu", dtype=torch.float32)
    for one in layer.parameters():
        one.requires_grad_(False)
    scale = nn.Parameter(torch.ones(1))

    class Scaled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * scale

    nn.utils.parametrize.register_parametrization(layer, "fc1", Scaled())
    inputs = cases.make_inputs(CONFIG, cases.uniform, [37], dtype=torch.float32)
    choices = cases.as_choices(CONFIG, inputs.probs[0], inputs.routing_map[0])
    layer(inputs.x[0], *choices).sum().backward()
    assert scale.grad is not None
    counters = layer.backend.weight_grads
    assert (counters.computed, counters.left_out) == (1, 1)
    assert counters.buffer_bytes == layer.fc1.nbytes
    assert counters.row_bytes > 0


def train(group: dist.ProcessGroup, wrapper: str, name: str) -> dict[str, Any]:
    """Trains behind a wrapper for three steps, of which the last two have all thawed."""
    world = dist.get_world_size(group)
    torch.manual_seed(0)
    if wrapper == "FSDP2":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("fsdp", "ep"))
        experts: Any = mesh["ep"]
    else:
        pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
        experts = pairs[dist.get_rank(group) // 2]
    config = cases.make_config(num_ranks=2)
    layer = FlashMoELayer(
        config, group=experts, router=True, device="cpu", dtype=torch.float32, backend=name
    )
    layer.fc1.requires_grad_(False)
    model: nn.Module = nn.Sequential(layer)
    if wrapper == "FSDP2":
        fully_shard(layer, mesh=mesh["fsdp"])
    else:
        model = DistributedDataParallel(
            prepare_for_ddp(model, group), process_group=group, find_unused_parameters=True
        )
    x = torch.randn(8, config.hidden, generator=torch.Generator().manual_seed(dist.get_rank(group)))
    found = {}
    for number in range(2):
        model(x).square().sum().backward()
        found[number] = (
            layer.fc1.grad is None,
            layer.fc2.grad is not None and bool(local_part(layer.fc2.grad).any()),
            layer.backend.weight_grads.left_out,
        )
        layer.zero_grad()
        layer.fc1.requires_grad_()
    return found


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_wrappers_and_thawing(ranks: RankPool, wrapper: str) -> None:
    """What thaws later gets a gradient from the next step on."""
    for found in ranks.run(train, wrapper, "reference"):
        assert found[0] == (True, True, 1)
        assert found[1] == (False, True, 1)
