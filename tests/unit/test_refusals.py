"""Whatever one rank's call refuses ends that call on every rank, and the group goes on in step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import errors
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import Together
from flashmoe_megatron.layer import FlashMoELayer, moe_forward
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights
from tests.distributed import RankPool
from tests.unit import cases

TOKENS, TOPK = 12, 2

Call = dict[str, torch.Tensor]


def with_value(call: Call, name: str, value: float) -> Call:
    call[name] = call[name].clone()
    call[name][7, 1] = value
    return call


BAD: dict[str, tuple[Callable[[Call], Call], type[Exception], str]] = {
    "expert id": (
        lambda call: with_value(call, "topk_idx", 10_000),
        errors.RoutingError,
        "topk_idx[7, 1] is 10000, wanted an expert id of 0 to 5, or -1 to skip",
    ),
    "NaN": (
        lambda call: with_value(call, "topk_weight", float("nan")),
        errors.RoutingError,
        "topk_weight[7, 1] is NaN, wanted a number",
    ),
    "tokens": (
        lambda call: {name: torch.cat([value] * 10) for name, value in call.items()},
        errors.ShapeError,
        "x has 120 tokens, the layer was built for at most max_tokens=64 per rank",
    ),
    "dtype": (
        lambda call: {**call, "x": call["x"].double()},
        errors.ShapeError,
        "x is torch.float64, wanted torch.float32, the dtype of the experts' weights",
    ),
    "width": (
        lambda call: {**call, "x": call["x"][:, :32].contiguous()},
        errors.ShapeError,
        "x has shape (12, 32), wanted [..., num_tokens, 64]",
    ),
    "no tensor": (
        lambda call: {**call, "topk_idx": [1.0]},  # type: ignore[dict-item]
        errors.ShapeError,
        "topk_idx is a list, wanted a torch.Tensor",
    ),
}


def make_call(rank: int) -> Call:
    generator = cases.generator(rank)
    x = torch.randn(TOKENS, 64, generator=generator)
    ids = torch.rand(TOKENS, 6, generator=generator).argsort(1)[:, :TOPK]
    return {"x": x, "topk_idx": ids, "topk_weight": torch.rand(TOKENS, TOPK, generator=generator)}


def make_layer(group: dist.ProcessGroup, **options: Any) -> FlashMoELayer:
    num_ranks = dist.get_world_size(group)
    config = cases.make_config(num_ranks=num_ranks, num_experts=6, topk=TOPK, max_tokens=64)
    torch.manual_seed(3)
    return FlashMoELayer(config, group=group, device="cpu", dtype=torch.float32, **options)


def told_by(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - its class is what is tested
        return type(error).__name__, str(error)
    raise AssertionError("the call was not refused")


def refuse(group: dist.ProcessGroup, name: str, refusing: tuple[int, ...], options: Any) -> Any:
    """Makes a call that some ranks refuse between two that none does."""
    rank = dist.get_rank(group)
    layer = make_layer(group, **options)
    want = layer(**make_call(rank)).detach()
    call = make_call(rank)
    if rank in refusing:
        call = BAD[name][0](call)
    found = [told_by(lambda: layer(**call)) for _ in range(2)]
    out = layer(**make_call(rank))
    out.sum().backward()
    assert torch.equal(out, want)
    return found


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("options", [{}, {"row_bound": 4.0, "keep": "inputs"}], ids=str)
def test_every_rank_hears_what_one_refuses(ranks: RankPool, name: str, options: dict[str, Any]):
    _, kind, message = BAD[name]
    for found in ranks.run(refuse, name, (1,), options, num_ranks=3):
        for found_kind, text in found:
            assert found_kind == kind.__name__
            assert text.startswith(f"rank 1: {message}")


@pytest.mark.parametrize("refusing", [(0, 2), (0, 1, 2)], ids=str)
def test_several_ranks_refuse(ranks: RankPool, refusing: tuple[int, ...]):
    for rank, found in enumerate(ranks.run(refuse, "tokens", refusing, {}, num_ranks=3)):
        who = rank if rank in refusing else 0
        assert all(text.startswith(f"rank {who}: x has 120 tokens") for _, text in found)


def refuse_below_the_layer(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """Each way into a backend: by hand, by ``moe_forward`` and by the backend's own forward."""
    rank = dist.get_rank(group)
    layer = make_layer(group)
    backend = layer.backend
    assert isinstance(backend, ReferenceBackend)
    local = [getattr(layer, name).to_local().detach() for name in ("fc1", "fc2")]
    weights = ExpertWeights((local[0],), (local[1],))
    call = make_call(rank)
    probs = torch.rand(TOKENS, 6)
    chosen = torch.zeros(TOKENS, 6, dtype=torch.bool)
    bad = weights if rank != 1 else ExpertWeights((local[0][:1],), (local[1],))

    def by_hand() -> None:
        with Together(backend):
            if rank == 1:
                raise RuntimeError("no room")
            backend.forward(call["x"], probs, chosen, weights, training=False)

    return [
        told_by(by_hand),
        told_by(lambda: moe_forward(**call, weights=bad, backend=backend)),
        told_by(lambda: backend.forward(call["x"], probs, chosen, bad, training=True)),
    ]


def test_every_way_into_a_backend_ends_together(ranks: RankPool):
    for rank, (by_hand, *others) in enumerate(ranks.run(refuse_below_the_layer, num_ranks=2)):
        if rank == 1:
            assert by_hand == ("RuntimeError", "no room")
        else:
            assert by_hand == ("FlashMoEError", "rank 1: RuntimeError: no room")
        wanted = "rank 1: 1 fc1 weights, wanted one for each of the 3 local experts"
        assert others == [("ShapeError", wanted)] * 2


def refuse_in_backward(group: dist.ProcessGroup, kind: str) -> Any:
    """Rank 1 has a ``main_grad`` that cannot be written, for one backward."""
    rank = dist.get_rank(group)
    layer = make_layer(group, backend=kind)
    stacks = [getattr(layer, name).to_local().detach().requires_grad_() for name in ("fc1", "fc2")]
    weights = ExpertWeights((stacks[0],), (stacks[1],))
    call = {name: value.contiguous() for name, value in make_call(rank).items()}
    x = call.pop("x").requires_grad_()
    probs = call["topk_weight"].requires_grad_()

    def step() -> None:
        x.grad = probs.grad = None
        moe_apply(
            layer.backend, x, None, None, weights, accumulate_into_main_grad=True, **call
        ).sum().backward()

    def reset() -> None:
        for stack in stacks:
            stack.main_grad = torch.zeros_like(stack)  # type: ignore[attr-defined]

    reset()
    step()
    want = [stack.main_grad for stack in stacks]  # type: ignore[attr-defined]
    reset()
    if rank == 1:
        stacks[0].main_grad = torch.zeros(3, 2, 2)  # type: ignore[attr-defined]
    step()
    grads = x.grad, probs.grad, *(stack.main_grad for stack in stacks)  # type: ignore[attr-defined]
    spoiled = [bool(one.isnan().all()) for one in grads]  # type: ignore[union-attr]
    told = told_by(step)
    reset()
    step()
    same = [torch.equal(got.main_grad, one) for got, one in zip(stacks, want, strict=True)]  # type: ignore[attr-defined]
    return spoiled, told, same


@pytest.mark.parametrize("kind", ["reference", "scheduled"])
def test_a_backward_that_one_rank_refuses_is_told_by_the_next_forward(ranks: RankPool, kind: str):
    for rank, (spoiled, told, same) in enumerate(ranks.run(refuse_in_backward, kind, num_ranks=2)):
        assert spoiled == [rank == 1] * 4
        assert told[0] == "ShapeError"
        assert told[1].startswith("rank 1: a weight gradient has shape")
        assert all(same)


def test_one_rank_alone_raises_as_it_is():
    layer = FlashMoELayer(cases.make_config(num_ranks=1), device="cpu", dtype=torch.float32)
    with pytest.raises(errors.ShapeError, match=r"^x has shape \(4, 63\)"):
        layer(torch.zeros(4, 63), torch.zeros(4, 1).long(), torch.zeros(4, 1))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errors.PeerTimeoutError("late"), errors.PeerTimeoutError("rank 3: late")),
        (errors.FlashMoEError("a: b"), errors.FlashMoEError("rank 3: a: b")),
        (MemoryError(), errors.FlashMoEError("rank 3: MemoryError: ")),
    ],
    ids=str,
)
def test_what_is_told(error: Exception, told: errors.FlashMoEError):
    found = errors.told_error(3, errors.reason_of(error))
    assert (type(found), str(found)) == (type(told), str(told))
