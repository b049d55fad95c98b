"""Products of rows in order of experts with the experts' matrices, as a GPU makes them.

Products in bfloat16 are torch's grouped GEMM. In other dtypes they are made expert by expert.
"""

import functools
from collections.abc import Sequence

import torch

from flashmoe_megatron.separate.activations import accumulation_dtype
from flashmoe_megatron.weights import MATRIX, ExpertWeights, WeightGrad, unstacked

Matrices = Sequence[torch.Tensor] | torch.Tensor
"""One matrix for each expert, or a stack of them."""


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


def is_grouped(rows: torch.Tensor) -> bool:
    """Returns whether torch's grouped GEMM makes the products of such rows."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and _has_grouped(rows.device)


def matrices(weights: ExpertWeights) -> tuple[Matrices, Matrices]:
    """Orients stacks as ``[experts, hidden, fc1_rows]`` and ``[experts, intermediate, hidden]``."""
    fc1, fc2 = stack_of(weights.fc1), stack_of(weights.fc2)
    return (fc1, fc2) if weights.transposed else (fc1.mT, fc2.mT)


def turned(of_experts: Matrices) -> Matrices:
    """Transposes every expert's matrix."""
    if isinstance(of_experts, torch.Tensor):
        return of_experts.mT
    return [one.mT for one in of_experts]


@functools.cache
def _has_grouped(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def product(
    rows: torch.Tensor, of_experts: Matrices, ends: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """Multiplies each row by its expert's matrix.

    Args:
        rows: ``[num_rows, width]``, by expert.
        of_experts: ``[width, out]`` of each expert, any strides.
        ends: ``[num_experts]`` int32, where each expert's rows end.
        counts: Rows of each expert, which grouped GEMMs do not need.

    Returns:
        ``[num_rows, out]``; unspecified after the last expert's rows.
    """
    if is_grouped(rows) and len(rows):
        assert isinstance(of_experts, torch.Tensor), "grouped products take a stack"
        grouped: torch.Tensor = torch._grouped_mm(rows, of_experts, offs=ends)
        return grouped
    return one_by_one(rows, of_experts, counts)


grad_product = product


def one_by_one(
    rows: torch.Tensor,
    of_experts: Matrices,
    counts: Sequence[int],
    alike: int = 1,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiplies each row by its expert's matrix, expert by expert.

    Args:
        rows: ``[num_rows, width]``, by expert.
        of_experts: ``[width, out]`` of each expert.
        counts: Rows of each.
        alike: Each product is of a multiple of so many rows, the last ones zeros.
        dtype: In which products are made; by default the rows'.
    """
    out = rows.new_empty(len(rows), of_experts[0].shape[1], dtype=dtype)
    parts = zip(split(out, counts), split(rows, counts), of_experts, strict=True)
    for one, part, matrix in parts:
        part, matrix = part.to(out.dtype), matrix.to(out.dtype)
        if missing := -len(part) % alike:
            whole = torch.nn.functional.pad(part, (0, 0, 0, missing))
            one.copy_(torch.mm(whole, matrix)[: len(part)])
        else:
            torch.mm(part, matrix, out=one)
    return out


def padded(rows: torch.Tensor, alike: int) -> torch.Tensor:
    """Adds rows of zeros up to a multiple of ``alike``."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % alike))


def weight_grad(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """``left.T @ right`` of each expert's rows, zero for experts without any.

    Returns:
        ``[num_experts, width of left, width of right]``: in the rows' dtype from grouped GEMMs,
        else in the dtype of sums.
    """
    if is_grouped(left) and len(left):
        grouped: torch.Tensor = torch._grouped_mm(left.t(), right, offs=ends)
        for expert, count in enumerate(counts):
            if not count:  # a product over no rows is left as it was
                grouped[expert].zero_()
        return grouped
    return grads_one_by_one(left, right, counts)


def grads_one_by_one(
    left: torch.Tensor, right: torch.Tensor, counts: Sequence[int], alike: int = 1
) -> torch.Tensor:
    """Computes :func:`weight_grad` expert by expert, in the dtype of sums.

    Args:
        left: ``[num_rows, ...]``, by expert.
        right: Likewise.
        counts: Rows of each expert.
        alike: Each product is over a multiple of so many rows, the last ones zeros.
    """
    wide = accumulation_dtype(left.dtype)
    out = left.new_empty(len(counts), left.shape[1], right.shape[1], dtype=wide)
    for one, a, b in zip(out, split(left, counts), split(right, counts), strict=True):
        if len(a) % alike:
            a, b = padded(a, alike), padded(b, alike)
        torch.mm(a.t().to(wide), b.to(wide), out=one)
    return out


def add_weight_grad(
    targets: Sequence[WeightGrad],
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor,
    counts: Sequence[int],
) -> None:
    """Adds or writes :func:`weight_grad` to where it goes.

    On a GPU, products of 16 bits are added in float32 expert by expert, since torch's grouped GEMM
    rounds its sums to 16 bits.
    """
    is_narrow = left.dtype in (torch.bfloat16, torch.float16)
    adds = all(one.accumulate and one.buffer.dtype == torch.float32 for one in targets)
    if not (adds and is_narrow and left.device.type == "cuda"):
        store(targets, weight_grad(left, right, ends, counts))
        return
    buffers = unstacked([target.buffer for target in targets], MATRIX)
    parts = zip(buffers, split(left, counts), split(right, counts), strict=True)
    for buffer, a, b in parts:
        if len(a):
            torch.addmm(buffer, a.t(), b, out_dtype=torch.float32, out=buffer)


def bias_grad(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """``[num_experts, width]`` sums of each expert's rows."""
    wide = accumulation_dtype(rows.dtype)
    return torch.stack([part.to(wide).sum(0) for part in split(rows, counts)])


def store(targets: Sequence[WeightGrad], values: torch.Tensor, num_dims: int = MATRIX) -> None:
    """Adds or writes all experts' gradients to where they go.

    A buffer that is to be overwritten, and is all of its memory, takes that of the values.

    Args:
        targets: One expert's or a stack's each.
        values: ``[num_experts, ...]``.
        num_dims: The dimensions of one expert's.
    """
    left = values
    for target in targets:
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
    return torch.split(rows, list(counts))
