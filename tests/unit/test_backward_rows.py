"""The rows of a backward lie where the library says, and factors take them from there."""

import itertools

import pytest
import torch

from flashmoe_megatron.config import Experts, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.rows import BackwardRows, _at
from flashmoe_megatron.low_rank import FactorGrads, Factors
from flashmoe_megatron.oracle import assert_close
from tests.unit import native

BLOCKS, TOKENS = 5, 60
COUNTS, BLOCK_OF = [130, 0, 40, 7], [0, 2, 2, 3, 4]
"""Rows of four experts, and where their blocks begin; the last block of the buffers is unused."""


def config_of(num_ranks: int, intermediate: int, experts: Experts = "bf16") -> MoEConfig:
    return MoEConfig(
        hidden=128 if experts == "fp8" else 64,
        intermediate=intermediate,
        num_experts=4 * num_ranks,
        topk=4,
        num_ranks=num_ranks,
        max_tokens=TOKENS,
        activation="silu",
        gated=True,
        experts=experts,
    )


def rows_of(config: MoEConfig) -> BackwardRows:
    """Makes the memory of a backward, with NaN and large integers in it."""
    problem = native.problem_of(config)
    sizes = native.sizes_of(problem)
    plan = torch.full((sizes.plan_bytes,), 0x7F, dtype=torch.uint8)
    plan[: bindings.PLAN_HEADER_BYTES] = 0
    scratch = torch.full((BLOCKS * sizes.scratch_block_bytes[1],), 0xFF, dtype=torch.uint8)
    x = torch.full((BLOCKS * sizes.row_block_bytes,), 0xFF, dtype=torch.uint8)
    grad_out = torch.randn(TOKENS, config.hidden).bfloat16()
    return BackwardRows(problem, grad_out, x, plan, scratch, BLOCKS)


FORMS: list[tuple[int, int, Experts]] = [
    (1, 192, "bf16"),
    (1, 768, "bf16"),
    (2, 192, "bf16"),
    (1, 256, "fp8"),
    (2, 640, "fp8"),
]


@pytest.mark.parametrize(("num_ranks", "intermediate", "experts"), FORMS)
def test_they_lie_apart_in_scratch_memory_and_plan(
    num_ranks: int, intermediate: int, experts: Experts
) -> None:
    config = config_of(num_ranks, intermediate, experts)
    rows = rows_of(config)
    found, num = rows._find(), BLOCKS * 128
    widths = {"grad_preact": config.fc1_rows, "act": intermediate}
    widths |= {"grad_out": config.hidden, "x": config.hidden}
    assert (found.x is not None) == (experts == "fp8")
    is_in_place = num_ranks == 1 and intermediate <= 512
    assert (found.grad_out is None) == is_in_place
    spans = [
        (getattr(found, name) - rows.scratch.data_ptr(), 2 * num * width)
        for name, width in widths.items()
        if getattr(found, name) is not None
    ]
    tables = {"expert_rows": 4, "expert_block": 5, "row_tokens": 2 * num}
    in_plan = [
        (getattr(found, name) - rows.plan.data_ptr(), 4 * words) for name, words in tables.items()
    ]
    for memory, parts in ((rows.scratch, sorted(spans)), (rows.plan, sorted(in_plan))):
        for (begin, num_bytes), (after, _) in itertools.pairwise([*parts, (memory.nbytes, 0)]):
            assert 0 <= begin < begin + num_bytes <= after


def fill(rows: BackwardRows, config: MoEConfig) -> dict[str, list[torch.Tensor]]:
    """Draws the rows of experts, and nothing between them; returns these of each expert."""
    found, num = rows._find(), BLOCKS * 128
    _at(rows.plan, found.expert_rows, torch.int32, 4).copy_(torch.tensor(COUNTS))
    _at(rows.plan, found.expert_block, torch.int32, 5).copy_(torch.tensor(BLOCK_OF))
    tokens = _at(rows.plan, found.row_tokens, torch.int32, num, 2)
    memory = {
        "x": rows._inputs(found, num),
        "grad_preact": _at(rows.scratch, found.grad_preact, torch.bfloat16, num, config.fc1_rows),
        "act": _at(rows.scratch, found.act, torch.bfloat16, num, config.intermediate),
    }
    parts: dict[str, list[torch.Tensor]] = {"grad_out": []}
    for block, count in zip(BLOCK_OF, COUNTS, strict=False):
        part = slice(128 * block, 128 * block + count)
        tokens[part, 0] = chosen = torch.randint(TOKENS, (count,), dtype=torch.int32)
        parts["grad_out"].append(rows.grad_out[chosen.long()])
        for name, each in memory.items():
            each[part] = torch.randn(count, each.shape[1])
            parts.setdefault(name, []).append(each[part])
        if found.grad_out is not None:
            copied = _at(rows.scratch, found.grad_out, torch.bfloat16, num, config.hidden)
            copied[part] = parts["grad_out"][-1]
    return parts


@pytest.mark.parametrize(("num_ranks", "intermediate", "experts"), FORMS)
def test_factors_take_them(num_ranks: int, intermediate: int, experts: Experts) -> None:
    """Gradients are those of a loop over experts; where a rank lacks the backward they are NaN."""
    torch.manual_seed(0)
    config = config_of(num_ranks, intermediate, experts)
    rows = rows_of(config)
    parts = fill(rows, config)
    sides = {"fc1": ("grad_preact", "x"), "fc2": ("grad_out", "act")}
    made, wanted = {}, {}
    for kind, names in sides.items():
        left, right = (parts[name] for name in names)
        down, up = (torch.randn(4, 8, each[0].shape[1]).bfloat16() for each in (right, left))
        made[kind] = FactorGrads((down,), (up.mT.contiguous(),), 0.5, [True, True])
        full = torch.stack([a.float().T @ b.float() for a, b in zip(left, right, strict=True)])
        wanted[kind] = 0.5 * (up.float() @ full), 0.5 * (full @ down.float().mT)
    rows.give(config, Factors(**made))
    for kind, grads in made.items():
        for got, want in zip(grads.grads(), wanted[kind], strict=True):
            assert got is not None
            assert_close(kind, got.float(), want, rel_l2=1e-2)
    if num_ranks > 1:
        rows.plan[bindings.PLAN_HEADER_BYTES - 4] = 1  # rank 0 has no backward
        rows.give(config, Factors(**made))
        assert all(one.isnan().all() for each in made.values() for one in each.grads())


def test_a_backward_without_rows() -> None:
    """Buffers of no blocks lie nowhere, and gradients are zero."""
    config = config_of(2, 192)
    rows = rows_of(config)
    fill(rows, config)
    found = rows._find()
    _at(rows.plan, found.expert_rows, torch.int32, 4).zero_()
    _at(rows.plan, found.expert_block, torch.int32, 5).zero_()
    none = torch.empty(0, dtype=torch.uint8)
    empty = rows._replace(grad_out=rows.grad_out[:0], x=none, scratch=none, num_row_blocks=0)
    made = [
        FactorGrads(
            (torch.ones(8, width).bfloat16(),), (torch.ones(out, 8).bfloat16(),), 1.0, [True, True]
        )
        for width, out in ((64, 384), (192, 64))
    ]
    empty.give(config, Factors(*made))
    assert not any(one.any() for each in made for one in each.grads())


def test_what_the_library_refuses() -> None:
    rows = rows_of(config_of(1, 192))
    for change, words in (
        ({"num_row_blocks": 10**6}, "1000000 row blocks: wanted 0 to"),
        ({"scratch": torch.empty(0)}, "scratch"),
    ):
        with pytest.raises(ConfigError, match=words):
            rows._replace(**change)._find()
