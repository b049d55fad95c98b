"""The steps of a layer in torch's operators, for processors, for float64 and for the reference.

A route's bits do not depend on which others are computed with it, as they do not in the kernel.
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.ranks import REFUSED
from flashmoe_megatron.separate.plan import Cut, Indices, Part, Sorted
from flashmoe_megatron.weights import MATRIX, ExpertWeights, WeightGrad, unstacked

Matrices = Sequence[torch.Tensor] | torch.Tensor
"""One matrix for each expert, or a stack of them."""


class Steps:
    """All steps; :class:`~flashmoe_megatron.separate.kernels.Kernels` makes most in other ways.

    Attributes:
        alike: Products of whole multiples of so many rows give each row the same bits, however many
            there are; fewer rows, or odd ones, take other instructions.
    """

    alike = 8

    def sort_routes(
        self, config: MoEConfig, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> Sorted:
        """Orders one rank's routes by expert and then token; the host does not wait.

        ``probs`` and ``routing_map`` are those of a backend's forward.
        """
        num_experts, device = config.num_experts, probs.device
        is_map = routing_map.dtype == torch.bool
        selected = routing_map if is_map else routing_map >= 0
        if config.skip_zero_probs:
            selected = selected & (probs != 0)
        bad = (probs.isnan() & selected).any()
        if is_map:
            bad = bad | (selected.sum(1) > config.topk).any()
            columns = selected.cumsum(1) - 1
            columns = columns.masked_fill_(~selected | (columns >= config.topk), config.topk)
            experts = torch.arange(num_experts, device=device).expand(selected.shape)
            choices = torch.full((len(probs), config.topk + 1), num_experts, device=device)
            choices = choices.scatter_(1, columns, experts)[:, : config.topk]
            column_of = choices
        else:
            choices = routing_map.long().masked_fill(~selected, num_experts)
            ascending, column_of = choices.sort(dim=1, stable=True)
            again = (ascending.diff(dim=1) == 0) & (ascending[:, 1:] < num_experts)
            outside = (routing_map < -1) | (routing_map >= num_experts)
            bad = bad | again.any() | outside.any()
            choices = ascending.clamp(max=num_experts)
        flat = choices.reshape(-1)
        order = flat.sort(stable=True).indices
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
        place = torch.empty_like(flat)
        place[order] = torch.arange(len(flat), device=device)
        token_idx = order // max(choices.shape[1], 1)
        last = max(probs.shape[1] - 1, 0)
        flat_idx = token_idx * probs.shape[1] + column_of.reshape(-1)[order].clamp(max=last)
        return Sorted(
            token_idx=token_idx,
            flat_idx=flat_idx,
            row_probs=probs.reshape(-1)[flat_idx],
            place=place.masked_fill_(place >= counts.sum(), len(flat)).view(choices.shape),
            counts=torch.where(bad, torch.full_like(counts, REFUSED), counts),
            ends=counts.cumsum(0).int(),
        )

    def cut_routes(
        self, token_idx: torch.Tensor, place: torch.Tensor, ends: torch.Tensor, degree: int
    ) -> Cut:
        """Brings routes into the order of parts; the host does not wait.

        The first three arguments are as :class:`Sorted` has them.
        """
        if degree == 1:
            return Cut(token_idx, place)
        most = place.numel()  # which is the place of no route
        until = ends.long()
        counts = until.diff(prepend=until.new_zeros(1))
        bounds = counts * torch.arange(degree + 1, device=ends.device)[:, None] // degree
        begins = torch.cat([(until - counts + bounds[:-1]).view(-1), until[-1:]])
        sizes = torch.cat([bounds.diff(dim=0).view(-1), most + 1 - until[-1:]])
        order = _runs(begins, sizes, most + 1)
        moved = torch.empty_like(order).scatter_(
            0, order, torch.arange(most + 1, device=ends.device)
        )
        return Cut(
            token_idx.index_select(0, order[: len(token_idx)]),
            moved.index_select(0, place.view(-1)).view(place.shape),
        )

    def index_rows(self, received: torch.Tensor, num_rows: int, degree: int) -> Indices:
        """Finds where rows are in so many parts, and in one; the host does not wait.

        ``received`` is ``[sources, experts]`` int64, the rows that have come from each;
        ``num_rows`` is their sum.
        """
        device = received.device
        bounds = received * torch.arange(degree + 1, device=device)[:, None, None] // degree
        sizes = bounds.diff(dim=0)  # [part, source, expert]
        by_expert = sizes.transpose(1, 2)
        ends = by_expert.sum(2).cumsum(1)
        first = ends[:, -1].cumsum(0) - ends[:, -1]  # where each part begins

        def starts(lengths: torch.Tensor) -> torch.Tensor:
            """Returns where runs begin in their part."""
            return _starts(lengths) - first[:, None, None]

        found = Indices(
            by_expert=_runs(starts(sizes).transpose(1, 2), by_expert, num_rows),
            by_rank=_runs(starts(by_expert).transpose(1, 2), sizes, num_rows),
            rows=None,
            ends=ends.int(),
        )
        if degree == 1:
            return found
        rows = _runs(_starts(received.t()) + bounds[:-1].transpose(1, 2), by_expert, num_rows)
        return replace(found, rows=rows, whole=self.index_rows(received, num_rows, 1))

    def put_rows(self, target: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies rows to their places in the target, which are int64 and all different."""
        target.index_copy_(0, index, rows)

    def add_part(
        self, every: torch.Tensor | None, rows: torch.Tensor, part: Part, num_rows: int
    ) -> torch.Tensor:
        """Adds a part's rows to those of all parts, which are made with the first part.

        Args:
            every: ``[num_rows, ...]``, ``None`` before the first part.
            rows: The part's.
            part: Says where they belong. If it has all rows, ``rows`` are returned themselves.
            num_rows: The rows of all parts.
        """
        if part.rows is None:
            return rows
        if every is None:
            every = rows.new_empty(num_rows, *rows.shape[1:])
        if rows.dim() == 1:
            every.index_copy_(0, part.rows, rows)
        else:
            self.put_rows(every, part.rows, rows)
        return every

    def sum_routes(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Sums each token's rows by ascending expert, with the place of :class:`Sorted`.

        Sums are in their own dtype. Returns ``[tokens, hidden]`` in the rows' dtype.
        """
        if len(rows) < place.numel():
            place = place.clamp(max=len(rows))
            rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        picked = rows[place.reshape(-1)].view(*place.shape, rows.shape[1])
        return picked.sum(1, dtype=accumulation_dtype(rows.dtype)).to(rows.dtype)

    def weighted_activation(
        self, config: MoEConfig, preact: torch.Tensor, row_probs: torch.Tensor
    ) -> torch.Tensor:
        """The activation times the routing weights, ``[rows, intermediate]`` in the rows' dtype."""
        wide = accumulation_dtype(preact.dtype)
        return (activate(preact.to(wide), config) * row_probs.to(wide)[:, None]).to(preact.dtype)

    def weighted_activation_backward(
        self,
        config: MoEConfig,
        preact: torch.Tensor,
        row_probs: torch.Tensor,
        grad_weighted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Differentiates :func:`weighted_activation`, and gives its result again.

        Returns:
            The gradient of ``preact``; that of ``row_probs``, ``[rows]`` in the dtype of sums; and
            :func:`weighted_activation`'s result.
        """
        wide = accumulation_dtype(preact.dtype)
        weight, grad = row_probs.to(wide)[:, None], grad_weighted.to(wide)
        activated, grad_preact = activate_backward(preact.to(wide), grad * weight, config)
        weighted = (activated * weight).to(preact.dtype)
        return grad_preact.to(preact.dtype), (grad * activated).sum(1), weighted

    def is_grouped(self, rows: torch.Tensor) -> bool:
        """Says that products are made expert by expert."""
        return False

    def matrices(self, weights: ExpertWeights) -> tuple[Matrices, Matrices]:
        """Orients each expert's as ``[hidden, fc1_rows]`` and ``[intermediate, hidden]``."""
        weights = weights.per_expert()
        fc1, fc2 = weights.fc1, weights.fc2
        if weights.split:  # all gates and after them all ups
            fc1 = tuple(map(torch.cat, zip(fc1[: len(fc2)], fc1[len(fc2) :], strict=True)))
        return (fc1, fc2) if weights.transposed else ([w.t() for w in fc1], [w.t() for w in fc2])

    def product(
        self, rows: torch.Tensor, of_experts: Matrices, ends: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Multiplies each row by its expert's matrix, in the rows' dtype.

        Args:
            rows: ``[num_rows, width]``, by expert.
            of_experts: ``[width, out]`` of each expert, any strides.
            ends: ``[num_experts]`` int32, where each expert's rows end; for grouped products.
            counts: Rows of each expert, which grouped products do not need.

        Returns:
            ``[num_rows, out]``; unspecified after the last expert's rows.
        """
        return self._one_by_one(rows, of_experts, counts, rows.dtype)

    def grad_product(
        self, rows: torch.Tensor, of_experts: Matrices, ends: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Multiplies gradients of the layer's output, in the dtype of sums, without rounding."""
        return self._one_by_one(rows, of_experts, counts, accumulation_dtype(rows.dtype))

    def weight_grad(
        self, left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """``left.T @ right`` of each expert's rows, zero for experts without any.

        Returns:
            ``[num_experts, width of left, width of right]``: in the rows' dtype from grouped
            products, else in the dtype of sums.
        """
        wide = accumulation_dtype(left.dtype)
        out = left.new_empty(len(counts), left.shape[1], right.shape[1], dtype=wide)
        (left, sizes, _), (right, *_) = self._aligned(left, counts), self._aligned(right, counts)
        for one, a, b in zip(out, split(left, sizes), split(right, sizes), strict=True):
            torch.mm(a.t().to(wide), b.to(wide), out=one)
        return out

    def add_weight_grad(
        self,
        targets: Sequence[WeightGrad],
        left: torch.Tensor,
        right: torch.Tensor,
        ends: torch.Tensor,
        counts: Sequence[int],
    ) -> None:
        """Adds or writes :meth:`weight_grad` to where it goes."""
        store(targets, self.weight_grad(left, right, ends, counts))

    def _one_by_one(
        self,
        rows: torch.Tensor,
        of_experts: Matrices,
        counts: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Computes products in ``dtype`` expert by expert."""
        rows, sizes, pads = self._aligned(rows.to(dtype), counts)
        out = rows.new_empty(len(rows), of_experts[0].shape[1])
        pieces = out.split_with_sizes(sizes), rows.split_with_sizes(sizes)
        parts = zip(*pieces, of_experts, strict=True)
        for one, part, matrix in parts:
            torch.mm(part, matrix if matrix.dtype == dtype else matrix.to(dtype), out=one)
        if not pads:
            return out
        each = [*itertools.chain.from_iterable(zip(counts, pads, strict=True))]
        return torch.cat(out.split_with_sizes(each)[::2])

    def _aligned(
        self, rows: torch.Tensor, counts: Sequence[int]
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """Adds rows of zeros to those of each expert up to a multiple of :attr:`alike`.

        Returns:
            All rows, each expert's number of them, and how many of these are zeros, if any are.
        """
        pads = [-count % self.alike for count in counts]
        if not any(pads):
            return rows, list(counts), []
        zeros = rows.new_zeros(sum(pads), rows.shape[1])
        pieces = rows.split_with_sizes(list(counts)), zeros.split_with_sizes(pads)
        pairs = zip(*pieces, strict=True)
        return (
            torch.cat([*itertools.chain.from_iterable(pairs)]),
            [*map(operator.add, counts, pads)],
            pads,
        )


PLAIN = Steps()


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Returns where successive runs begin."""
    flat = lengths.reshape(-1)
    return (flat.cumsum(0) - flat).view(lengths.shape)


def _runs(begins: torch.Tensor, lengths: torch.Tensor, total: int) -> torch.Tensor:
    """Returns ``[total]``: runs of successive numbers from ``begins``, one after the other."""
    shifts = (begins - _starts(lengths)).reshape(-1)
    moved = shifts.repeat_interleave(lengths.reshape(-1), output_size=total)
    return moved + torch.arange(total, device=lengths.device)


def stack_of(tensors: Sequence[torch.Tensor], num_dims: int = MATRIX) -> torch.Tensor:
    """All experts' tensors as one, without a copy where they are one or lie at even distances."""
    if len(tensors) == 1 and tensors[0].dim() > num_dims:
        return tensors[0]
    parts = unstacked(tensors, num_dims)
    first = parts[0]
    if len(parts) == 1:
        return first[None]
    step = parts[1].storage_offset() - first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    is_even = step >= first.numel() and all(
        part.untyped_storage().data_ptr() == storage
        and part.stride() == first.stride()
        and part.storage_offset() == first.storage_offset() + i * step
        for i, part in enumerate(parts)
    )
    if is_even:
        return first.as_strided((len(parts), *first.shape), (step, *first.stride()))
    return torch.stack(parts)


def turned(of_experts: Matrices) -> Matrices:
    """Transposes every expert's matrix."""
    if isinstance(of_experts, torch.Tensor):
        return of_experts.mT
    return [one.mT for one in of_experts]


def bias_grad(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """``[num_experts, width]`` sums of each expert's rows."""
    wide = accumulation_dtype(rows.dtype)
    return torch.stack([part.to(wide).sum(0) for part in split(rows, counts)])


def of_wanted(
    targets: Sequence[WeightGrad | None], left: torch.Tensor, right: torch.Tensor, part: Part
) -> tuple[Sequence[WeightGrad], torch.Tensor, torch.Tensor, torch.Tensor, Sequence[int]]:
    """Leaves out the experts whose gradient is not wanted, with their rows.

    Returns the arguments of :meth:`Steps.add_weight_grad`.
    """
    wanted = [target for target in targets if target is not None]
    if len(wanted) == len(targets):
        return wanted, left, right, part.ends, part.counts
    chosen = [target is not None for target in targets]
    left, right = (
        torch.cat([*itertools.compress(split(rows, part.counts), chosen)]) for rows in (left, right)
    )
    counts = [*itertools.compress(part.counts, chosen)]
    ends = torch.tensor([*itertools.accumulate(counts)], dtype=torch.int32, device=left.device)
    return wanted, left, right, ends, counts


def store(
    targets: Sequence[WeightGrad | None], values: torch.Tensor, num_dims: int = MATRIX
) -> None:
    """Adds or writes ``[num_experts, ...]`` gradients to where they go, one expert's or a stack's.

    A buffer that is to be overwritten, and is all of its memory, takes that of the values. One
    expert's has ``num_dims`` dimensions. ``None`` stands for one expert, whose is not wanted.
    """
    left = values
    for target in targets:
        if target is None:
            left = left[1:]
            continue
        buffer = target.buffer
        if buffer.dim() == num_dims:
            target.store(left[0])
            left = left[1:]
            continue
        value, left = left[: len(buffer)], left[len(buffer) :]
        is_whole = (
            buffer._base is None
            and buffer.untyped_storage().nbytes() == buffer.nbytes
            and len(value) == len(values)
            and value.dtype == buffer.dtype
            and value.stride() == buffer.stride()
        )
        if is_whole and not target.accumulate:
            buffer.set_(value)  # type: ignore[call-overload]
        else:
            target.store(value)


def split(rows: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Cuts rows into each expert's."""
    return rows.split_with_sizes(list(counts))  # which torch.split takes longer to call


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def activate(pre_activation: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """Applies the activation to ``[rows, fc1_rows]``; returns ``[rows, intermediate]``."""
    value_and_slope = _VALUE_AND_SLOPE[config.activation]
    if not config.gated:
        return value_and_slope(pre_activation)[0]
    gate, up = _split(pre_activation, config.glu_interleave)
    if config.is_softcapped:
        return _capped_silu(gate, config)[0] * _softcap(up, config.up_softcap)[0]
    if config.clamp_value is not None:
        gate = gate.clamp(max=config.clamp_value)
        up = up.clamp(-config.clamp_value, config.clamp_value)
    return value_and_slope(gate)[0] * (up + config.linear_offset)


def activate_backward(
    pre_activation: torch.Tensor,
    grad_activated: torch.Tensor,
    config: MoEConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result of :func:`activate` again, and the gradient of its input.

    A value that is clamped has no gradient; one at the bound itself has, as in ``torch.clamp``.
    ``grad_activated`` is the gradient of that result.
    """
    value_and_slope = _VALUE_AND_SLOPE[config.activation]
    if not config.gated:
        value, slope = value_and_slope(pre_activation)
        return value, grad_activated * slope
    gate, up = _split(pre_activation, config.glu_interleave)
    if config.is_softcapped:
        value, slope = _capped_silu(gate, config)
        factor, factor_slope = _softcap(up, config.up_softcap)
        grads = (grad_activated * factor * slope, grad_activated * value * factor_slope)
        return value * factor, _join(*grads, config.glu_interleave)
    grad_gate, grad_up = grad_activated, grad_activated
    if config.clamp_value is not None:
        grad_gate = grad_gate * (gate <= config.clamp_value)
        grad_up = grad_up * (up.abs() <= config.clamp_value)
        gate = gate.clamp(max=config.clamp_value)
        up = up.clamp(-config.clamp_value, config.clamp_value)
    value, slope = value_and_slope(gate)
    factor = up + config.linear_offset
    grads = (grad_gate * factor * slope, grad_up * value)
    return value * factor, _join(*grads, config.glu_interleave)


def _split(rows: torch.Tensor, interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up columns apart, each in order."""
    if not interleave:
        gate, up = rows.chunk(2, dim=1)
        return gate, up
    blocks = torch.unflatten(rows, 1, (-1, 2, interleave))
    return blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)


def _join(gate: torch.Tensor, up: torch.Tensor, interleave: int) -> torch.Tensor:
    """The way back."""
    if not interleave:
        return torch.cat((gate, up), dim=1)
    blocks = [torch.unflatten(half, 1, (-1, interleave)) for half in (gate, up)]
    return torch.stack(blocks, dim=2).flatten(1)


def _softcap(z: torch.Tensor, cap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    if cap is None:
        return z, torch.ones_like(z)
    tanh = torch.tanh(z / cap)
    return cap * tanh, 1 - tanh * tanh


def _capped_silu(z: torch.Tensor, config: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The sigmoid reads the gate itself, and the cap bounds what it multiplies."""
    value, slope = _softcap(z, config.gate_softcap)
    sigmoid = torch.sigmoid(z)
    return value * sigmoid, sigmoid * (slope + value * (1 - sigmoid))


def _silu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sigmoid = torch.sigmoid(z)
    return z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))


def _gelu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cdf = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return z * cdf, cdf + z * density


def _gelu_tanh(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    tanh = torch.tanh(scale * (z + cubic * z**3))
    inner_slope = scale * (1 + 3 * cubic * z * z)
    return 0.5 * z * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh * tanh) * inner_slope


def _relu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return z.clamp(min=0), (z > 0).to(z.dtype)


def _squared_relu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positive = z.clamp(min=0)
    return positive * positive, 2 * positive


def _quick_gelu(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sigmoid = torch.sigmoid(1.702 * z)
    return z * sigmoid, sigmoid * (1 + 1.702 * z * (1 - sigmoid))


_VALUE_AND_SLOPE: dict[Activation, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    Activation.SILU: _silu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: _relu,
    Activation.SQUARED_RELU: _squared_relu,
    Activation.QUICK_GELU: _quick_gelu,
}
