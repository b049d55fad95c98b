"""Receives and sums the data of a reduction; a sum's bits depend on no link."""

import logging
from collections.abc import Callable, Sequence

import torch

from flashmoe_megatron.errors import DeviceError, ShapeError
from flashmoe_megatron.multipath.links import Link
from flashmoe_megatron.multipath.queues import Queues

logger = logging.getLogger("flashmoe_megatron")

_ELEMENTS = 2**24
"""So many elements are summed at once, which bounds the memory that this takes."""
_ACCUMULATORS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    **{one: one for one in (torch.float32, torch.float64, torch.uint8)},
    **{one: one for one in (torch.int8, torch.int16, torch.int32, torch.int64)},
}


class Inbox:
    """Memory that peers write to without a detour, if a link offers it.

    It is as large as the largest reduction so far, and is kept.
    """

    def __init__(self, links: Sequence[Link], queues: Queues) -> None:
        self._links, self._queues = list(links), queues
        self._memory: torch.Tensor | None = None

    def take(self, nbytes: int, announce: Callable[[], None]) -> torch.Tensor:
        """Returns ``[nbytes]`` uint8 for the current stream to receive into, until the next call.

        Collective where it is larger than ever before; ``announce`` then sees that all ranks are in
        one operation, before they wait for each other.
        """
        if self._links and (self._memory is None or self._memory.numel() < nbytes):
            announce()
            self._grow(nbytes)
        if self._memory is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._queues.device)
        return self._memory[:nbytes]

    def _grow(self, nbytes: int) -> None:
        if self._memory is not None:
            self._queues.synchronize()
            memory, self._memory = self._memory, None
            self._links[0].free(memory)
        while self._links:
            try:
                self._memory = self._links[0].allocate(nbytes)
            except DeviceError as error:  # the same on every rank
                self._links[0].raise_if_broken()
                logger.warning("reductions take a detour: %s", error)
            if self._memory is not None:
                return
            del self._links[0]


def check_summable(dtype: torch.dtype, average: bool) -> None:
    """Refuses what has no sum here.

    Raises:
        ShapeError: The dtype cannot be summed, or integers were to be averaged.
    """
    kinds = [one for one in _ACCUMULATORS if one.is_floating_point or not average]
    if dtype not in kinds:
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
