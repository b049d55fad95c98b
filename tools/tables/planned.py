"""Makes the tables of what the planner says: memory of a layer, and layers over hosts."""

from collections.abc import Iterator

from flashmoe_megatron.bench.shapes import Shape
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.kernel.memory import plan_memory, reads_tokens
from flashmoe_megatron.planner import (
    CARD_BYTES_PER_S,
    ROUTE_BYTES,
    choose_keep,
    crossings,
    forward_over_hosts,
    kept_bytes,
    plan_hosts,
    products_s,
    share_of_host,
)
from tools import markdown

QWEN3_30B = Shape(8192, 2048, 768, 128, 8, gated=True)
QWEN3_235B = Shape(8192, 4096, 1536, 128, 8, gated=True)
DEEPSEEK_V3 = Shape(4096, 7168, 2048, 256, 8, gated=True)
MIXTRAL = Shape(8192, 4096, 14336, 8, 2, gated=True)
GPUS = 8
"""The GPUs of a host."""
RATES = {
    "DeepEP V2's combine, CX7, its README.md (8,192 tokens)": {2: 81.0, 4: 61.0},
    "HybridEP's dispatch, H100, 8 SMs, DeepEP's docs/README_Hybrid-EP.md": {
        2: 76.8,
        4: 54.5,
        8: 50.55,
    },
    "HybridEP's combine, the same": {2: 68.0, 4: 56.4, 8: 51.03},
}
"""GB/s that others publish, rows to the own host among them, by hosts: 7,168 wide, top-8 of 256."""
TIMES_MS = {
    "DeepEP V1's combine, CX7, in pplx-garden's docs/fabric-lib.md": {2: 1.864, 4: 3.565, 8: 5.923}
}
"""Times that others publish of 4,096 such tokens."""


def kept() -> list[str]:
    """The GB that a forward keeps for its backward; the library knows who reads tokens."""
    named = {
        "Qwen3-30B-A3B, 8K": QWEN3_30B,
        "Qwen3-235B-A22B, 8K": QWEN3_235B,
        "DeepSeek-V3, 4K": DEEPSEEK_V3,
        "Mixtral 8x7B, 8K": MIXTRAL,
    }

    def rows() -> Iterator[list[str]]:
        for name, one in named.items():
            routes = one.tokens * one.topk
            others = (
                2 * routes * (one.hidden + 3 * one.intermediate),
                2 * one.tokens * one.hidden + 4 * routes * one.intermediate,
            )
            config = one.config(1)
            ours = (kept_bytes(config, keep) for keep in ("all", "preactivations"))
            chosen = [
                choose_keep("auto", each, reads_tokens=reads_tokens(each))
                for each in map(one.config, (1, 2, 4, 8))
            ]
            said = f"{chosen[0]} on each" if len(set(chosen)) == 1 else ", ".join(chosen)
            yield [name, *(f"{size / 1e9:.2f}" for size in (*others, *ours)), said]

    titles = ("GB that one layer keeps in bf16, and tokens of a rank", "Transformer Engine")
    titles += ("SonicMoE", '`"all"`', '`"preactivations"`', '`"auto"` on 1, 2, 4, 8 ranks')
    return markdown.table(titles, rows())


def hosts_take() -> list[str]:
    """Rows that cross between hosts, and the launches for them; the library knows their heap."""
    named = {
        "Qwen3-30B": (QWEN3_30B, (2, 8, 16)),
        "Qwen3-235B": (QWEN3_235B, (2, 8, 16)),
        "DeepSeek-V3": (DEEPSEEK_V3, (2, 8, 16, 32)),
    }

    def rows() -> Iterator[list[object]]:
        for name, (shape, hosts) in named.items():
            for num_hosts in hosts:
                config = shape.config(GPUS * num_hosts)
                plan = plan_hosts(config, num_hosts)
                of_host = share_of_host(config, num_hosts, plan.launch_tokens)
                heap = plan_memory(of_host, keep="all").symmetric
                yield [
                    name,
                    num_hosts,
                    f"{plan.rows:.2f}",
                    f"{plan.card_bytes / 2**20:.0f}",
                    f"{plan.launches} of {plan.launch_tokens:,} tokens",
                    f"{heap / 2**20:,.0f}",
                ]

    titles = ("layer (8,192 tokens a rank, DeepSeek-V3 4,096)", "hosts")
    titles += ("rows of a token to other hosts", "MiB a card, each way", "launches", "heap, MiB")
    return markdown.table(titles, rows())


def _over_hosts(num_hosts: int) -> MoEConfig:
    """DeepSeek-V3's layer, with an expert for each GPU where there are more GPUs than experts."""
    num_experts = max(DEEPSEEK_V3.num_experts, GPUS * num_hosts)
    shape = Shape(**{**vars(DEEPSEEK_V3), "num_experts": num_experts})
    return shape.config(1)  # a group may have fewer ranks than are modelled


def hosts_cost() -> list[str]:
    """Rows that cross, and the time of a forward, with a row for each host or for each route."""

    def rows() -> Iterator[list[object]]:
        for num_hosts in (2, 8, 32, 512):
            config = _over_hosts(num_hosts)
            by_host, by_route = crossings(config, num_hosts), config.topk * (1 - 1 / num_hosts)
            routes = min(config.topk, config.num_experts // num_hosts)
            num_bytes = config.max_tokens * (2 * config.hidden + routes * ROUTE_BYTES)
            card, products = num_bytes / CARD_BYTES_PER_S, products_s(config)
            forwards = [
                forward_over_hosts(products, each * card, num_hosts=num_hosts, overlap=overlap)
                for each, overlap in ((by_route, 0), (by_host, 0), (by_host, 1), (by_host, 2))
            ]
            yield [
                "DeepSeek-V3",
                num_hosts,
                config.num_experts,
                f"{by_route:.2f}, {by_host:.2f}",
                f"{by_host * num_bytes / 2**20:.0f}",
                f"{2 * by_host * num_bytes / 1e6:.0f}",
                *(f"{1e3 * each:.2f}" for each in (products, by_host * card, *forwards)),
            ]

    titles = ("layer", "hosts", "experts", "rows a token: by route, by host")
    titles += ("MiB a card, each way", "MIV, MB", "products, ms", "card each way, ms")
    titles += ("forward by route, ms", "by host", "overlap 1", "overlap 2")
    return markdown.table(titles, rows())


def hosts_published() -> list[str]:
    """One exchange of DeepSeek-V3's layer by the model, and as others have measured it."""
    hosts = (2, 4, 8)
    config = _over_hosts(1)
    row_bytes = config.max_tokens * 2 * config.hidden

    def model(num_hosts: int) -> str:
        return f"{1e3 * crossings(config, num_hosts) * row_bytes / CARD_BYTES_PER_S:.2f}"

    def by_rate(num_hosts: int, gbps: float | None) -> str:
        if gbps is None:
            return ""
        with_own = crossings(config, num_hosts) * num_hosts / (num_hosts - 1)
        return f"{with_own * row_bytes / gbps / 1e6:.2f} ({gbps:g} GB/s)"

    rows = [[f"this model, {CARD_BYTES_PER_S / 1e9:g} GB/s a card", *map(model, hosts)]]
    rows += [[name, *(f"{of[one]:.2f}" for one in hosts)] for name, of in TIMES_MS.items()]
    rows += [[name, *(by_rate(one, of.get(one)) for one in hosts)] for name, of in RATES.items()]
    titles = ("one way, ms", *(f"{GPUS * num_hosts} GPUs" for num_hosts in hosts))
    return markdown.table(titles, rows)
