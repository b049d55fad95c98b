"""One rank as the C interface sees it, for tests that need no GPU."""

import ctypes

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.kernel import bindings


def problem_of(config: MoEConfig, num_ctas: int = 128) -> bindings.FlashMoEProblem:
    """The first rank's layer, in bfloat16."""
    return bindings.problem_of(
        config,
        rank=0,
        dtype=bindings.BFLOAT16,
        transposed=False,
        num_ctas=num_ctas,
        heap=bindings.HeapBounds.of(config),
        timeout=1.0,
    )


class Mailbox:
    """The memory of a group's mailbox.

    Attributes:
        address: Where it is.
        nbytes: How long it is.
    """

    def __init__(self, problem: bindings.FlashMoEProblem) -> None:
        sizes = bindings.FlashMoESizes()
        bindings.call("sizes", problem, sizes)
        self.nbytes = int(sizes.mailbox_bytes)
        self._room = ctypes.create_string_buffer(self.nbytes + 256)
        self.address = (ctypes.addressof(self._room) + 255) // 256 * 256
