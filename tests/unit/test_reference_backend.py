"""The reference backend against the oracle, on 1, 2 and 4 ranks."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import TrafficCounters
from flashmoe_megatron.config import TILE_M, Activation, Keep, MoEConfig
from flashmoe_megatron.errors import RowBoundError
from flashmoe_megatron.layer import moe_forward, moe_router_forward
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.oracle import assert_close, moe_reference
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.distributed import RankPool
from tests.operators import Operators, gradients, saving
from tests.unit import cases

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-14, torch.bfloat16: 6e-3}

TOKENS = {1: [37], 2: [37, 20], 4: [9, 0, 33, 16]}


def run_rank(
    group: dist.ProcessGroup,
    config: MoEConfig,
    inputs: cases.Inputs,
    transposed: bool,
) -> tuple[dict[str, torch.Tensor], TrafficCounters]:
    """Forward and backward of one rank's share through the autograd function."""
    rank = dist.get_rank(group)
    backend = ReferenceBackend(config, group if config.num_ranks > 1 else None)
    first = rank * config.num_local_experts
    experts = slice(first, first + config.num_local_experts)
    fc1, fc2 = (
        [
            (weight.t().contiguous() if transposed else weight.clone()).requires_grad_()
            for weight in all_experts[experts]
        ]
        for all_experts in (inputs.fc1, inputs.fc2)
    )
    x = inputs.x[rank].clone().requires_grad_()
    probs = inputs.probs[rank].clone().requires_grad_()
    weights = ExpertWeights(tuple(fc1), tuple(fc2), transposed=transposed)
    out = moe_apply(backend, x, probs, inputs.routing_map[rank], weights)
    out.backward(inputs.grad_out[rank])
    found = {"out": out.detach(), "grad x": x.grad, "grad probs": probs.grad}
    for name, parameters in (("fc1", fc1), ("fc2", fc2)):
        for local_expert, weight in enumerate(parameters):
            assert weight.grad is not None, "an expert without tokens needs a gradient too"
            grad = weight.grad.t() if transposed else weight.grad
            found[f"grad {name} of expert {first + local_expert}"] = grad
    return found, backend.traffic


def oracle(config: MoEConfig, inputs: cases.Inputs) -> list[dict[str, torch.Tensor]]:
    """What every rank should find, by autograd through the oracle."""
    x = torch.cat(inputs.x).double().requires_grad_()
    probs = torch.cat(inputs.probs).double().requires_grad_()
    fc1 = [weight.double().requires_grad_() for weight in inputs.fc1]
    fc2 = [weight.double().requires_grad_() for weight in inputs.fc2]
    routing_map = torch.cat(inputs.routing_map)
    out = moe_reference(x, probs, routing_map, fc1, fc2, **cases.form_of(config))
    leaves = (x, probs, *fc1, *fc2)
    grads = torch.autograd.grad(
        out, leaves, torch.cat(inputs.grad_out).double(), materialize_grads=True
    )
    num_experts = config.num_experts
    sizes = [len(tokens) for tokens in inputs.x]
    shares = [tensor.split(sizes) for tensor in (out.detach(), grads[0], grads[1])]
    want = []
    for rank in range(config.num_ranks):
        expected = {
            name: share[rank]
            for name, share in zip(("out", "grad x", "grad probs"), shares, strict=True)
        }
        first = rank * config.num_local_experts
        for expert in range(first, first + config.num_local_experts):
            expected[f"grad fc1 of expert {expert}"] = grads[2 + expert]
            expected[f"grad fc2 of expert {expert}"] = grads[2 + num_experts + expert]
        want.append(expected)
    return want


def check(
    ranks: RankPool,
    config: MoEConfig,
    inputs: cases.Inputs,
    *,
    transposed: bool = False,
) -> list[TrafficCounters]:
    """Compares all outputs and gradients of all ranks; returns what each rank sent."""
    results = ranks.run(run_rank, config, inputs, transposed, num_ranks=config.num_ranks)
    tolerance = TOLERANCE[inputs.x[0].dtype]
    for rank, ((got, _), want) in enumerate(zip(results, oracle(config, inputs), strict=True)):
        assert got.keys() == want.keys()
        for name, tensor in got.items():
            assert_close(f"{name} of rank {rank}", tensor, want[name], rel_l2=tolerance)
    return [traffic for _, traffic in results]


ROUTINGS = [
    cases.uniform,
    cases.skewed,
    cases.to_one_expert,
    cases.to_one_rank,
    cases.with_empty_experts,
    cases.with_dropped_tokens,
    cases.to_nobody,
]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.__name__)
def test_routing(ranks: RankPool, routing: cases.Routing, num_ranks: int):
    config = cases.make_config(num_ranks=num_ranks)
    inputs = cases.make_inputs(config, routing, TOKENS[num_ranks], dtype=torch.float32)
    check(ranks, config, inputs)


def grads_of(
    group: dist.ProcessGroup, config: MoEConfig, inputs: cases.Inputs, keep: Keep
) -> list[torch.Tensor]:
    """All results of a rank whose forward keeps what it is told."""
    rank = dist.get_rank(group)
    backend = ReferenceBackend(config, group, options=BackendOptions(keep=keep))
    experts = slice(rank * config.num_local_experts, (rank + 1) * config.num_local_experts)
    leaves = [inputs.x[rank], inputs.probs[rank], *inputs.fc1[experts], *inputs.fc2[experts]]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    count = config.num_local_experts
    weights = ExpertWeights(tuple(leaves[2 : 2 + count]), tuple(leaves[2 + count :]))
    out = moe_apply(backend, *leaves[:2], inputs.routing_map[rank], weights)
    out.backward(inputs.grad_out[rank])
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("keep", ["preactivations", "inputs"])
def test_what_is_not_kept_is_the_same_again(ranks: RankPool, keep: Keep):
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.skewed, TOKENS[2], dtype=torch.float32)
    want, got = (ranks.run(grads_of, config, inputs, each, num_ranks=2) for each in ("all", keep))
    for ours, theirs in zip(got, want, strict=True):
        assert len(ours) == len(theirs) == 3 + 2 * config.num_local_experts
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


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
    assert [counters.pad_rows_local for counters in traffic] == [0, -rows % TILE_M]


def test_bfloat16_probs(ranks: RankPool):
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.uniform, [37, 20], dtype=torch.bfloat16)
    inputs.probs = [probs.bfloat16() for probs in inputs.probs]
    check(ranks, config, inputs)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_transposed_weights(ranks: RankPool, num_ranks: int):
    config = cases.make_config(num_ranks=num_ranks, intermediate=128)
    inputs = cases.make_inputs(config, cases.uniform, TOKENS[num_ranks], dtype=torch.float32)
    check(ranks, config, inputs, transposed=True)


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
    for rank, counters in enumerate(traffic):
        # Each remote route crosses twice in each direction of the layer: out by its token's rank,
        # back by its expert's rank; its float32 weight goes out and its gradient comes back.
        sent, returned = to_other[rank], to_other[1 - rank]
        assert counters == TrafficCounters(
            rows_sent=2 * (sent + returned),
            bytes_sent=2 * (sent + returned) * config.hidden * 2 + (sent + returned) * 4,
            pad_rows_sent=0,
            pad_rows_local=sum(-rows % TILE_M for rows in received[rank]),
        )


def test_fillers_of_padded_capacity_are_not_sent(ranks: RankPool):
    config = cases.make_config(num_ranks=2, skip_zero_probs=True)
    inputs = cases.make_inputs(config, cases.uniform, [37, 20], dtype=torch.float32)
    plain = ranks.run(run_rank, config, inputs, False, num_ranks=2)
    # Every expert selects every token; all but the real routes have probability 0.
    filled = replace(inputs, routing_map=[torch.ones_like(m) for m in inputs.routing_map])
    padded = ranks.run(run_rank, config, filled, False, num_ranks=2)
    for (got, got_traffic), (want, want_traffic) in zip(padded, plain, strict=True):
        assert got_traffic == want_traffic
        for name, tensor in got.items():
            assert torch.equal(tensor, want[name]), name


def test_repeats_bit_for_bit(ranks: RankPool):
    config = cases.make_config(num_ranks=4, topk=4)
    inputs = cases.make_inputs(config, cases.skewed, [64, 0, 70, 31], dtype=torch.bfloat16)
    first, second = (ranks.run(run_rank, config, inputs, False) for _ in range(2))
    for (got, _), (want, _) in zip(second, first, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)


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
    (single, _), *_ = ranks.run(run_rank, cases.CONFIG, inputs, False, num_ranks=1)
    for sizes in ([24, 24], [12, 12, 12, 12], [5, 0, 7, 1], [1], [31]):
        config = cases.make_config(num_ranks=len(sizes))
        found = ranks.run(run_rank, config, shared_out(inputs, sizes), False, num_ranks=len(sizes))
        out = torch.cat([results["out"] for results, _ in found])
        assert torch.equal(out, single["out"][: sum(sizes)]), sizes
        for name in ("grad x", "grad probs"):
            joined = torch.cat([results[name] for results, _ in found])
            assert_close(name, joined, single[name][: sum(sizes)], rel_l2=1e-3)


def test_a_backward_can_be_called_with_parameters():
    """A backend is more than what autograd calls, which is in no-grad mode."""
    config = cases.make_config(num_experts=4)
    inputs = cases.make_inputs(config, cases.uniform, [20], dtype=torch.float32)
    fc1, fc2 = (
        tuple(torch.nn.Parameter(weight) for weight in weights)
        for weights in (inputs.fc1, inputs.fc2)
    )
    weights, backend = ExpertWeights(fc1, fc2), ReferenceBackend(config)
    grads = [
        [WeightGrad(torch.empty_like(weight), False) for weight in share] for share in (fc1, fc2)
    ]
    _, saved = backend.forward(
        inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights, training=True
    )
    grad_x, _ = backend.backward(inputs.grad_out[0], saved, weights, *grads)
    assert not grad_x.requires_grad
    assert all(grad.buffer.abs().sum() > 0 for share in grads for grad in share)


def apply_with_bound(group: dist.ProcessGroup, row_bound: float) -> str:
    """All tokens choose experts of rank 1, which receives twice the mean."""
    rank, config = dist.get_rank(group), cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.to_one_rank, [512, 512], dtype=torch.float32)
    own = slice(4 * rank, 4 * rank + 4)
    weights = ExpertWeights(tuple(inputs.fc1[own]), tuple(inputs.fc2[own]))
    backend = select_backend(config, group, "cpu", kind="reference", row_bound=row_bound)
    given = inputs.x[rank], inputs.probs[rank], inputs.routing_map[rank], weights
    for _ in range(2):  # the ranks are still in step after an error
        try:
            moe_apply(backend, *given)
        except RowBoundError as error:
            said = str(error)
        else:
            said = "applied"
    return said


@pytest.mark.parametrize(("row_bound", "bound"), [(1.0, 12), (2.0, None)])
def test_a_row_bound_holds_on_every_rank(ranks: RankPool, row_bound: float, bound: int | None):
    found = ranks.run(apply_with_bound, row_bound, num_ranks=2)
    if bound is None:
        assert found == ["applied"] * 2
        return
    for said in found:
        assert re.fullmatch(
            rf"rank 1 was to receive 1\d blocks of 128 rows, but its buffers hold {bound}: "
            "raise row_bound, or leave it out for exact buffers",
            said,
        ), said


@pytest.mark.parametrize("routes_itself", [False, True])
@pytest.mark.parametrize("kind", ["reference", "scheduled"])
def test_what_a_checkpoint_saves_of_a_forward_changes_no_gradient(kind: str, routes_itself: bool):
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
    backend = select_backend(config, None, "cpu", kind=kind, dtype=torch.float32)

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
