"""Waits for the gradients of fc2's weights, which are complete before a backward ends."""

import logging
from collections.abc import Callable

import torch

from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.kernel import bindings

logger = logging.getLogger("flashmoe_megatron")


class EarlyFc2:
    """The stream on which others may use fc2's gradients before a group's last backward ends.

    Attributes:
        num_backwards: Number of the last backward, of any layer; a backward that a graph captures
            has none.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_backwards = 0
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._awaited = 0  # the number of the last backward that the stream waits for
        self._has_no_waits = False  # the driver cannot let a stream wait for a word in memory

    def next_backward(self) -> int:
        """The number of the backward that is launched next; 0 if a graph captures it."""
        if torch.cuda.is_current_stream_capturing():
            return 0
        self.num_backwards += 1
        return self.num_backwards

    def stream_behind(
        self, last_group: Callable[[], bindings.FlashMoEGroup]
    ) -> torch.cuda.Stream | None:
        """A stream that waits for fc2's gradients of the last backward, not for all of it.

        It is ``None`` where the driver has no such waits, which is logged once. ``last_group``
        gives the group as that backward's launch had it.
        """
        if self._has_no_waits:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        if self._awaited != self.num_backwards:
            try:
                bindings.call(
                    "await_fc2_grads", last_group(), self.num_backwards, self._stream.cuda_stream
                )
            except DeviceError as error:
                self._has_no_waits = True
                logger.warning("fc2's gradients are not reduced before a backward ends: %s", error)
                return None
            self._awaited = self.num_backwards
        return self._stream
