"""Makes the table of FlexLink's figures beside the balancer's on simulated links."""

from typing import Any

from tools import markdown
from tools.bench import multipath


def flexlink() -> list[str]:
    """A row for each published one, as ``tools.bench.multipath table`` computes it."""
    rows = (
        [
            row["operation"].replace("_", "-"),
            row["gpus"],
            row["nccl"],
            row["published"],
            row["simulated"],
            f"{100 * row['off']:+.1f} %",
            *(f"{published}, {100 * simulated:.1f}" for published, simulated in shares_of(row)),
        ]
        for row in multipath.table()
    )
    titles = (
        *("operation", "GPUs", "NCCL", "FlexLink", "simulated", "off by"),
        *("% on PCIe: FlexLink, simulated", "% on RDMA: FlexLink, simulated"),
    )
    return markdown.table(titles, rows)


def shares_of(row: dict[str, Any]) -> list[tuple[int, float]]:
    """The published share of each relay, in per cent, and the simulated one, of 1."""
    return list(zip(row["published_shares"], row["shares"][1:], strict=True))
