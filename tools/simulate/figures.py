"""The figures that the model is fed with, from the one file that has them and their sources."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

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
        hbm_gbps: Of a copy, read and written bytes.
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
    """What no microbenchmark tells, found from measured times of whole layers.

    Attributes:
        product_efficiency: Rate of the kernel's products relative to cuBLAS.
        tile_us: Of a tile beside its products.
        derivative_us: What each tile adds that the backward's first epilogue reads or writes.
        wgrad_efficiency: Rate of the weight gradients' products relative to cuBLAS.
        wgrad_tile_us: Of a tile of a weight gradient beside its products.
        link_efficiency: Rate of dispatch and combine relative to a peer copy.
        host_us: What a forward costs once, by run: Python, launch, plan, first rows, last sums.
        host_backward_us: How long the host takes, by run, from the beginning of a forward until it
            launches the backward, which does not begin before.
        files: With the measured times, relative to the checkout.
        fitted_to: The points that were seen.
    """

    product_efficiency: float = 0.9
    tile_us: float = 2.0
    derivative_us: float = 2.0
    wgrad_efficiency: float = 0.8
    wgrad_tile_us: float = 2.0
    link_efficiency: float = 0.9
    host_us: dict[str, float] = field(default_factory=dict)
    host_backward_us: dict[str, float] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    fitted_to: tuple[str, ...] = ()

    def once_us(self, run: str | None) -> float:
        """The fixed cost of a run, of the fastest host if it is unknown.

        Raises:
            FigureError: Nothing has been fitted.
        """
        if not self.host_us:
            raise FigureError("nothing is fitted: run `python -m tools.simulate fit RESULTS.jsonl`")
        return self.host_us.get(run or "", min(self.host_us.values()))

    def launched_us(self, run: str | None) -> float:
        """When a run's host launches a backward, of the fastest host if it is unknown."""
        return self.host_backward_us.get(
            run or "", min(self.host_backward_us.values(), default=0.0)
        )


def load(path: Path = FILE) -> tuple[Figures, Fitted]:
    """Reads the file.

    Raises:
        FigureError: A figure is missing or of a wrong kind.
    """
    try:
        data = json.loads(path.read_text())
        links, tiles = data["links"], data["tiles"]
        figures = Figures(
            cublas_tflops=float(tiles["cublas_tflops"]["value"]),
            num_sms=int(tiles["num_sms"]["value"]),
            num_ctas=int(tiles["num_ctas"]["value"]),
            hbm_gbps=float(tiles["hbm_gbps"]["value"]),
            nvlink_gbps=float(links["nvlink_gbps"]["value"]),
            nvlink_row_gbps=float(links["nvlink_row_gbps"]["value"]),
            nvlink_latency_us=float(links["nvlink_latency_us"]["value"]),
            nic_latency_us=float(links["nic_latency_us"]["value"]),
        )
        fitted = Fitted(**data["fitted"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FigureError(f"{path}: {error!r}") from error
    return figures, replace(fitted, files=tuple(fitted.files), fitted_to=tuple(fitted.fitted_to))


def store(fitted: Fitted, path: Path = FILE) -> None:
    """Replaces what the file holds as fitted."""
    data: dict[str, Any] = json.loads(path.read_text())
    rounded: dict[str, Any] = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in asdict(fitted).items()
    }
    for name in ("host_us", "host_backward_us"):
        rounded[name] = {run: round(value, 1) for run, value in getattr(fitted, name).items()}
    data["fitted"] = rounded
    path.write_text(json.dumps(data, indent=1) + "\n")
