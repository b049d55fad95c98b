"""Makes the table of FlexLink's figures beside the balancer's on simulated links."""

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
        ]
        for row in multipath.table()
    )
    titles = ("operation", "GPUs", "NCCL", "FlexLink", "simulated", "off by")
    return markdown.table(titles, rows)
