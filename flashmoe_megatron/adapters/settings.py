"""What a user chooses for MoE layers in either framework.

The frameworks add what is theirs, and say in their own words where a value came from.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from flashmoe_megatron.config import DEFAULT_RESERVED_SMS, Keep
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import BackendKind, SymmetricBackend, wanted_instead
from flashmoe_megatron.telemetry.registry import choose_metrics


@dataclass(frozen=True, kw_only=True)
class LayerSettings(ABC):
    """Options that every framework offers, under these names.

    Attributes:
        backend: "kernel", "reference", or "auto": the kernel on a Hopper GPU, else the reference.
        symmetric_memory: What the kernel shares memory between GPUs with, "cuda" or "nvshmem".
        reserved_sms: Multiprocessors that the kernel leaves free, for NCCL's kernels.
        row_bound: What the kernel's buffers of received rows hold, as a multiple of the mean number
            of rows per rank; a rank that receives more is an error, never a drop. ``None`` makes
            them exact, for which the host waits in every forward of training.
        keep: What a forward keeps for its backward: "all" that this needs; the first projection's
            outputs, "preactivations", for which tokens are fetched again; or the layer's "inputs",
            from which the backward computes the rest again.
        metrics: What is told to the framework's loggers: "default", "all", "none", or names with
            commas between them.
        calibration: File with the layers' time on 2 GPUs, for the overlap efficiency.
    """

    backend: BackendKind = "auto"
    symmetric_memory: SymmetricBackend = "cuda"
    reserved_sms: int = DEFAULT_RESERVED_SMS
    row_bound: float | None = None
    keep: Keep = "all"
    metrics: str = "default"
    calibration: str | None = None

    def __post_init__(self) -> None:
        """Refuses values without a meaning."""
        for name in ("backend", "reserved_sms", "row_bound", "keep"):
            self._check(name)
        self._check("symmetric_memory", "symmetric_backend")
        try:
            choose_metrics(self.metrics)
        except ConfigError as error:
            raise self._refusal("metrics", str(error)) from None
        if self.calibration is not None and not (
            isinstance(self.calibration, str) and self.calibration
        ):
            raise self._refusal("calibration", "wanted the path of a file")

    def kernel_options(self) -> dict[str, Any]:
        """What of this is passed to the kernel's backend."""
        return {
            "symmetric_backend": self.symmetric_memory,
            "timeout_s": self._kernel_timeout_s(),
            "reserved_sms": self.reserved_sms,
            "row_bound": self.row_bound,
            "counters": self.metrics != "none",
        }

    @abstractmethod
    def _kernel_timeout_s(self) -> float:
        """Longest wait of the kernel for a peer, in seconds."""

    @abstractmethod
    def _refusal(self, name: str, why: str) -> ConfigError:
        """The error that a field's value is, which says where it was given."""

    def _check(self, name: str, option: str | None = None) -> None:
        """Refuses a field's value that an option, of the same name unless given, cannot have."""
        wanted = wanted_instead(option or name, getattr(self, name))
        if wanted is not None:
            raise self._refusal(name, f"wanted {wanted}")
