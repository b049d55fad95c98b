"""Memory for the data that a reduction receives."""

import logging
from collections.abc import Callable, Sequence

import torch

from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.multipath.links import Link
from flashmoe_megatron.multipath.queues import Queues

logger = logging.getLogger("flashmoe_megatron")


class Inbox:
    """Memory that peers write to without a detour, if a link offers it.

    It is as large as the largest reduction so far, and is kept.

    Args:
        links: The links; some may offer memory.
        queues: The queues of the device where other memory is taken.
    """

    def __init__(self, links: Sequence[Link], queues: Queues) -> None:
        self._links, self._queues = list(links), queues
        self._memory: torch.Tensor | None = None

    def take(self, nbytes: int, announce: Callable[[], None]) -> torch.Tensor:
        """Returns memory for the current stream to receive into; the next call returns it again.

        Collective where it is larger than ever before.

        Args:
            nbytes: How much, the same on every rank.
            announce: Called before ranks wait for each other, to see that all are in one operation.

        Returns:
            ``[nbytes]``, uint8.
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
