"""The figures that the model is fed with, from the one file that has them and their sources."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashmoe_megatron.measured import files

FILE = Path(__file__).with_name("figures.json")


class FigureError(Exception):
    """The file of figures cannot be used."""


@dataclass(frozen=True)
class Figures:
    """Measured or assumed properties of GPUs and links.

    Attributes:
        cublas_tflops: A large bfloat16 product.
        num_sms: Multiprocessors that it uses.
        num_ctas: CTAs of the kernel; two of them take tiles together.
        hbm_gbps: Bytes that a copy reads and writes.
        nvlink_gbps: One GPU to its domain, one direction, while all copy.
        nvlink_row_gbps: The same, of a kernel that pulls rows.
        nvlink_latency_us: Until a first row arrives.
        nic_gbps: One GPU to other domains, one direction; 0 if there are none.
        nic_latency_us: Until a first row of another domain arrives.
        domain: GPUs that NVLink joins.
    """

    cublas_tflops: float
    num_sms: int
    num_ctas: int
    hbm_gbps: float
    nvlink_gbps: float
    nvlink_row_gbps: float
    nvlink_latency_us: float
    nic_latency_us: float
    nic_gbps: float = 0.0
    domain: int = 8


@dataclass(frozen=True)
class Fitted:
    """Figures that no microbenchmark tells, fitted to measured times of whole layers.

    Defaults are where a fit begins.

    Attributes:
        product_efficiency: Rate of the kernel's products relative to cuBLAS.
        tile_us: What a tile costs besides its products.
        derivative_us: What each tile adds that the backward's first epilogue reads or writes.
        wgrad_efficiency: Rate of the weight gradients' products relative to cuBLAS.
        wgrad_tile_us: What a tile of a weight gradient costs besides its products.
        link_efficiency: Rate of dispatch and combine relative to a peer copy.
        forward_us, backward_us: What a launch costs once: plan, first rows, last sums.
        forward_slowing, backward_slowing: What part of their rate products lose that go on for
            long, since the GPU comes to its power limit: an H200's cuBLAS does 772 TFLOP/s for a
            millisecond, and 675 for a second.
        files: With the measured times, relative to the checkout.
        fitted_to: The points that were seen.
    """

    product_efficiency: float = 0.95
    tile_us: float = 3.0
    derivative_us: float = 3.0
    wgrad_efficiency: float = 0.9
    wgrad_tile_us: float = 5.0
    link_efficiency: float = 0.9
    forward_us: float = 50.0
    backward_us: float = 30.0
    forward_slowing: float = 0.1
    backward_slowing: float = 0.1
    files: tuple[str, ...] = ()
    fitted_to: tuple[str, ...] = ()

    def once_us(self, *, backward: bool) -> float:
        """The fixed cost of a launch."""
        return self.backward_us if backward else self.forward_us

    def slowing(self, *, backward: bool) -> float:
        """The part of their rate that a launch's products lose in the end."""
        return self.backward_slowing if backward else self.forward_slowing


def load(path: Path = FILE) -> tuple[Figures, Fitted]:
    """Reads the file.

    Raises:
        FigureError: A figure is missing or of a wrong kind.
    """
    try:
        data = json.loads(path.read_text())
        measured = {**data["links"], **data["tiles"]}
        values = {name: figure["value"] for name, figure in measured.items()}
        return files.build(Figures, values), files.build(Fitted, data["fitted"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FigureError(f"{path}: {error!r}") from error


def store(fitted: Fitted, path: Path = FILE) -> None:
    """Replaces what the file holds as fitted."""
    data: dict[str, Any] = json.loads(path.read_text())
    rounded: dict[str, Any] = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in asdict(fitted).items()
    }
    files.write(path, {**data, "fitted": rounded})
