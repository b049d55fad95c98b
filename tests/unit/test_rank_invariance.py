"""One batch has the same bits on any number of ranks, where that is asked for; else a refusal."""

import dataclasses
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import Keep
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import HOST_VARIABLE
from flashmoe_megatron.options import BackendKind
from flashmoe_megatron.select import resolve_kind, select_backend
from flashmoe_megatron.weights import ExpertWeights
from tests.distributed import RankPool, refusal
from tests.unit import cases
from tests.unit.simulated_gpus import Gpus, install, make_backend

TOKENS, EXPERTS = 200, 16
NUM_RANKS = 1, 2, 4


@dataclasses.dataclass(frozen=True)
class Case:
    kind: BackendKind
    dtype: torch.dtype
    topk: int
    keep: Keep = "all"
    bias: bool = False
    transposed: bool = False
    row_bound: float | None = None
    experts: str = "bf16"
    is_reversed: bool = False


CASES = [
    Case("reference", torch.bfloat16, 4, bias=True),
    Case("reference", torch.float16, 2, "inputs"),
    Case("reference", torch.float32, 8, "preactivations", transposed=True, row_bound=4.0),
    Case("reference", torch.bfloat16, 2, experts="fp8"),
    Case("scheduled", torch.bfloat16, 4, "preactivations", bias=True),
    Case("scheduled", torch.float32, 2, "inputs", row_bound=4.0),
    Case("scheduled", torch.float16, 8, transposed=True),
    Case("scheduled", torch.bfloat16, 4, experts="fp8"),
]

Results = list[list[torch.Tensor]]


def run(group: dist.ProcessGroup, every: list[Case]) -> list[Results]:
    """Results of each case: of this rank's tokens, then of its experts."""
    return [_run(group, case) for case in every]


def _run(group: dist.ProcessGroup, case: Case) -> Results:
    num, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = {"hidden": 256, "intermediate": 256} if case.experts == "fp8" else {}
    alone = cases.make_config(
        num_experts=EXPERTS, topk=case.topk, num_ranks=1, max_tokens=TOKENS, **sizes
    )
    inputs = cases.make_inputs(alone, cases.skewed, [TOKENS], dtype=case.dtype)
    config = dataclasses.replace(alone, num_ranks=num, experts=case.experts)
    backend = select_backend(
        config,
        group,
        "cpu",
        kind=case.kind,
        dtype=case.dtype,
        keep=case.keep,
        row_bound=case.row_bound,
        rank_invariant=True,
    )
    # Ranks have unlike numbers of tokens, as batches are split in practice.
    bounds = [0, *(TOKENS * (i + 1) // num - 3 * (i % 2) for i in range(num - 1)), TOKENS]
    tokens = slice(bounds[rank], bounds[rank + 1])
    experts = slice(rank * EXPERTS // num, (rank + 1) * EXPERTS // num)

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone().requires_grad_()

    def matrices(found: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(leaf(one.t().contiguous() if case.transposed else one) for one in found)

    biases = {}
    if case.bias:
        for name, width in (("fc1_bias", config.fc1_rows), ("fc2_bias", config.hidden)):
            drawn = torch.randn(EXPERTS, width, generator=cases.generator(9)).to(case.dtype)
            biases[name] = tuple(map(leaf, drawn[experts]))
    weights = ExpertWeights(
        matrices(inputs.fc1[experts]),
        matrices(inputs.fc2[experts]),
        transposed=case.transposed,
        **biases,
    )
    x, probs, routing_map, grad_out = (
        each[0].flip(0)[tokens] if case.is_reversed else each[0][tokens]
        for each in (inputs.x, inputs.probs, inputs.routing_map, inputs.grad_out)
    )
    x, probs = leaf(x), leaf(probs)
    out = moe_apply(backend, x, probs, routing_map, weights)
    out.backward(grad_out)
    kinds = ("fc1", "fc2", *biases)
    of_experts = [torch.stack([one.grad for one in getattr(weights, kind)]) for kind in kinds]
    return [[out.detach(), x.grad, probs.grad], of_experts]


def joined(ranks: list[Results]) -> list[torch.Tensor]:
    """Results of all ranks in one, tokens and experts in their order."""
    return [
        torch.cat(parts)
        for results in zip(*ranks, strict=True)
        for parts in zip(*results, strict=True)
    ]


def test_any_number_of_ranks_gives_equal_bits(ranks: RankPool) -> None:
    """Outputs, and gradients of tokens, probabilities, weights and biases."""
    found = {}
    for num in NUM_RANKS:
        answers = ranks.run(run, CASES, num_ranks=num)
        found[num] = [joined(of_case) for of_case in zip(*answers, strict=True)]
    for num in NUM_RANKS[1:]:
        for case, want, got in zip(CASES, found[1], found[num], strict=True):
            assert len(want) == (7 if case.bias else 5)
            for number, (one, other) in enumerate(zip(want, got, strict=True)):
                assert one.isfinite().all()
                assert torch.equal(one, other), (case, num, number)


def test_an_order_of_rows_has_bits_of_its_own(ranks: RankPool) -> None:
    """Sums over tokens would show another order: the comparison above is no matter of course."""
    case = Case("reference", torch.float32, 4)
    cases_of_order = [case, dataclasses.replace(case, is_reversed=True)]
    (answers,) = ranks.run(run, cases_of_order, num_ranks=1)
    (want, sums), (got, other_sums) = answers
    assert all(torch.equal(one, other.flip(0)) for one, other in zip(want, got, strict=True))
    assert not any(map(torch.equal, sums, other_sums))


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("reference", {"spare_slots": 1}, "with spare_slots=1: wanted spare_slots=0"),
        ("reference", {"combine": "routes"}, "with combine='routes', which sums by itself"),
        ("scheduled", {"degree": "2"}, "with degree='2', whose products have other sizes"),
        ("scheduled", {"degree": "auto"}, "with degree='auto', whose products have other sizes"),
    ],
)
def test_what_changes_an_order_is_refused(kind: Any, options: dict[str, Any], said: str) -> None:
    config = cases.make_config(num_experts=EXPERTS)
    with pytest.raises(ConfigError, match=f"rank_invariant=True {said}"):
        select_backend(config, None, "cpu", kind=kind, rank_invariant=True, **options)


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        (
            {"num_experts": 12},
            {},
            "with 12 experts on 1 ranks on the backend 'kernel', .* wanted a multiple of 8 experts",
        ),
        (
            {"num_experts": 24, "num_ranks": 3},
            {},
            "with 24 experts on 3 ranks on the backend 'kernel', .* on 1, 2, 4 or 8 ranks",
        ),
        (
            {"experts": "fp8", "hidden": 256, "intermediate": 256},
            {},
            "with experts='fp8' on the backend 'kernel': wanted experts='bf16'",
        ),
        ({}, {"spare_slots": 1}, "with spare_slots=1: wanted spare_slots=0"),
        ({}, {"combine": "routes"}, "with combine='routes', which sums by itself"),
    ],
)
def test_what_the_kernel_cannot_is_refused_by_name(
    changes: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    config = cases.make_config(**{"num_experts": EXPERTS, **changes})
    with (
        mock.patch(f"{resolve_kind.__module__}.resolve_kind", return_value="kernel"),
        pytest.raises(ConfigError, match=f"rank_invariant=True {said}"),
    ):
        select_backend(config, None, "cpu", rank_invariant=True, **options)


@pytest.mark.parametrize("is_asked", [False, True])
def test_the_kernel_is_told(is_asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Gpus(1, 0, slow=0), monkeypatch)
    config = cases.make_config(num_experts=EXPERTS)
    backend = make_backend(config, 0, rank_invariant=is_asked)
    assert backend._prepare().rank_invariant == is_asked


def over_hosts(group: dist.ProcessGroup) -> None:
    config = cases.make_config(num_experts=EXPERTS, num_ranks=2)
    with mock.patch.dict(os.environ, {HOST_VARIABLE: f"host{dist.get_rank(group)}"}):
        select_backend(config, group, "cpu", kind="reference", rank_invariant=True)


def test_several_hosts_are_refused_on_every_rank(ranks: RankPool) -> None:
    for said in ranks.run(refusal, over_hosts, num_ranks=2):
        assert "rank_invariant=True in an expert-parallel group over 2 hosts" in said


def unlike(group: dist.ProcessGroup) -> None:
    config = cases.make_config(num_experts=EXPERTS, num_ranks=2)
    is_asked = dist.get_rank(group) == 0
    select_backend(config, group, "cpu", kind="reference", rank_invariant=is_asked)


def test_ranks_have_to_agree(ranks: RankPool) -> None:
    for said in ranks.run(refusal, unlike, num_ranks=2):
        assert "disagree on rank_invariant" in said
