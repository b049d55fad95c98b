"""Gradients of weights in the one kind that the kernel writes, and from there where they belong."""

import functools
import operator
from collections.abc import Sequence
from operator import attrgetter

import torch

from flashmoe_megatron.config import ALIGNMENT_BYTES
from flashmoe_megatron.weights import WeightGrad


class UniformGrads:
    """The gradients of one call, all of one dtype, all added or all written, and all aligned.

    Most calls have them like this: then these are the caller's own. They differ where some
    parameters have a ``main_grad`` and others, as frozen ones, have none; gradients that are not of
    the widest kind then get a buffer of it, for the length of the call. So do gradients that do not
    begin at a multiple of 16 bytes, as a ``main_grad`` that Megatron lays after one of odd length.

    Attributes:
        grads: The gradients, ``None`` where none is wanted.
    """

    def __init__(self, grads: Sequence[WeightGrad | None]) -> None:
        self.grads = list(grads)
        self._lent: list[tuple[WeightGrad, torch.Tensor]] = []
        places: Sequence[int] = range(len(grads))
        wanted = list(filter(None, grads))
        if len(wanted) < len(grads):
            places = [place for place, grad in enumerate(grads) if grad is not None]
        if wanted:
            self._make_uniform(wanted, places)

    def _make_uniform(self, grads: Sequence[WeightGrad], places: Sequence[int]) -> None:
        # Loops in C: this runs before a launch, over two weights of each expert.
        buffers, adds = zip(*grads, strict=True)
        dtypes = set(map(attrgetter("dtype"), buffers))
        addresses = functools.reduce(operator.or_, map(torch.Tensor.data_ptr, buffers))
        if len(dtypes) == len(set(adds)) == 1 and addresses % ALIGNMENT_BYTES == 0:
            return
        kinds = {(grad.buffer.dtype, grad.accumulate) for grad in grads}
        is_aligned = [grad.buffer.data_ptr() % ALIGNMENT_BYTES == 0 for grad in grads]
        # The widest dtype, so that nothing is rounded twice; within it main_grad, to copy least.
        dtype = max((kind[0] for kind in kinds), key=lambda dtype: dtype.itemsize)
        accumulate = any(
            aligned and (grad.buffer.dtype, grad.accumulate) == (dtype, True)
            for grad, aligned in zip(grads, is_aligned, strict=True)
        )
        for index, grad, aligned in zip(places, grads, is_aligned, strict=True):
            if aligned and (grad.buffer.dtype, grad.accumulate) == (dtype, accumulate):
                continue
            make = torch.zeros_like if accumulate else torch.empty_like
            buffer = make(grad.buffer, dtype=dtype, memory_format=torch.contiguous_format)
            self.grads[index] = WeightGrad(buffer, accumulate)
            self._lent.append((grad, buffer))

    @property
    def form(self) -> tuple[torch.dtype, bool] | None:
        """Their dtype, and whether they are added; ``None`` if no gradient is wanted."""
        first = next(filter(None, self.grads), None)
        return None if first is None else (first.buffer.dtype, first.accumulate)

    @property
    def are_own(self) -> bool:
        """True if these are all the caller's own, so that there is nothing to settle."""
        return not self._lent

    def settle(self) -> None:
        """Hands on what went to buffers of this call, once they are computed."""
        for grad, buffer in self._lent:
            grad.store(buffer)
