"""Low-rank additions to experts' matrices: gradients of both factors, as by autograd over sums."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapted import AdaptedWeights
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import Keep
from flashmoe_megatron.errors import ShapeError
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.weights import ExpertWeights
from tests.distributed import RankPool
from tests.unit import cases
from tests.unit.separate import NAMES, make

RANK, SCALE = 3, 0.5
FORMS = ("shared", "stack", "each", "shared outer")
Tensors = tuple[torch.Tensor, ...]


def factors(form: str, matrices: Tensors, kind: str) -> tuple[Tensors, Tensors]:
    """Draws both factors for matrices of one projection, as leaves."""
    (outputs, inputs), num = matrices[0].shape, len(matrices)
    is_shared = {"down": form == "shared", "up": form == "shared"}
    if form == "shared outer":
        is_shared = {"down": kind == "fc1", "up": kind == "fc2"}
    found = {}
    for name, shape in (("down", (RANK, inputs)), ("up", (outputs, RANK))):
        if is_shared[name]:
            drawn: Tensors = (torch.randn(shape),)
        elif form == "each":
            drawn = tuple(torch.randn(shape) for _ in range(num))
        else:
            drawn = (torch.randn(num, *shape),)
        found[name] = tuple(one.to(matrices[0].dtype).requires_grad_() for one in drawn)
    return found["down"], found["up"]


def summed(matrices: Tensors, down: Tensors, up: Tensors) -> Tensors:
    """Adds factors up one expert at a time, for autograd to differentiate."""
    found = []
    for e, matrix in enumerate(matrices):
        a, b = (
            kind[e] if len(kind) > 1 else kind[0][e] if kind[0].dim() > 2 else kind[0]
            for kind in (down, up)
        )
        found.append(matrix + SCALE * (b @ a))
    return tuple(found)


def results(
    backend: Any, inputs: cases.Inputs, form: str, *, adapts: str, is_stack: bool = False
) -> list[dict[str, torch.Tensor]]:
    """The outputs and gradients with additions, and with sums that autograd has made."""
    rank, config = backend.rank, backend.config
    own = slice(rank * config.num_local_experts, (rank + 1) * config.num_local_experts)
    fc1, fc2 = tuple(inputs.fc1[own]), tuple(inputs.fc2[own])
    torch.manual_seed(0)
    found = []
    of_fc1 = factors(form, fc1, "fc1") if "fc1" in adapts else ((), ())
    of_fc2 = factors(form, fc2, "fc2") if "fc2" in adapts else ((), ())
    leaves = [*of_fc1[0], *of_fc1[1], *of_fc2[0], *of_fc2[1]]
    for joins in (True, False):
        for leaf in leaves:
            leaf.grad = None
        x, probs = (each[rank].clone().requires_grad_() for each in (inputs.x, inputs.probs))
        weights: ExpertWeights
        if joins:
            stacks = [(torch.stack(one),) if is_stack else one for one in (fc1, fc2)]
            weights = AdaptedWeights(
                *stacks,
                fc1_down=of_fc1[0],
                fc1_up=of_fc1[1],
                fc2_down=of_fc2[0],
                fc2_up=of_fc2[1],
                fc1_scale=SCALE,
                fc2_scale=SCALE,
            )
        else:
            sums = [
                summed(one, *of_one) if of_one[0] else one
                for one, of_one in ((fc1, of_fc1), (fc2, of_fc2))
            ]
            weights = ExpertWeights(*sums)
        out = moe_apply(backend, x, probs, inputs.routing_map[rank], weights)
        out.backward(inputs.grad_out[rank])
        named = {f"leaf {i}": leaf.grad for i, leaf in enumerate(leaves)}
        assert x.grad is not None
        assert probs.grad is not None
        got = {"out": out.detach(), "x": x.grad, "probs": probs.grad}
        found.append(got | {name: one for name, one in named.items() if one is not None})
        assert len(found[-1]) == 3 + len(leaves)
    return found


def assert_alike(found: list[dict[str, torch.Tensor]]) -> None:
    got, want = found
    for name, one in want.items():
        assert_close(name, got[name], one, rel_l2=1e-5)


@pytest.mark.parametrize("adapts", ["fc1", "fc2", "fc1 fc2"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_one_rank(name: str, form: str, adapts: str) -> None:
    config = cases.make_config(num_ranks=1, gated=True, activation="silu")
    inputs = cases.make_inputs(config, cases.uniform, [37], dtype=torch.float32)
    backend = make(name, config)
    assert_alike(results(backend, inputs, form, adapts=adapts, is_stack=form == "stack"))


@pytest.mark.parametrize("keep", ["preactivations", "inputs"])
def test_what_a_forward_keeps(keep: Keep) -> None:
    config = cases.make_config(num_ranks=1)
    inputs = cases.make_inputs(config, cases.uniform, [37], dtype=torch.float32)
    assert_alike(results(make("reference", config, keep=keep), inputs, "each", adapts="fc1 fc2"))


def on_ranks(group: dist.ProcessGroup, form: str) -> list[dict[str, torch.Tensor]]:
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.to_one_rank, [37, 20], dtype=torch.float32)
    return results(make("reference", config, group), inputs, form, adapts="fc1 fc2")


@pytest.mark.parametrize("form", ["shared", "stack"])
def test_two_ranks(ranks: RankPool, form: str) -> None:
    """One of the ranks has no rows, and its factors get gradients of zero."""
    for found in ranks.run(on_ranks, form, num_ranks=2):
        assert_alike(found)


def test_frozen_matrices_and_factors() -> None:
    """A frozen factor gets none, and matrices alone get theirs where no factor is trained."""
    config = cases.make_config(num_ranks=1)
    inputs = cases.make_inputs(config, cases.uniform, [37], dtype=torch.float32)
    fc1, fc2 = (
        tuple(one.clone().requires_grad_(is_fc1) for one in kind)
        for kind, is_fc1 in ((inputs.fc1, True), (inputs.fc2, False))
    )
    torch.manual_seed(0)
    down, up = factors("stack", fc2, "fc2")
    down[0].requires_grad_(False)
    backend = make("reference", config)
    weights = AdaptedWeights(fc1, fc2, fc2_down=down, fc2_up=up)
    out = moe_apply(backend, inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights)
    out.backward(inputs.grad_out[0])
    assert down[0].grad is None
    assert up[0].grad is not None
    assert up[0].grad.any()
    assert all(one.grad is not None and one.grad.any() for one in fc1)
    assert all(one.grad is None for one in fc2)
    counters = backend.weight_grads
    assert (counters.computed, counters.left_out) == (len(fc1) + 1, len(fc2) + 1)
    assert counters.buffer_bytes == sum(one.nbytes for one in (*fc1, *fc2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fc1_down": 5}, r"fc1_down is \(3, 5\), wanted \(rank, 64\)"),
        ({"fc1_up": 5}, r"fc1_up is \(5, 3\), wanted \(\d+, rank\)"),
        ({"rank": 2}, "fc1's factors have ranks 3 and 2"),
        ({"dtype": torch.bfloat16}, "fc1_down is torch.bfloat16 on cpu, wanted torch.float32"),
        ({"num": 2}, "fc1_down has 2 matrices, wanted one for all or one for each of"),
    ],
)
def test_factors_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    config = cases.make_config(num_ranks=1)
    inputs = cases.make_inputs(config, cases.uniform, [37], dtype=torch.float32)
    outputs, width = inputs.fc1[0].shape
    down = torch.zeros(RANK, change.get("fc1_down", width), dtype=change.get("dtype"))
    up = torch.zeros(change.get("fc1_up", outputs), change.get("rank", RANK))
    weights = AdaptedWeights(
        tuple(inputs.fc1), tuple(inputs.fc2), fc1_down=(down,) * change.get("num", 1), fc1_up=(up,)
    )
    with pytest.raises(ShapeError, match=words):
        moe_apply(
            make("reference", config), inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights
        )


@pytest.mark.parametrize("form", ["transposed", "split"])
def test_other_forms_of_matrices_are_refused(form: str) -> None:
    with pytest.raises(ShapeError, match=f"{form}=True"):
        AdaptedWeights((), (), **{form: True})
