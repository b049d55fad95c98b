"""Says the least that a layer takes on a machine, by what has to be computed, sent, and read."""

from dataclasses import dataclass

from flashmoe_megatron.bench.shapes import Shape

WEIGHT_BYTES = 2
GRAD_BYTES = {"bf16": 2, "main_grad": 8}
"""Bytes that a gradient moves: it is written in 16 bits, or a float32 sum is read and written."""


@dataclass(frozen=True)
class Rates:
    """The most that a machine can do.

    Attributes:
        tflops: TFLOP/s of a large product.
        link_gbps: GB/s of a copy to another GPU while all copy; ``None`` without other GPUs.
        memory_gbps: GB/s that a copy within one GPU reads and writes, in sum.
    """

    tflops: float
    link_gbps: float | None
    memory_gbps: float


@dataclass(frozen=True)
class Floors:
    """The least time of a layer's forward and backward, in milliseconds."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """The least time of a forward and its backward."""
        return self.forward + self.backward

    def with_weights(self, numbers: float, grads: str, memory_gbps: float) -> "Floors":
        """The floors, if weights and their gradients take longer than all else.

        Args:
            numbers: The numbers of one rank's weights that have rows to be multiplied with.
            grads: "bf16", or "main_grad" for sums in float32.
            memory_gbps: See :class:`Rates`.
        """
        bytes_per_ms = memory_gbps * 1e6
        read = numbers * WEIGHT_BYTES
        return Floors(
            forward=max(self.forward, read / bytes_per_ms),
            backward=max(self.backward, (read + numbers * GRAD_BYTES[grads]) / bytes_per_ms),
        )


def floors_of(
    shape: Shape, rates: Rates, *, remote_rows: float, local_experts: float, grads: str
) -> Floors:
    """The floors of a layer on one of its ranks.

    A pass takes the longest of its products, its rows' way over the links, and its weights' way
    through memory. Products and links have twice as much to do in a backward.

    Args:
        shape: The layer.
        rates: The machine's.
        remote_rows: Rows that a rank has to send at least, one per token and other rank.
        local_experts: A rank's experts that have rows.
        grads: See :meth:`Floors.with_weights`.
    """
    forward = shape.flops / rates.tflops / 1e9
    if rates.link_gbps is not None:
        forward = max(forward, 2 * remote_rows * shape.hidden * 2 / rates.link_gbps / 1e6)
    numbers = local_experts * shape.expert_numbers
    return Floors(forward, 2 * forward).with_weights(numbers, grads, rates.memory_gbps)
