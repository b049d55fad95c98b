"""How the kernel runs: what is the same for all layers of an expert-parallel group."""

from dataclasses import dataclass

from flashmoe_megatron.config import (
    DEFAULT_RESERVED_SMS,
    DEFAULT_TIMEOUT_S,
    MAX_ROW_BOUND,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    is_count,
    is_number,
)
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.symmetric import SymmetricBackend


@dataclass(frozen=True)
class KernelOptions:
    """How the kernel runs; the same on every rank.

    Attributes:
        symmetric_backend: "cuda" or "nvshmem".
        timeout_s: Bound of every wait for a peer, seconds.
        reserved_sms: SMs left to other kernels.
        row_bound: What every buffer of received rows holds, as a multiple of the mean number of
            rows per rank; a rank that is to receive more is an error, nothing is ever dropped. The
            layer is then one launch that the host never waits for, and CUDA graphs can capture it;
            who replays one orders it with all other calls of the group's layers. ``None``: buffers
            are exact, for which the host waits until the rows are counted.
        counters: Whether launches count where their time goes and what they move, and leave a
            record each. Off, they save the little that this costs.
    """

    symmetric_backend: SymmetricBackend = "cuda"
    timeout_s: float = DEFAULT_TIMEOUT_S
    reserved_sms: int = DEFAULT_RESERVED_SMS
    row_bound: float | None = None
    counters: bool = True

    def __post_init__(self) -> None:
        """Refuses what cannot work."""
        if not is_number(self.timeout_s, least=MIN_TIMEOUT_S, most=MAX_TIMEOUT_S):
            raise ConfigError(
                f"timeout_s={self.timeout_s!r}: must be positive, wanted {MIN_TIMEOUT_S:g} to "
                f"{MAX_TIMEOUT_S:g} seconds"
            )
        if not is_count(self.reserved_sms, least=0):
            raise ConfigError(f"reserved_sms={self.reserved_sms!r}: must not be negative")
        if self.row_bound is not None and not is_number(
            self.row_bound, least=1, most=MAX_ROW_BOUND
        ):
            raise ConfigError(
                f"row_bound={self.row_bound!r}: wanted None, or at least 1, at most "
                f"{MAX_ROW_BOUND:g}"
            )
        if not isinstance(self.counters, bool):
            raise ConfigError(f"counters={self.counters!r}: wanted True or False")
