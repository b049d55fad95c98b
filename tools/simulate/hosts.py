"""A layer over hosts: what crosses a network card, and how long a forward takes at a card's rate.

    python -m tools.simulate.hosts [--card-gb-per-s 45]

The products run at the rate that the planner takes for a GPU; what passes within a host is not
counted. A model of ours, with which nothing that was measured on several hosts has been compared.
"""

import argparse

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.hosts.crossing import parted
from flashmoe_megatron.planner import TENSOR_FLOPS, plan_hosts

GPUS = 8
LAYERS = {
    "Qwen3-30B": (2048, 768, 128, 8192),
    "Qwen3-235B": (4096, 1536, 128, 8192),
    "DeepSeek-V3": (7168, 2048, 256, 4096),
}
"""Hidden and intermediate size, experts, tokens of a rank; top-8 of all."""


def forward_ms(compute_ms: float, card_ms: float, *, hosts: int, overlap: int) -> float:
    """Milliseconds of a forward.

    Args:
        compute_ms: Its products.
        card_ms: Its rows on a card, in one direction. Exchanges of a rank follow one another, so
            that shares begin to return when the last tokens have arrived.
        hosts: The hosts.
        overlap: Launches for the tokens of other hosts; 0 exchanges all before and behind one.
    """
    if not overlap:
        return compute_ms + 2 * card_ms
    ready = compute_ms / hosts  # the own tokens' launch
    back = card_ms
    for leg, part in enumerate(parted(1000, overlap), start=1):
        share = part / 1000
        arrived = card_ms * leg / overlap
        ready = max(ready, arrived) + compute_ms * (1 - 1 / hosts) * share
        back = max(back, ready) + card_ms * share
    return back


def main() -> None:
    """Prints a table for each number of hosts that experts can be spread over."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--card-gb-per-s", type=float, default=45.0, help="of each GPU's card")
    rate = parser.parse_args().card_gb_per_s * 1e9
    print(
        "| layer | hosts | rows a token, by host, by route | MiB a card, each way | products, ms | "
        "card each way, ms | by route, ms | by host | overlap 1 | overlap 2 |"
    )
    print("| --- |" + " --- |" * 9)
    for name, (hidden, intermediate, experts, tokens) in LAYERS.items():
        hosts = 2
        while experts % (GPUS * hosts) == 0:
            config = MoEConfig(
                hidden=hidden,
                intermediate=intermediate,
                num_experts=experts,
                topk=8,
                activation=Activation.SILU,
                gated=True,
                num_ranks=GPUS * hosts,
                max_tokens=tokens,
            )
            plan = plan_hosts(config, hosts)
            products = tokens * config.topk * 2 * hidden * (config.fc1_rows + intermediate)
            compute_ms = products / TENSOR_FLOPS * 1e3
            by_route = config.topk * (1 - 1 / hosts)
            card_ms = plan.card_bytes / rate * 1e3
            times = [forward_ms(compute_ms, card_ms * by_route / plan.rows, hosts=hosts, overlap=0)]
            times += [
                forward_ms(compute_ms, card_ms, hosts=hosts, overlap=overlap)
                for overlap in (0, 1, 2)
            ]
            print(
                f"| {name} | {hosts} | {plan.rows:.2f}, {by_route:.2f} | "
                f"{plan.card_bytes / 2**20:.0f} | {compute_ms:.2f} | {card_ms:.2f} | "
                f"{' | '.join(f'{time:.2f}' for time in times)} |"
            )
            hosts *= 2


if __name__ == "__main__":
    main()
