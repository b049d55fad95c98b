"""The steps around products as one kernel each, in Triton: on a GPU launches are what they cost.

Each computes what the step of :class:`~flashmoe_megatron.separate.steps.Steps` does. None takes
float64. Products in bfloat16 are torch's grouped GEMM, and in other dtypes they are made expert by
expert.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.ranks import REFUSED
from flashmoe_megatron.separate.plan import Cut, Indices, Sorted
from flashmoe_megatron.separate.steps import Matrices, Steps, split, stack_of
from flashmoe_megatron.weights import MATRIX, ExpertWeights, WeightGrad, unstacked

TILE = 2048
"""Elements of a program's block of rows and columns."""
SORT_TILE = 8192
"""Tokens times experts of a program's block while routes are sorted."""
SORT_WARPS = 8
CHUNK = 16
"""Blocks whose counts are added at once."""
COMBINE_TILE = 1024
CUT_TILE = 4096
"""Routes times experts of a program's block while routes are cut."""
INDEX_TILE = 256
"""Rows whose places a program finds at once."""

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
RELU = tl.constexpr(3)
SQUARED_RELU = tl.constexpr(4)
QUICK_GELU = tl.constexpr(5)
_KINDS = {
    Activation.SILU: SILU.value,
    Activation.GELU: GELU.value,
    Activation.GELU_TANH: GELU_TANH.value,
    Activation.RELU: RELU.value,
    Activation.SQUARED_RELU: SQUARED_RELU.value,
    Activation.QUICK_GELU: QUICK_GELU.value,
}


class Kernels(Steps):
    """The steps on a GPU, which compute what the base class says."""

    alike = 1

    def sort_routes(
        self, config: MoEConfig, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> Sorted:
        num_tokens, columns = probs.shape
        num_experts, device = config.num_experts, probs.device
        is_map = routing_map.dtype == torch.bool
        choices = config.topk if is_map else columns
        width = triton.next_power_of_2(num_experts)
        block = max(1, min(SORT_TILE // width, 128))
        blocks = max(1, triton.cdiv(num_tokens, block))
        most = num_tokens * choices

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        given = routing_map.view(torch.uint8) if is_map else routing_map
        counts = empty(blocks, num_experts + 1, dtype=torch.int32)
        shape: dict[str, Any] = {
            "COLUMNS": columns,
            "IS_MAP": is_map,
            "SKIPS_ZERO": config.skip_zero_probs,
            "TOPK": choices,
            "TOKENS": block,
            "EXPERTS": width,
            "num_warps": SORT_WARPS,
        }
        _count_routes[(blocks,)](given, probs, counts, num_tokens, num_experts, **shape)
        found = Sorted(
            token_idx=empty(most),
            flat_idx=empty(most),
            row_probs=empty(most, dtype=probs.dtype),
            place=empty(num_tokens, choices),
            counts=empty(num_experts),
            ends=empty(num_experts, dtype=torch.int32),
        )
        _place_routes[(blocks,)](
            given, probs, counts, *vars(found).values(), num_tokens, num_experts, most, blocks,
            REFUSAL=REFUSED, STEP=CHUNK, **shape
        )  # fmt: skip
        return found

    def cut_routes(
        self, token_idx: torch.Tensor, place: torch.Tensor, ends: torch.Tensor, degree: int
    ) -> Cut:
        if degree == 1:
            return Cut(token_idx, place)
        cut = Cut(torch.empty_like(token_idx), torch.empty_like(place))
        num_experts, most = len(ends), place.numel()
        width = triton.next_power_of_2(num_experts)
        block = max(1, min(CUT_TILE // width, 128))
        if most:
            _cut_routes[(triton.cdiv(most, block),)](
                token_idx, place, ends, cut.token_idx, cut.place, len(token_idx), most, num_experts,
                DEGREE=degree, ROUTES=block, EXPERTS=width
            )  # fmt: skip
        return cut

    def index_rows(self, received: torch.Tensor, num_rows: int, degree: int) -> Indices:
        sources, experts = received.shape
        is_cut = degree > 1
        index = received.new_empty(5 if is_cut else 2, num_rows)
        ends = received.new_empty(degree + is_cut, experts, dtype=torch.int32)
        _index_rows[(sources * experts,)](
            received, index, ends, num_rows, sources, experts, degree,
            IS_CUT=is_cut, SOURCES=triton.next_power_of_2(sources),
            EXPERTS=triton.next_power_of_2(experts), ROWS=INDEX_TILE
        )  # fmt: skip
        each = index.unbind()
        if not is_cut:
            return Indices(each[0], each[1], None, ends)
        whole = Indices(each[3], each[4], None, ends[degree:])
        return Indices(each[0], each[1], each[2], ends[:degree], whole)

    def put_rows(self, target: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
        num_rows, width = rows.shape
        if num_rows:
            columns = _block_of(width)
            grid = (triton.cdiv(num_rows, TILE // columns), triton.cdiv(width, columns))
            _copy_rows[grid](
                target, index, rows, num_rows, width, target.stride(0), rows.stride(0),
                ROWS=TILE // columns, COLUMNS=columns
            )  # fmt: skip

    def sum_routes(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        num_tokens, choices = place.shape
        width = rows.shape[1]
        out = rows.new_empty(num_tokens, width)
        if num_tokens:
            grid = (num_tokens, triton.cdiv(width, COMBINE_TILE))
            _sum_rows[grid](rows, place, out, len(rows), width, choices, COLUMNS=COMBINE_TILE)
        return out

    def weighted_activation(
        self, config: MoEConfig, preact: torch.Tensor, row_probs: torch.Tensor
    ) -> torch.Tensor:
        if config.is_softcapped:
            return super().weighted_activation(config, preact, row_probs)
        out = preact.new_empty(len(preact), config.intermediate)
        if len(preact):
            shape = _shape_of(config)
            grid = (
                triton.cdiv(len(preact), shape["ROWS"]),
                triton.cdiv(config.intermediate, shape["COLUMNS"]),
            )
            _activate[grid](preact, row_probs, out, len(preact), **shape)
        return out

    def weighted_activation_backward(
        self,
        config: MoEConfig,
        preact: torch.Tensor,
        row_probs: torch.Tensor,
        grad_weighted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if config.is_softcapped:
            return super().weighted_activation_backward(config, preact, row_probs, grad_weighted)
        grad_preact, weighted = torch.empty_like(preact), torch.empty_like(grad_weighted)
        grad_probs = preact.new_empty(len(preact), dtype=torch.float32)
        if len(preact):
            shape = _shape_of(config)
            _differentiate[(triton.cdiv(len(preact), shape["ROWS"]),)](
                preact, row_probs, grad_weighted, grad_preact, grad_probs, weighted, len(preact),
                **shape
            )  # fmt: skip
        return grad_preact, grad_probs, weighted

    def is_grouped(self, rows: torch.Tensor) -> bool:
        return rows.is_cuda and rows.dtype == torch.bfloat16 and _has_grouped(rows.device)

    def matrices(self, weights: ExpertWeights) -> tuple[Matrices, Matrices]:
        fc1, fc2 = stack_of(weights.fc1), stack_of(weights.fc2)
        return (fc1, fc2) if weights.transposed else (fc1.mT, fc2.mT)

    def product(
        self, rows: torch.Tensor, of_experts: Matrices, ends: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        if self.is_grouped(rows) and len(rows):
            assert isinstance(of_experts, torch.Tensor), "grouped products take a stack"
            grouped: torch.Tensor = torch._grouped_mm(rows, of_experts, offs=ends)
            return grouped
        return super().product(rows, of_experts, ends, counts)

    grad_product = product

    def weight_grad(
        self, left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        if not (self.is_grouped(left) and len(left)):
            return super().weight_grad(left, right, ends, counts)
        grouped: torch.Tensor = torch._grouped_mm(left.t(), right, offs=ends)
        for expert, count in enumerate(counts):
            if not count:  # a product over no rows is left as it was
                grouped[expert].zero_()
        return grouped

    def add_weight_grad(
        self,
        targets: Sequence[WeightGrad],
        left: torch.Tensor,
        right: torch.Tensor,
        ends: torch.Tensor,
        counts: Sequence[int],
    ) -> None:
        """Adds products of 16 bits in float32 expert by expert.

        torch's grouped GEMM rounds its sums to 16 bits.
        """
        is_narrow = left.dtype in (torch.bfloat16, torch.float16)
        adds = all(one.accumulate and one.buffer.dtype == torch.float32 for one in targets)
        if not (adds and is_narrow and left.device.type == "cuda"):
            super().add_weight_grad(targets, left, right, ends, counts)
            return
        buffers = unstacked([target.buffer for target in targets], MATRIX)
        parts = zip(buffers, split(left, counts), split(right, counts), strict=True)
        for buffer, a, b in parts:
            if len(a):
                torch.addmm(buffer, a.t(), b, out_dtype=torch.float32, out=buffer)


KERNELS = Kernels()


@functools.cache
def _has_grouped(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _shape_of(config: MoEConfig) -> dict[str, Any]:
    width = config.intermediate
    columns = _block_of(width)
    return {
        "WIDTH": width,
        "KIND": _KINDS[config.activation],
        "GATED": config.gated,
        "INTERLEAVE": config.glu_interleave,
        "CLAMPS": config.clamp_value is not None,
        "CLAMP": config.clamp_value or 0.0,
        "OFFSET": config.linear_offset,
        "ROWS": TILE // columns,
        "COLUMNS": columns,
    }


def _block_of(width: int) -> int:
    """The block of columns that leaves fewest unused; of several the widest."""
    return min((1024, 512, 256, 128), key=lambda one: (triton.cdiv(width, one) * one, -one))


@triton.jit
def _chosen(
    given, probs, num_tokens, num_experts,
    COLUMNS: tl.constexpr, IS_MAP: tl.constexpr, SKIPS_ZERO: tl.constexpr, TOPK: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A block's ``[TOKENS, EXPERTS]`` choices, columns and weights, and what is wrong in it."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERTS)
    is_token = tokens < num_tokens
    if IS_MAP:
        at = tokens[:, None] * COLUMNS + experts[None, :]
        is_inside = is_token[:, None] & (experts < num_experts)[None, :]
        chosen = tl.load(given + at, mask=is_inside, other=0) != 0
        weight = tl.load(probs + at, mask=chosen, other=0.0).to(tl.float32)
        if SKIPS_ZERO:
            chosen = chosen & (weight != 0)
        column = tl.zeros([TOKENS, EXPERTS], tl.int32) + experts[None, :]
        bad = tl.sum((chosen & (weight != weight)).to(tl.int32), 1)
        bad += (tl.sum(chosen.to(tl.int32), 1) > TOPK).to(tl.int32)
    else:
        chosen = tl.zeros([TOKENS, EXPERTS], tl.int32) != 0
        weight = tl.zeros([TOKENS, EXPERTS], tl.float32)
        column = tl.zeros([TOKENS, EXPERTS], tl.int32)
        bad = tl.zeros([TOKENS], tl.int32)
        for choice in tl.static_range(COLUMNS):
            at_choice = tokens * COLUMNS + choice
            expert = tl.load(given + at_choice, mask=is_token, other=-1)
            value = tl.load(probs + at_choice, mask=is_token, other=0.0).to(tl.float32)
            bad += ((expert < -1) | (expert >= num_experts)).to(tl.int32)
            is_used = expert >= 0
            if SKIPS_ZERO:
                is_used = is_used & (value != 0)
            bad += (is_used & (value != value)).to(tl.int32)
            hit = is_used[:, None] & (expert[:, None] == experts[None, :])
            bad += tl.sum((hit & chosen).to(tl.int32), 1)
            chosen = chosen | hit
            column = tl.where(hit, choice, column)
            weight = tl.where(hit, value[:, None], weight)
    return tokens, chosen, column, weight, tl.sum(bad, 0)


@triton.jit
def _count_routes(
    given, probs, counts, num_tokens, num_experts,
    COLUMNS: tl.constexpr, IS_MAP: tl.constexpr, SKIPS_ZERO: tl.constexpr, TOPK: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Each block's routes to each expert, and whether something is wrong in it."""
    _, chosen, _, _, bad = _chosen(
        given, probs, num_tokens, num_experts,
        COLUMNS, IS_MAP, SKIPS_ZERO, TOPK, TOKENS, EXPERTS,
    )  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    row = counts + tl.program_id(0) * (num_experts + 1)
    tl.store(row + experts, tl.sum(chosen.to(tl.int32), 0), mask=experts < num_experts)
    tl.store(row + num_experts, (bad > 0).to(tl.int32))


@triton.jit
def _place_routes(
    given, probs, counts, token_idx, flat_idx, row_probs, place, told, ends,
    num_tokens, num_experts, most, blocks,
    REFUSAL: tl.constexpr, STEP: tl.constexpr,
    COLUMNS: tl.constexpr, IS_MAP: tl.constexpr, SKIPS_ZERO: tl.constexpr, TOPK: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Finds each route's place: after lower experts', earlier blocks' and earlier tokens'."""
    tokens, chosen, column, weight, _ = _chosen(
        given, probs, num_tokens, num_experts,
        COLUMNS, IS_MAP, SKIPS_ZERO, TOPK, TOKENS, EXPERTS,
    )  # fmt: skip
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    width = num_experts + 1
    totals = tl.zeros([EXPERTS], tl.int32)
    earlier = tl.zeros([EXPERTS], tl.int32)
    bad = tl.zeros([STEP], tl.int32)
    for first in range(0, blocks, STEP):
        others = first + tl.arange(0, STEP)
        rows = counts + others * width
        there = (others < blocks)[:, None] & is_expert[None, :]
        found = tl.load(rows[:, None] + experts[None, :], mask=there, other=0)
        totals += tl.sum(found, 0)
        earlier += tl.sum(found * (others < block).to(tl.int32)[:, None], 0)
        bad += tl.load(rows + num_experts, mask=others < blocks, other=0)
    until = tl.cumsum(totals, 0)
    ones = chosen.to(tl.int32)
    where = (until - totals + earlier)[None, :] + tl.cumsum(ones, 0) - 1
    is_good = chosen & (where < most)  # more routes than there may be are refused by the host
    all_tokens = tokens[:, None] + tl.zeros([TOKENS, EXPERTS], tl.int64)
    tl.store(token_idx + where, all_tokens, mask=is_good)
    tl.store(flat_idx + where, all_tokens * COLUMNS + column, mask=is_good)
    tl.store(row_probs + where, weight, mask=is_good)
    nth = tl.cumsum(ones, 1) - 1
    at = all_tokens * TOPK + nth
    tl.store(place + at, where.to(tl.int64), mask=chosen & (nth < TOPK))
    num_chosen = tl.sum(ones, 1)
    num_routes = tl.sum(totals, 0)
    for choice in tl.static_range(TOPK):
        spare = tokens * TOPK + choice  # also the place of one route among as many as can be
        is_empty = (tokens < num_tokens) & (num_chosen <= choice)
        tl.store(place + spare, tl.zeros([TOKENS], tl.int64) + most, mask=is_empty)
        is_behind = (tokens < num_tokens) & (spare >= num_routes)
        tl.store(token_idx + spare, tl.zeros([TOKENS], tl.int64), mask=is_behind)
    if block == 0:
        is_bad = tl.sum(bad, 0) > 0
        tl.store(told + experts, tl.where(is_bad, REFUSAL, totals).to(tl.int64), mask=is_expert)
        tl.store(ends + experts, tl.minimum(until, most), mask=is_expert)


@triton.jit
def _cut_routes(
    token_idx, place, ends, new_token_idx, new_place, num_given, most, num_experts,
    DEGREE: tl.constexpr, ROUTES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    until = tl.load(ends + experts, mask=is_expert, other=0)
    since = tl.load(ends + experts - 1, mask=is_expert & (experts > 0), other=0)
    num_routes = tl.load(ends + num_experts - 1)
    each = tl.program_id(0) * ROUTES + tl.arange(0, ROUTES)
    token = tl.load(token_idx + each, mask=each < num_given, other=0)
    moved = _place_in_parts(each, since, until, num_routes, DEGREE)
    tl.store(new_token_idx + moved, token, mask=each < num_given)
    route = tl.load(place + each, mask=each < most, other=0).to(tl.int32)
    moved = _place_in_parts(route, since, until, num_routes, DEGREE)
    tl.store(new_place + each, moved.to(tl.int64), mask=each < most)


@triton.jit
def _place_in_parts(route, since, until, num_routes, DEGREE: tl.constexpr):
    """Returns a route's place: after earlier parts and, within its part, earlier experts."""
    count = (until - since)[None, :]
    is_own = (route[:, None] >= since[None, :]) & (route[:, None] < until[None, :])
    first = tl.sum(tl.where(is_own, since[None, :], 0), 1)
    own = tl.sum(tl.where(is_own, count, 0), 1)
    nth = route - first
    part = tl.minimum(((nth + 1) * DEGREE - 1) // tl.maximum(own, 1), DEGREE - 1)
    is_earlier = since[None, :] < first[:, None]
    parts_before = part[:, None] + is_earlier.to(tl.int32)
    before = tl.sum(count * parts_before // DEGREE, 1)
    moved = before + nth - own * part // DEGREE
    return tl.where(route < num_routes, moved, route)


@triton.jit
def _index_rows(
    received, index, ends, num_rows, sources, experts, degree,
    IS_CUT: tl.constexpr, SOURCES: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    source = tl.program_id(0) // experts
    expert = tl.program_id(0) % experts
    at_source = tl.arange(0, SOURCES)[:, None]
    at_expert = tl.arange(0, EXPERTS)[None, :]
    is_there = (at_source < sources) & (at_expert < experts)
    counts = tl.load(received + at_source * experts + at_expert, mask=is_there, other=0)
    # Rows arrive by source and then expert, and are computed by expert and then source.
    arrive_before = (at_source < source) | ((at_source == source) & (at_expert < expert))
    placed_before = (at_expert < expert) | ((at_expert == expert) & (at_source < source))
    is_own = (at_source == source) & (at_expert == expert)
    is_until = at_expert <= expert
    whole_arrival = tl.sum(tl.where(arrive_before, counts, 0))
    whole_place = tl.sum(tl.where(placed_before, counts, 0))
    first = whole_arrival * 0  # an int64, as what is added below
    done = first
    for part in range(degree):
        sizes = counts * (part + 1) // degree - counts * part // degree
        arrival = tl.sum(tl.where(arrive_before, sizes, 0))
        place = tl.sum(tl.where(placed_before, sizes, 0))
        size = tl.sum(tl.where(is_own, sizes, 0))
        for begin in range(0, size, ROWS):
            nth = begin + tl.arange(0, ROWS)
            is_row = nth < size
            tl.store(index + first + place + nth, arrival + nth, mask=is_row)
            tl.store(index + num_rows + first + arrival + nth, place + nth, mask=is_row)
            if IS_CUT:
                whole = done + nth
                rows = index + 2 * num_rows
                tl.store(rows + first + place + nth, whole_place + whole, mask=is_row)
                arrivals = rows + num_rows
                tl.store(arrivals + whole_place + whole, whole_arrival + whole, mask=is_row)
                places = arrivals + num_rows
                tl.store(places + whole_arrival + whole, whole_place + whole, mask=is_row)
        until = tl.sum(tl.where(is_until, sizes, 0))
        tl.store(ends + part * experts + expert, until.to(tl.int32), mask=source == 0)
        first += tl.sum(sizes)
        done += size
    if IS_CUT:
        until = tl.sum(tl.where(is_until, counts, 0))
        tl.store(ends + degree * experts + expert, until.to(tl.int32), mask=source == 0)


@triton.jit
def _copy_rows(
    target, index, rows, num_rows, width, target_step, step,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = row < num_rows
    mask = is_row[:, None] & (columns < width)[None, :]
    value = tl.load(rows + (row * step)[:, None] + columns[None, :], mask=mask)
    place = tl.load(index + row, mask=is_row, other=0)
    tl.store(target + (place * target_step)[:, None] + columns[None, :], value, mask=mask)


@triton.jit
def _sum_rows(rows, place, out, num_rows, width, CHOICES: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(place + token * CHOICES + choice)
        there = width * (row < num_rows).to(tl.int32)
        value = tl.load(rows + row * width + columns, mask=columns < there, other=0.0)
        total += value.to(tl.float32)
    tl.store(out + token * width + columns, total, mask=columns < width)


@triton.jit
def _value_and_slope(z, KIND: tl.constexpr):
    if KIND == SILU:
        sigmoid = tl.sigmoid(z)
        value, slope = z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
    elif KIND == GELU:
        cdf = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
        value, slope = z * cdf, cdf + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    elif KIND == GELU_TANH:
        # (1 + tanh u) / 2 is the sigmoid of 2 u
        half = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        inner = 0.7978845608028654 * (1 + 0.134145 * z * z)
        value, slope = z * half, half + 2 * z * half * (1 - half) * inner
    elif KIND == RELU:
        value = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where(z > 0, 1.0, 0.0)
    elif KIND == SQUARED_RELU:
        positive = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value, slope = positive * positive, 2 * positive
    else:
        sigmoid = tl.sigmoid(1.702 * z)
        value, slope = z * sigmoid, sigmoid * (1 + 1.702 * z * (1 - sigmoid))
    return value, slope


@triton.jit
def _gate_column(columns, INTERLEAVE: tl.constexpr):
    """Returns the places of gate's columns among fc1's."""
    if INTERLEAVE > 0:
        return columns // INTERLEAVE * (2 * INTERLEAVE) + columns % INTERLEAVE
    return columns


@triton.jit
def _activate(
    preact, row_probs, out, num_rows,
    WIDTH: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    CLAMPS: tl.constexpr, CLAMP: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    weight = tl.load(row_probs + rows, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        at = (rows * (2 * WIDTH))[:, None] + _gate_column(columns, INTERLEAVE)[None, :]
        gate = tl.load(preact + at, mask=mask, other=0.0).to(tl.float32)
        step = INTERLEAVE if INTERLEAVE > 0 else WIDTH
        up = tl.load(preact + at + step, mask=mask, other=0.0).to(tl.float32)
        if CLAMPS:
            gate = tl.minimum(gate, CLAMP, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, CLAMP, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -CLAMP, propagate_nan=tl.PropagateNan.ALL)
        value, _ = _value_and_slope(gate, KIND)
        value = value * (up + OFFSET)
    else:
        at = (rows * WIDTH)[:, None] + columns[None, :]
        value, _ = _value_and_slope(tl.load(preact + at, mask=mask, other=0.0).to(tl.float32), KIND)
    tl.store(out + (rows * WIDTH)[:, None] + columns[None, :], value * weight[:, None], mask=mask)


@triton.jit
def _differentiate(
    preact, row_probs, grad_weighted, grad_preact, grad_probs, weighted, num_rows,
    WIDTH: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    CLAMPS: tl.constexpr, CLAMP: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    weight = tl.load(row_probs + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        mask = is_row[:, None] & (columns < WIDTH)[None, :]
        narrow = (rows * WIDTH)[:, None] + columns[None, :]
        grad = tl.load(grad_weighted + narrow, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            at = (rows * (2 * WIDTH))[:, None] + _gate_column(columns, INTERLEAVE)[None, :]
            step = INTERLEAVE if INTERLEAVE > 0 else WIDTH
            gate = tl.load(preact + at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(preact + at + step, mask=mask, other=0.0).to(tl.float32)
            grad_gate = grad * weight
            grad_up = grad_gate
            if CLAMPS:
                grad_gate = grad_gate * (gate <= CLAMP).to(tl.float32)
                grad_up = grad_up * (tl.abs(up) <= CLAMP).to(tl.float32)
                gate = tl.minimum(gate, CLAMP, propagate_nan=tl.PropagateNan.ALL)
                up = tl.minimum(up, CLAMP, propagate_nan=tl.PropagateNan.ALL)
                up = tl.maximum(up, -CLAMP, propagate_nan=tl.PropagateNan.ALL)
            value, slope = _value_and_slope(gate, KIND)
            factor = up + OFFSET
            tl.store(grad_preact + at, grad_gate * factor * slope, mask=mask)
            tl.store(grad_preact + at + step, grad_up * value, mask=mask)
            value = value * factor
        else:
            z = tl.load(preact + narrow, mask=mask, other=0.0).to(tl.float32)
            value, slope = _value_and_slope(z, KIND)
            tl.store(grad_preact + narrow, grad * weight * slope, mask=mask)
        total += tl.sum(grad * value, 1)
        tl.store(weighted + narrow, value * weight, mask=mask)
    tl.store(grad_probs + rows, total, mask=is_row)
