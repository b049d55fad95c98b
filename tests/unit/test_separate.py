"""Separate kernels by both names, "reference" and "scheduled", against the oracle."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import TrafficCounters
from flashmoe_megatron.config import TILE_M, Activation, MoEConfig
from flashmoe_megatron.errors import RoutingError, RowBoundError, ShapeError
from flashmoe_megatron.layer import moe_forward, moe_router_forward
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.distributed import RankPool
from tests.operators import Operators, gradients, saving
from tests.unit import cases
from tests.unit.separate import NAMES, ROUTINGS, TOKENS, Found, compare, make, oracle, run

by_names = pytest.mark.parametrize("name", NAMES)


def run_rank(
    group: dist.ProcessGroup,
    config: MoEConfig,
    inputs: cases.Inputs,
    wants: list[Found] | None = None,
    form: dict[str, bool] | None = None,
) -> dict[str, tuple[Found, TrafficCounters]]:
    """One rank's results by both names, each compared with what is wanted."""
    rank, results = dist.get_rank(group), {}
    for name in NAMES:
        backend = make(name, config, group if config.num_ranks > 1 else None)
        found = run(backend, inputs, rank=rank, **form or {})
        results[name] = found, backend.traffic
        if wants is not None:
            compare(found, wants[rank], inputs.x[0].dtype)
    return results


def check(
    ranks: RankPool, config: MoEConfig, inputs: cases.Inputs, **form: bool
) -> dict[str, list[TrafficCounters]]:
    """Compares all outputs and gradients of all ranks; returns what each rank sent by each name."""
    wants = oracle(config, inputs)
    results = ranks.run(run_rank, config, inputs, wants, form, num_ranks=config.num_ranks)
    return {name: [of_rank[name][1] for of_rank in results] for name in NAMES}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.__name__)
def test_routing(ranks: RankPool, routing: cases.Routing, num_ranks: int):
    config = cases.make_config(num_ranks=num_ranks)
    inputs = cases.make_inputs(config, routing, TOKENS[num_ranks], dtype=torch.float32)
    check(ranks, config, inputs)


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_rank_by_any_degree_and_form(routing: cases.Routing, dtype: torch.dtype):
    config = cases.make_config()
    inputs = cases.make_inputs(config, routing, [37], dtype=dtype)
    (want,) = oracle(config, inputs)
    for name, degrees in (("reference", ()), *(("scheduled", d) for d in ((1, 1), (2, 3), (5, 1)))):
        for keep in ("all", "preactivations", "inputs"):
            parts = {"degrees": degrees} if degrees else {}
            backend = make(name, config, keep=keep, **parts)
            first = run(backend, inputs)
            compare(first, want, dtype)
        for form in ({"as_indices": True}, {"is_stacked": False}, {"transposed": True}):
            compare(run(backend, inputs, **form), want, dtype)
        again = run(backend, inputs)
        assert all(torch.equal(again[one], value) for one, value in first.items())


def kept(group: dist.ProcessGroup, config: MoEConfig, inputs: cases.Inputs, name: str) -> None:
    rank, found = dist.get_rank(group), []
    for keep in ("all", "preactivations", "inputs"):
        found.append(run(make(name, config, group, keep=keep), inputs, rank=rank, is_stacked=False))
    for other in found[1:]:
        assert all(torch.equal(other[what], value) for what, value in found[0].items())


@by_names
def test_what_is_not_kept_is_the_same_again(ranks: RankPool, name: str):
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.skewed, TOKENS[2], dtype=torch.float32)
    ranks.run(kept, config, inputs, name, num_ranks=2)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activation(ranks: RankPool, dtype: torch.dtype, activation: Activation, gated: bool):
    config = cases.make_config(
        num_ranks=2, activation=activation, gated=gated, hidden=128, intermediate=192
    )
    inputs = cases.make_inputs(config, cases.uniform, [40, 23], dtype=dtype)
    check(ranks, config, inputs)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("interleave", [0, 1, 32])
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.QUICK_GELU])
def test_clamped_and_interleaved(
    ranks: RankPool, activation: Activation, interleave: int, transposed: bool
):
    form = {**cases.GPT_OSS, "activation": activation, "glu_interleave": interleave}
    config = cases.make_config(num_ranks=2, hidden=128, intermediate=192, **form)
    inputs = cases.make_inputs(config, cases.uniform, [40, 23], dtype=torch.float32)
    check(ranks, config, inputs, transposed=transposed)


@pytest.mark.parametrize("topk", range(1, 9))
def test_topk(ranks: RankPool, topk: int):
    config = cases.make_config(num_ranks=2, topk=topk)
    check(ranks, config, cases.make_inputs(config, cases.uniform, [11, 30], dtype=torch.float32))


@pytest.mark.parametrize("rows", [1, TILE_M - 1, TILE_M, TILE_M + 1])
def test_rows_of_one_expert_around_a_tile(ranks: RankPool, rows: int):
    config = cases.make_config(num_ranks=2, topk=1)
    from_rank0 = rows // 3
    inputs = cases.make_inputs(
        config, cases.to_one_expert, [from_rank0, rows - from_rank0], dtype=torch.float32
    )
    traffic = check(ranks, config, inputs)
    # Forward and backward pad the one segment once, in the receiver's memory.
    assert [one.pad_rows_local for one in traffic["reference"]] == [0, -rows % TILE_M]
    assert [one.pad_rows_local for one in traffic["scheduled"]] == [0, 0]


def test_bfloat16_probs(ranks: RankPool):
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.uniform, [37, 20], dtype=torch.bfloat16)
    inputs.probs = [probs.bfloat16() for probs in inputs.probs]
    check(ranks, config, inputs)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_transposed_weights(ranks: RankPool, num_ranks: int):
    config = cases.make_config(num_ranks=num_ranks, intermediate=128)
    inputs = cases.make_inputs(config, cases.uniform, TOKENS[num_ranks], dtype=torch.float32)
    check(ranks, config, inputs, transposed=True, is_stacked=False)


def test_no_tokens_anywhere(ranks: RankPool):
    config = cases.make_config(num_ranks=2)
    check(ranks, config, cases.make_inputs(config, cases.uniform, [0, 0], dtype=torch.float32))


def test_traffic_counts_payload_alone(ranks: RankPool):
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.with_dropped_tokens, [37, 20], dtype=torch.bfloat16)
    traffic = check(ranks, config, inputs)
    half = config.num_local_experts
    to_other = [
        int(inputs.routing_map[0][:, half:].sum()),
        int(inputs.routing_map[1][:, :half].sum()),
    ]
    received = [
        sum(routing_map[:, experts].sum(0) for routing_map in inputs.routing_map).tolist()
        for experts in (slice(0, half), slice(half, None))
    ]
    for name in NAMES:
        for rank, counters in enumerate(traffic[name]):
            # Each remote route crosses twice in each direction of the layer: out by its token's
            # rank, back by its expert's rank; its float32 weight goes out and its gradient back.
            sent, returned = to_other[rank], to_other[1 - rank]
            pads = sum(-rows % TILE_M for rows in received[rank])
            assert counters == TrafficCounters(
                rows_sent=2 * (sent + returned),
                bytes_sent=2 * (sent + returned) * config.hidden * 2 + (sent + returned) * 4,
                pad_rows_sent=0,
                pad_rows_local=pads if name == "reference" else 0,
            )


def test_fillers_of_padded_capacity_are_not_sent(ranks: RankPool):
    config = cases.make_config(num_ranks=2, skip_zero_probs=True)
    inputs = cases.make_inputs(config, cases.uniform, [37, 20], dtype=torch.float32)
    plain = ranks.run(run_rank, config, inputs, num_ranks=2)
    # Every expert selects every token; all but the real routes have probability 0.
    filled = replace(inputs, routing_map=[torch.ones_like(m) for m in inputs.routing_map])
    padded = ranks.run(run_rank, config, filled, num_ranks=2)
    for of_rank, wanted in zip(padded, plain, strict=True):
        for name in NAMES:
            (got, got_traffic), (want, want_traffic) = of_rank[name], wanted[name]
            assert got_traffic == want_traffic
            for what, tensor in got.items():
                assert torch.equal(tensor, want[what]), what


def test_repeats_bit_for_bit(ranks: RankPool):
    config = cases.make_config(num_ranks=4, topk=4)
    inputs = cases.make_inputs(config, cases.skewed, [64, 0, 70, 31], dtype=torch.bfloat16)
    first, second = (ranks.run(run_rank, config, inputs) for _ in range(2))
    for of_rank, wanted in zip(second, first, strict=True):
        for name in NAMES:
            got, want = of_rank[name][0], wanted[name][0]
            assert all(torch.equal(got[what], want[what]) for what in want)


def shared_out(inputs: cases.Inputs, sizes: list[int]) -> cases.Inputs:
    """Puts some of one rank's tokens on each of several ranks."""
    num_tokens = sum(sizes)
    names = ("x", "probs", "routing_map", "grad_out")
    shares = {name: list(getattr(inputs, name)[0][:num_tokens].split(sizes)) for name in names}
    return replace(inputs, **shares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_output_depends_neither_on_the_number_of_ranks_nor_on_other_tokens(
    ranks: RankPool, dtype: torch.dtype
):
    """A token's sum is in the order of experts, wherever they are, and its products are its own."""
    inputs = cases.make_inputs(cases.CONFIG, cases.uniform, [48], dtype=dtype)
    alone, *_ = ranks.run(run_rank, cases.CONFIG, inputs, num_ranks=1)
    single, _ = alone["reference"]
    for sizes in ([24, 24], [12, 12, 12, 12], [5, 0, 7, 1], [1], [31]):
        config = cases.make_config(num_ranks=len(sizes))
        found = ranks.run(run_rank, config, shared_out(inputs, sizes), num_ranks=len(sizes))
        every = [of_rank["reference"][0] for of_rank in found]
        out = torch.cat([results["out"] for results in every])
        assert torch.equal(out, single["out"][: sum(sizes)]), sizes
        for name in ("grad x", "grad probs"):
            joined = torch.cat([results[name] for results in every])
            assert_close(name, joined, single[name][: sum(sizes)], rel_l2=1e-3)


@by_names
def test_a_backward_can_be_called_with_parameters(name: str):
    """A backend is more than what autograd calls, which is in no-grad mode."""
    config = cases.make_config(num_experts=4)
    inputs = cases.make_inputs(config, cases.uniform, [20], dtype=torch.float32)
    fc1, fc2 = (
        tuple(torch.nn.Parameter(weight) for weight in weights)
        for weights in (inputs.fc1, inputs.fc2)
    )
    weights, backend = ExpertWeights(fc1, fc2), make(name, config)
    grads = [
        [WeightGrad(torch.empty_like(weight), False) for weight in share] for share in (fc1, fc2)
    ]
    _, saved = backend.forward(
        inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights, training=True
    )
    grad_x, _ = backend.backward(inputs.grad_out[0], saved, weights, *grads)
    assert not grad_x.requires_grad
    assert all(grad.buffer.abs().sum() > 0 for share in grads for grad in share)


def apply_with_bound(group: dist.ProcessGroup, name: str, row_bound: float) -> str:
    """All tokens choose experts of rank 1, which receives twice the mean."""
    rank, config = dist.get_rank(group), cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.to_one_rank, [512, 512], dtype=torch.float32)
    own = slice(4 * rank, 4 * rank + 4)
    weights = ExpertWeights(tuple(inputs.fc1[own]), tuple(inputs.fc2[own]))
    backend = select_backend(config, group, "cpu", kind=name, row_bound=row_bound)
    given = inputs.x[rank], inputs.probs[rank], inputs.routing_map[rank], weights
    for _ in range(2):  # the ranks are still in step after an error
        try:
            moe_apply(backend, *given)
        except RowBoundError as error:
            said = str(error)
        else:
            said = "applied"
    return said


@by_names
@pytest.mark.parametrize(("row_bound", "bound"), [(1.0, 12), (2.0, None)])
def test_a_row_bound_holds_on_every_rank(
    ranks: RankPool, name: str, row_bound: float, bound: int | None
):
    found = ranks.run(apply_with_bound, name, row_bound, num_ranks=2)
    if bound is None:
        assert found == ["applied"] * 2
        return
    for said in found:
        assert re.fullmatch(
            rf"rank 1 was to receive 1\d blocks of 128 rows, but its buffers hold {bound}: "
            "raise row_bound, or leave it out for exact buffers",
            said,
        ), said


@by_names
def test_unusable_routing_is_refused_and_the_next_call_works(name: str):
    config = cases.make_config()
    inputs = cases.make_inputs(config, cases.uniform, [20], dtype=torch.float32)
    backend = make(name, config)
    crowded = inputs.routing_map[0].clone()
    crowded[0] = True
    with pytest.raises(RoutingError, match="rank 0: token 0 selects 8 experts"):
        run(backend, replace(inputs, routing_map=[crowded]))
    weights = ExpertWeights((torch.stack(inputs.fc1),), (torch.stack(inputs.fc2),))
    idx = torch.tensor([[0, 1], [2, -2], [3, -1], [4, 5], [6, 7]])
    with pytest.raises(RoutingError, match=r"topk_idx\[1, 1\] is -2, wanted an expert id"):
        backend.forward(inputs.x[0][:5], torch.ones(5, 2), idx, weights, training=False)
    (want,) = oracle(config, inputs)
    compare(run(backend, inputs), want, torch.float32)


@by_names
def test_weights_of_another_dtype_are_looked_at_again(name: str):
    config = cases.make_config()
    inputs = cases.make_inputs(config, cases.uniform, [5], dtype=torch.float32)
    fc1, fc2 = torch.stack(inputs.fc1), torch.stack(inputs.fc2)
    call = inputs.x[0], inputs.probs[0], inputs.routing_map[0]
    backend = make(name, config)
    backend.forward(*call, ExpertWeights((fc1,), (fc2,)), training=False)
    with pytest.raises(ShapeError, match=r"fc2 .*float64"):
        backend.forward(*call, ExpertWeights((fc1,), (fc2.double(),)), training=False)


def test_biases_are_the_same_by_both_names():
    config = cases.make_config(**cases.GPT_OSS)
    inputs = cases.make_inputs(config, cases.skewed, [29], dtype=torch.float64)
    g = cases.generator(2)
    values = [torch.randn(8, width, generator=g).double() for width in (config.fc1_rows, 64)]
    results = []
    for name in NAMES:
        leaves = [value.clone().requires_grad_() for value in values]
        weights = ExpertWeights(
            (torch.stack(inputs.fc1),),
            (torch.stack(inputs.fc2),),
            fc1_bias=(leaves[0],),
            fc2_bias=(leaves[1],),
        )
        probs = inputs.probs[0].clone().requires_grad_()
        out = moe_apply(make(name, config), inputs.x[0], probs, inputs.routing_map[0], weights)
        out.backward(inputs.grad_out[0])
        results.append([out.detach(), probs.grad, *(leaf.grad for leaf in leaves)])
    for found, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("routes_itself", [False, True])
@by_names
def test_what_a_checkpoint_saves_of_a_forward_changes_no_gradient(name: str, routes_itself: bool):
    """A recomputation gets saved tensors of the forward: none may be written into again."""
    config = cases.make_config(num_experts=4, max_tokens=24, **cases.GPT_OSS)
    inputs = cases.make_inputs(config, cases.uniform, [24], dtype=torch.float32)
    g = cases.generator(5)
    choices = inputs.routing_map[0].float().topk(2).indices
    stacks = [torch.stack(inputs.fc1), torch.stack(inputs.fc2)]
    stacks += [torch.randn(4, 128, generator=g), torch.randn(4, 64, generator=g)]
    routing = (
        torch.randn(4, 64, generator=g) if routes_itself else inputs.probs[0].gather(1, choices)
    )
    leaves = [t.requires_grad_() for t in (inputs.x[0], routing, *stacks)]
    backend = select_backend(config, None, "cpu", kind=name, dtype=torch.float32)

    def run(x: torch.Tensor, routing: torch.Tensor, *stacks: torch.Tensor) -> torch.Tensor:
        fc1, fc2, *biases = ((stack,) for stack in stacks)
        weights = ExpertWeights(fc1, fc2, fc1_bias=biases[0], fc2_bias=biases[1])
        rows = x * 1.5
        if routes_itself:
            out, probs, logits, _ = moe_router_forward(rows, routing, weights, backend=backend)
            return out * out.tanh() + (probs * logits).sum(1, keepdim=True)
        out = moe_forward(rows, choices, routing, weights, backend=backend)
        return out * out.tanh()

    with Operators() as around:
        want = gradients(run(*leaves), leaves)
    weights = ExpertWeights(*((stack.detach(),) for stack in stacks[:2]))
    probs = inputs.probs[0].detach().gather(1, choices)
    with Operators() as within:
        backend.forward(inputs.x[0].detach(), probs, choices, weights, training=True)
    assert len(set(within.seen)) > 20
    for operator in dict.fromkeys((*around.seen, *within.seen)):
        got = gradients(saving(operator)(run, *leaves), leaves)
        assert all(map(torch.equal, got, want)), operator
