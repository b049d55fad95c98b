"""A layer over hosts: what crosses network cards, what a forward takes, and what others publish.

The products run at the rate that the planner takes for a GPU; what passes within a host is not
counted. It is a model: nothing that was measured on several hosts of ours has been compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.planner import ROUTE_BYTES, crossings, forward_over_hosts, products_s
from tools import markdown

GPUS = 8
LAYERS = {
    "Qwen3-30B": (2048, 768, 128, 8192),
    "Qwen3-235B": (4096, 1536, 128, 8192),
    "DeepSeek-V3": (7168, 2048, 256, 4096),
}
"""Hidden and intermediate size, experts, tokens of a rank; top-8 of all."""


@dataclass(frozen=True)
class Published:
    """What others have measured of one exchange, 4,096 tokens of 7,168 a rank, top-8, bfloat16.

    Attributes:
        what: The exchange, and the page that has its figures.
        by_hosts: By hosts of 8 GPUs: GB/s, which count rows to the own host, too; or milliseconds.
        is_rate: Which of both.
    """

    what: str
    by_hosts: dict[int, float]
    is_rate: bool = True


PUBLISHED = (
    Published(
        "DeepEP V1's combine, CX7, in pplx-garden's docs/fabric-lib.md",
        {2: 1.864, 4: 3.565, 8: 5.923},
        is_rate=False,
    ),
    Published("DeepEP V2's combine, CX7, its README.md (8,192 tokens)", {2: 81.0, 4: 61.0}),
    Published(
        "HybridEP's dispatch, H100, 8 SMs, DeepEP's docs/README_Hybrid-EP.md",
        {2: 76.8, 4: 54.5, 8: 50.55},
    ),
    Published("HybridEP's combine, the same", {2: 68.0, 4: 56.4, 8: 51.03}),
)


def layer(name: str, num_hosts: int) -> MoEConfig:
    """A layer with its own number of experts, or with one a GPU where there are more GPUs.

    Raises:
        ValueError: The GPUs do not divide the experts.
    """
    hidden, intermediate, experts, tokens = LAYERS[name]
    if max(experts, GPUS * num_hosts) % (GPUS * num_hosts):
        raise ValueError(f"{num_hosts} hosts of {GPUS} GPUs do not divide {name}'s experts")
    return MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=max(experts, GPUS * num_hosts),
        topk=8,
        activation=Activation.SILU,
        gated=True,
        num_ranks=1,  # a group may have fewer ranks than what is modelled
        max_tokens=tokens,
    )


def table(hosts: Sequence[int], card_gbps: float) -> list[str]:
    """What crosses and how long a forward takes: a row for each host, or for each route."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name in LAYERS:
            for num_hosts in hosts:
                config = layer(name, num_hosts)
                by_host, by_route = crossings(config, num_hosts), config.topk * (1 - 1 / num_hosts)
                routes = min(config.topk, config.num_experts // num_hosts)
                row_bytes = 2 * config.hidden + routes * ROUTE_BYTES
                card, products = config.max_tokens * row_bytes / card_gbps / 1e6, products_s(config)
                ms = [
                    forward_over_hosts(
                        products * 1e3, rows * card, num_hosts=num_hosts, overlap=overlap
                    )
                    for rows, overlap in ((by_route, 0), (by_host, 0), (by_host, 1), (by_host, 2))
                ]
                yield (
                    name,
                    str(num_hosts),
                    str(config.num_experts),
                    f"{by_route:.2f}, {by_host:.2f}",
                    f"{by_host * config.max_tokens * row_bytes / 2**20:.0f}",
                    # Both rounds, as the paper counts; of all hosts at once to one card.
                    f"{2 * by_host * config.max_tokens * row_bytes / 1e6:.0f}",
                    f"{products * 1e3:.2f}",
                    f"{by_host * card:.2f}",
                    *(f"{time:.2f}" for time in ms),
                )

    titles = ("layer", "hosts", "experts", "rows a token: by route, by host")
    titles += ("MiB a card, each way", "MIV, MB", "products, ms", "card each way, ms")
    return markdown.table(
        (*titles, "forward by route, ms", "by host", "overlap 1", "overlap 2"), rows()
    )


def published_table(card_gbps: float) -> list[str]:
    """One exchange by the model and as others have measured it, in milliseconds."""
    hosts = (2, 4, 8)
    config = layer("DeepSeek-V3", 1)
    row_gb = config.max_tokens * 2 * config.hidden / 1e9

    def milliseconds(entry: Published, num_hosts: int) -> str:
        value = entry.by_hosts.get(num_hosts)
        if value is None or not entry.is_rate:
            return "" if value is None else f"{value:.2f}"
        with_own = crossings(config, num_hosts) * num_hosts / (num_hosts - 1)
        return f"{with_own * row_gb / value * 1e3:.2f} ({value:g} GB/s)"

    def rows() -> Iterator[tuple[str, ...]]:
        model = (f"{crossings(config, n) * row_gb / card_gbps * 1e3:.2f}" for n in hosts)
        yield (f"this model, {card_gbps:g} GB/s a card", *model)
        for entry in PUBLISHED:
            yield (entry.what, *(milliseconds(entry, num_hosts) for num_hosts in hosts))

    return markdown.table(
        ("one way, ms", *(f"{GPUS * num_hosts} GPUs" for num_hosts in hosts)), rows()
    )
