"""Gradients of weights in the one kind that the kernel writes, and from there where they belong."""

import functools
import operator
from collections.abc import Sequence
from operator import attrgetter, itemgetter

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
        buffers: Where the wanted gradients go, in their order.
        addresses: Where each buffer begins.
    """

    def __init__(self, grads: Sequence[WeightGrad | None]) -> None:
        self.grads = list(grads)
        self._lent: list[tuple[WeightGrad, torch.Tensor]] = []
        if not self._are_uniform():
            self._make_uniform()
            self._are_uniform()

    def _are_uniform(self) -> bool:
        """Returns whether the kernel can write these; notes their buffers and addresses."""
        # Loops in C: this runs before a launch, over two weights of each expert.
        wanted = list(filter(None, self.grads))
        self.buffers: tuple[torch.Tensor, ...] = tuple(map(itemgetter(0), wanted))
        self.addresses: tuple[int, ...] = tuple(map(torch.Tensor.data_ptr, self.buffers))
        adds, dtypes = set(map(itemgetter(1), wanted)), set(map(attrgetter("dtype"), self.buffers))
        bits = functools.reduce(operator.or_, self.addresses, 0)
        return len(adds) <= 1 and len(dtypes) <= 1 and bits % ALIGNMENT_BYTES == 0

    def _make_uniform(self) -> None:
        """Lends buffers to gradients that are not of the widest kind, or not aligned."""
        places = [place for place, grad in enumerate(self.grads) if grad is not None]
        grads = list(filter(None, self.grads))
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
