"""Gradients of weights in the one kind that the kernel writes, and from there where they belong."""

from collections.abc import Sequence

import torch

from flashmoe_megatron.backend import WeightGrad


class UniformGrads:
    """The gradients of one call, all of one dtype and all added or all written.

    Most calls have them like this: then these are the caller's own. They differ where some
    parameters have a ``main_grad`` and others, as frozen ones, have none; those that are not of the
    widest kind then get a buffer of it, for the length of the call.

    Args:
        grads: Of all weights and biases, at least one.

    Attributes:
        grads: What to compute, in the same order.
    """

    def __init__(self, grads: Sequence[WeightGrad]) -> None:
        kinds = {(grad.buffer.dtype, grad.accumulate) for grad in grads}
        self.grads = list(grads)
        self._lent: list[tuple[WeightGrad, torch.Tensor]] = []
        if len(kinds) == 1:
            return
        # The widest dtype, so that nothing is rounded twice; within it main_grad, to copy least.
        dtype, accumulate = max(kinds, key=lambda kind: (kind[0].itemsize, kind[1]))
        for index, grad in enumerate(grads):
            if (grad.buffer.dtype, grad.accumulate) == (dtype, accumulate):
                continue
            make = torch.zeros_like if accumulate else torch.empty_like
            buffer = make(grad.buffer, dtype=dtype, memory_format=torch.contiguous_format)
            self.grads[index] = WeightGrad(buffer, accumulate)
            self._lent.append((grad, buffer))

    def settle(self) -> None:
        """Hands on what went to buffers of this call, once they are computed."""
        for grad, buffer in self._lent:
            if grad.accumulate:
                grad.buffer.add_(buffer)
            else:
                grad.buffer.copy_(buffer)
