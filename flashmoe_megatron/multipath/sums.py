"""Sums whose bits do not depend on which link brought what."""

from collections.abc import Sequence

import torch

from flashmoe_megatron.errors import ShapeError

_ELEMENTS = 2**24
"""How many elements are summed at once, which bounds the memory that this takes."""
_ACCUMULATORS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int16: torch.int16,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}


def check_summable(dtype: torch.dtype, average: bool) -> None:
    """Refuses what has no sum here.

    Raises:
        ShapeError: The dtype cannot be summed, or integers were to be averaged.
    """
    if dtype not in _ACCUMULATORS or (average and not dtype.is_floating_point):
        kinds = [one for one in _ACCUMULATORS if one.is_floating_point or not average]
        names = ", ".join(str(one).removeprefix("torch.") for one in kinds)
        what = "averages" if average else "sums"
        raise ShapeError(f"{what} of {dtype}: wanted one of {names}")


def sum_in_order(
    contributions: Sequence[torch.Tensor], output: torch.Tensor, average: bool
) -> None:
    """Adds every rank's contribution in rank order, in float32 (float64 for float64).

    Args:
        contributions: ``[n]`` of every rank, in rank order.
        output: ``[n]``; may be one of them.
        average: Divides by the number of ranks.
    """
    accumulator = _ACCUMULATORS[output.dtype]
    # One addition alone is rounded once, whatever the type, and takes no memory.
    is_one = len(contributions) == 2 and not average
    step = output.numel() if is_one else _ELEMENTS
    for begin in range(0, output.numel(), max(step, 1)):
        total, *others, last = (one[begin : begin + step] for one in contributions)
        target = output[begin : begin + step]
        if not is_one:
            total = total.to(accumulator)
        for other in others:
            total = total + other
        if average:
            target.copy_((total + last).div_(len(contributions)))
        else:
            torch.add(total, last, out=target)
