"""One rank as the C interface sees it, for tests that need no GPU."""

import ctypes
from typing import Any

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.kernel import bindings


def problem_of(
    config: MoEConfig, *, heap: bindings.HeapBounds | None = None, **options: Any
) -> bindings.FlashMoEProblem:
    """The first rank's layer, in bfloat16, by default on a heap of its own.

    Args:
        config: The layer's shape.
        heap: What its heap is laid out for.
        options: What else ``bindings.problem_of`` takes.
    """
    given: dict[str, Any] = {"dtype": bindings.BFLOAT16, "num_ctas": 128, **options}
    return bindings.problem_of(
        config,
        rank=0,
        transposed=False,
        heap=heap or bindings.HeapBounds.of(config, given.get("spare_slots", 0)),
        timeout=1.0,
        **given,
    )


def sizes_of(problem: bindings.FlashMoEProblem) -> bindings.FlashMoESizes:
    """What the library says of a layer."""
    sizes = bindings.FlashMoESizes()
    bindings.call("sizes", problem, sizes)
    return sizes


class Mailbox:
    """The memory of a group's mailbox.

    Attributes:
        address: Where it is.
        nbytes: How long it is.
    """

    def __init__(self, problem: bindings.FlashMoEProblem) -> None:
        self.nbytes = int(sizes_of(problem).mailbox_bytes)
        self._room = ctypes.create_string_buffer(self.nbytes + 256)
        self.address = (ctypes.addressof(self._room) + 255) // 256 * 256
