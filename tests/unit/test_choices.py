"""Routing by indices: the same layer as by a map, bit by bit, and what is refused of it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError, FlashMoEError, ShapeError
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights
from tests.distributed import RankPool
from tests.unit import cases

TOKENS = {1: [30], 4: [20, 0, 33, 7]}


def weights_of(config: MoEConfig, inputs: cases.Inputs, rank: int) -> ExpertWeights:
    experts = slice(rank * config.num_local_experts, (rank + 1) * config.num_local_experts)
    fc1, fc2 = (
        torch.stack(weights[experts]).requires_grad_() for weights in (inputs.fc1, inputs.fc2)
    )
    return ExpertWeights((fc1,), (fc2,))


def both_forms(
    group: dist.ProcessGroup | None, config: MoEConfig, inputs: cases.Inputs, dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    """Results of one rank by a map and by indices; weights' gradients are spread over experts."""
    rank = 0 if group is None else dist.get_rank(group)
    found = []
    for keep in ("all", "inputs"):
        backend = ReferenceBackend(config, group, options=BackendOptions(keep=keep))
        probs, routing_map = inputs.probs[rank], inputs.routing_map[rank]
        topk_idx, topk_weight = cases.as_choices(config, probs, routing_map, dtype=dtype)
        for is_map in (True, False):
            x = inputs.x[rank].clone().requires_grad_()
            weights = weights_of(config, inputs, rank)
            given = (probs if is_map else topk_weight).clone().requires_grad_()
            if is_map:
                out = moe_apply(backend, x, given, routing_map, weights)
            else:
                out = moe_apply(
                    backend, x, None, None, weights, topk_idx=topk_idx, topk_weight=given
                )
            leaves = (x, *weights.fc1, *weights.fc2, given)
            *grads, grad = torch.autograd.grad(out, leaves, inputs.grad_out[rank])
            assert grad.shape == given.shape
            spread = grad if is_map else cases.spread(config, topk_idx, grad)
            found.append([out.detach(), *grads, spread])
    return found


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize(
    "routing", [cases.uniform, cases.with_dropped_tokens, cases.to_nobody], ids=lambda r: r.__name__
)
def test_both_forms_are_equal_bit_by_bit(
    ranks: RankPool, routing: cases.Routing, num_ranks: int, dtype: torch.dtype
):
    config = cases.make_config(num_ranks=num_ranks, topk=3)
    inputs = cases.make_inputs(config, routing, TOKENS[num_ranks], dtype=torch.float32)
    if num_ranks == 1:
        of_ranks = [both_forms(None, config, inputs, dtype)]
    else:
        of_ranks = ranks.run(both_forms, config, inputs, dtype, num_ranks=num_ranks)
    for want, *others in of_ranks:
        for got in others:
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_choices_of_probability_zero_are_left_out():
    config = cases.make_config(topk=3, skip_zero_probs=True)
    inputs = cases.make_inputs(config, cases.uniform, TOKENS[1], dtype=torch.float32)
    inputs.probs[0][::2] *= torch.arange(config.num_experts) % 2
    want, *others = both_forms(None, config, inputs, torch.int32)
    assert all(torch.equal(a, b) for got in others for a, b in zip(got, want, strict=True))


def test_no_choices_at_all():
    config = cases.CONFIG
    inputs = cases.make_inputs(config, cases.uniform, [5], dtype=torch.float32)
    weight = torch.zeros(5, 0, requires_grad=True)
    idx = torch.zeros(5, 0, dtype=torch.int32)
    weights = weights_of(config, inputs, 0)
    out = moe_apply(
        ReferenceBackend(config), inputs.x[0], None, None, weights, topk_idx=idx, topk_weight=weight
    )
    out.sum().backward()
    assert not out.any()
    assert not weights.fc1[0].grad.any()


def call(**changes: Any) -> dict[str, Any]:
    inputs = cases.make_inputs(cases.CONFIG, cases.uniform, [6], dtype=torch.float32)
    idx, weight = cases.as_choices(cases.CONFIG, inputs.probs[0], inputs.routing_map[0])
    good = {
        "x": inputs.x[0],
        "probs": None,
        "routing_map": None,
        "weights": weights_of(cases.CONFIG, inputs, 0),
        "topk_idx": idx,
        "topk_weight": weight,
    }
    of_map = {"probs": inputs.probs[0], "routing_map": inputs.routing_map[0]}
    changed = {name: of_map[name] if value is ... else value for name, value in changes.items()}
    return {**good, **changed}


BAD = {
    "both forms": (
        {"probs": ..., "routing_map": ...},
        ConfigError,
        "given by probs, routing_map, topk_idx, topk_weight: wanted probs and routing_map, or topk",
    ),
    "no form": (
        {"topk_idx": None, "topk_weight": None},
        ConfigError,
        "the routing is given by none: wanted",
    ),
    "half of each": (
        {"probs": ..., "topk_weight": None},
        ConfigError,
        "the routing is given by probs, topk_idx: wanted",
    ),
    "a map of numbers": (
        {
            "topk_idx": None,
            "topk_weight": None,
            "probs": ...,
            "routing_map": torch.ones(6, 8).int(),
        },
        ShapeError,
        "routing_map is torch.int32, wanted torch.bool",
    ),
    "a map as indices": (
        {"topk_idx": torch.ones(6, 2, dtype=torch.bool)},
        ShapeError,
        "topk_idx is torch.bool, wanted torch.int32 or torch.int64",
    ),
    "indices of 16 bits": (
        {"topk_idx": torch.ones(6, 2, dtype=torch.int16)},
        ShapeError,
        "topk_idx is torch.int16, wanted torch.int32 or torch.int64",
    ),
    "too many choices": (
        {"topk_idx": torch.ones(6, 3, dtype=torch.int64)},
        ShapeError,
        r"topk_idx has shape \(6, 3\), wanted \[6, topk\] with topk <= 2",
    ),
    "weights of other choices": (
        {"topk_weight": torch.ones(6, 1)},
        ShapeError,
        r"topk_weight has shape \(6, 1\), wanted \(6, 2\), as topk_idx",
    ),
    "not contiguous": (
        {"topk_idx": torch.zeros(2, 6, dtype=torch.int64).t()},
        ShapeError,
        "topk_idx has shape .* and strides .*, wanted contiguous rows",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_routing_is_refused(name: str):
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        moe_apply(ReferenceBackend(cases.CONFIG), **call(**changes))
    assert moe_apply(ReferenceBackend(cases.CONFIG), **call()).shape == (6, 64)


def refused_by_plan(group: dist.ProcessGroup, kind: str) -> str:
    """What a rank hears if the last rank's indices are bad; a good call follows."""
    rank = dist.get_rank(group)
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.uniform, [6, 6], dtype=torch.float32)
    idx, weight = cases.as_choices(config, inputs.probs[rank], inputs.routing_map[rank])
    backend, weights = ReferenceBackend(config, group), weights_of(config, inputs, rank)
    bad = idx.clone()
    if rank == 1:
        bad[4] = torch.tensor({"large": [0, 8], "small": [-2, 1], "repeated": [3, 3]}[kind])
    told = "accepted"
    for given in (bad, idx):
        try:
            moe_apply(
                backend, inputs.x[rank], None, None, weights, topk_idx=given, topk_weight=weight
            )
        except FlashMoEError as error:
            assert given is bad
            told = f"{type(error).__name__}: {error}"
    return told


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("large", "topk_idx[4, 1] is 8, wanted an expert id of 0 to 7, or -1 to skip"),
        ("small", "topk_idx[4, 0] is -2, wanted an expert id of 0 to 7, or -1 to skip"),
        ("repeated", "topk_idx[4] names expert 3 2 times, wanted distinct experts"),
    ],
)
def test_bad_indices_of_one_rank_are_an_error_on_all(ranks: RankPool, kind: str, message: str):
    for told in ranks.run(refused_by_plan, kind, num_ranks=2):
        assert told == f"RoutingError: rank 1: {message}"
