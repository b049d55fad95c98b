"""What replicas cost and bring, on eight virtual ranks of one GPU.

    python -m tests.gpu.skew --out skew.jsonl

For each layer a forward and backward of all ranks is timed, under a uniform
routing, and under a skewed one with no spare slots and with two; the median of some. Experts are
as popular as words (Zipf), in the first order of some whose busiest rank has about ``--imbalance``
times the mean rows. Planning is the time that launches record from their begin until their plan is
there, with slots less without, in a small layer of 256 experts, also for a routing where nothing
moves. The launch that settles on replicas ahead of a forward is timed by itself, and so are forward
and backward behind it. A slow link is made of heaps in the host's memory: forwards are timed by how
many steps of own rows they compute first, and compared bit for bit.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import functools
import itertools
import json
import operator
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flashmoe_megatron.bench.shapes import SHAPES
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.kernel.symmetric import SymmetricAllocation
from flashmoe_megatron.replicas.policy import When
from flashmoe_megatron.telemetry.record import LaunchRecord, Phase
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.gpu.virtual import VirtualLayer, device, streams, streams_ahead

RANKS = 8
HOST_CYCLES = 40_000_000
"""How long the GPU waits, some 20 ms, while the host launches a step of all ranks."""
Routing = list[tuple[torch.Tensor, torch.Tensor]]
"""Probabilities and maps of all ranks."""


def even(config: MoEConfig) -> Routing:
    """Each expert gets as many tokens of each rank."""
    tokens, topk = config.max_tokens, config.topk
    first = torch.arange(tokens, device=device()).unsqueeze(1) * topk
    return [
        of_experts(config, (first + torch.arange(topk, device=device())) % config.num_experts)
    ] * RANKS


def skewed(config: MoEConfig, zipf: float, imbalance: float | None = None) -> Routing:
    """Popular experts; with an imbalance, in the first order that comes close to it."""
    popularity = torch.arange(1, config.num_experts + 1, device=device()).float() ** -zipf
    for seed in itertools.count():
        g = torch.Generator(device()).manual_seed(seed)
        order = torch.randperm(config.num_experts, generator=g, device=device())
        routing = []
        for _ in range(RANKS):
            shape = (config.max_tokens, config.num_experts)
            noise = torch.rand(shape, generator=g, device=device()).log().neg().log()
            chosen = (popularity[order].log() - noise).topk(config.topk, dim=1).indices
            routing.append(of_experts(config, chosen))
        rows = torch.stack([selected.sum(0) for _, selected in routing]).sum(0)
        rows = rows.view(RANKS, -1).sum(1).double()
        if imbalance is None or abs(float(rows.max() / rows.mean()) - imbalance) < 0.02:
            return routing
    raise AssertionError


def of_experts(config: MoEConfig, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    selected = torch.zeros(len(chosen), config.num_experts, dtype=torch.bool, device=device())
    selected.scatter_(1, chosen, True)
    return selected / config.topk, selected


class Layer:
    """A layer on all ranks, with data of its own."""

    def __init__(self, config: MoEConfig, spare_slots: int, placement: When = "launch") -> None:
        self.layer = VirtualLayer(
            config, is_guarded=False, spare_slots=spare_slots, placement=placement
        )
        g = torch.Generator(device()).manual_seed(1)

        def random(*size: int, scale: float = 1.0) -> torch.Tensor:
            values = torch.empty(size, dtype=torch.bfloat16, device=device())
            return values.normal_(std=scale, generator=g)

        local, ranks = range(config.num_local_experts), range(config.num_ranks)
        sizes = ((config.fc1_rows, config.hidden), (config.hidden, config.intermediate))
        self.x = [random(config.max_tokens, config.hidden) for _ in ranks]
        kinds = [
            [tuple(random(*size, scale=size[1] ** -0.5) for _ in local) for size in sizes]
            for _ in ranks
        ]
        self.out: dict[int, torch.Tensor] = {}
        self.weights = [ExpertWeights(*each) for each in kinds]
        self.grads = [
            [
                [WeightGrad(torch.zeros(size, device=device()), True) for _ in local]
                for size in sizes
            ]
            for _ in ranks
        ]

    def step(self, routing: Routing) -> int:
        """A forward and backward, whose plans are launches; returns the most blocks of a rank."""
        probs, maps = zip(*routing, strict=True)
        x = [rows[: len(each)] for rows, each in zip(self.x, probs, strict=True)]
        out, saved = self.layer.forward(x, probs, maps, self.weights)
        self.layer.backward(out, saved, self.weights, *zip(*self.grads, strict=True))
        torch.cuda.synchronize()
        return max(one.num_row_blocks for one in saved)

    def slow_links(self, ratio: int) -> None:
        """Moves heaps to the host, and has so many steps of own rows computed first."""
        self.layer.prepare()
        torch.cuda.synchronize()
        config, ctas = self.layer.config, self.layer.backends[0].num_ctas
        rate = 700e12 * ctas / 132 / (ratio * config.fc1_rows)
        for backend in self.layer.backends:
            memory = backend.memory
            assert memory._heap is not None
            local = torch.zeros_like(memory._heap.local, device="cpu").pin_memory()
            memory._heap = SymmetricAllocation(local, (local.data_ptr(),), min(rate, 199e9))
            memory._groups.clear()

    def settle(self, routing: Routing) -> None:
        """Settles on the replicas of the next launch, from its own routing; nothing waits."""
        begin = torch.cuda.current_stream()
        for rank, backend in enumerate(self.layer.backends):
            read = functools.partial(operator.getitem, self.weights, rank)
            streams()[rank].wait_stream(begin)
            with torch.cuda.stream(streams()[rank]):
                backend.settle(routing[rank][1], read, layer=0)
        for stream in streams_ahead()[: len(self.layer.backends)]:
            begin.wait_stream(stream)

    def launch(self, routing: Routing, most: int, *, training: bool) -> None:
        """The same as one launch in each direction, all ranks side by side; nothing waits."""
        begin = torch.cuda.current_stream()
        for rank, backend in enumerate(self.layer.backends):
            streams()[rank].wait_stream(begin)
            with torch.cuda.stream(streams()[rank]):
                pending = backend.begin(self.x[rank], *routing[rank], most)
                out, saved = backend.finish(pending, self.weights[rank], training=training)
                self.out[rank] = out
                if training:
                    backend.backward(out, saved, self.weights[rank], *self.grads[rank])
        for stream in streams()[: len(self.layer.backends)]:
            begin.wait_stream(stream)

    def times_ms(
        self, routing: Routing, iterations: int, *, training: bool = True
    ) -> Iterator[float]:
        """Times of all ranks' launches, which are behind a pause so that the host is ahead."""
        for _, ms in self.both_times_ms(routing, iterations, training=training):
            yield ms

    def both_times_ms(
        self, routing: Routing, iterations: int, *, training: bool = True
    ) -> Iterator[tuple[float, float]]:
        """The same, and of what settles on replicas ahead of them, where lookahead is asked for."""
        looks_ahead = self.layer.group.options.placement == "lookahead"
        most = self.step(routing)
        for i in range(-2, iterations):
            begin, settled, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            # The first allocates, which must not wait for one rank's launch ahead of the others'.
            torch.cuda._sleep(HOST_CYCLES * (10 if i == -2 else 1))
            begin.record()
            if looks_ahead:
                self.settle(routing)
            settled.record()
            self.launch(routing, most, training=training)
            end.record()
            torch.cuda.synchronize()
            self.layer.backends[0].raise_pending_fault()
            if i >= 0:
                yield begin.elapsed_time(settled), settled.elapsed_time(end)

    def time_ms(self, routing: Routing, iterations: int, *, training: bool = True) -> float:
        return statistics.median(self.times_ms(routing, iterations, training=training))

    def records(self) -> list[list[LaunchRecord]]:
        return [backend.take_records() for backend in self.layer.backends]

    def plan_us(self, routing: Routing, iterations: int) -> float | None:
        """The least time that a forward's launch on any rank takes to plan.

        A record tells no times where the one before was not read, as that of a plan of its own.
        """
        found = []
        for i, _ in enumerate(self.times_ms(routing, iterations + 1)):
            launches = self.records()
            found += [
                one.phase_ns[Phase.HEAD] / 1e3
                for of_rank in (launches if i else [])  # the first with plans of their own
                for one in of_rank
                if one.direction == "forward" and Phase.HEAD in one.phase_ns
            ]
        return min(found, default=None)


def loads(records: list[list[LaunchRecord]]) -> dict[str, object]:
    rows = [of_rank[-1].num_rows for of_rank in records]
    replicas = [of_rank[-1].replicas for of_rank in records]
    return {
        "busiest_over_mean": round(max(rows) * len(rows) / sum(rows), 3),
        "replicas": sum(len(one.rows) for one in replicas if one is not None),
    }


def measure_planning(tell: Callable[..., None]) -> None:
    """Tells what planning replicas of 256 experts adds to a launch."""
    small = MoEConfig(
        hidden=64,
        intermediate=64,
        num_experts=256,
        topk=8,
        activation=Activation.RELU,
        gated=False,
        num_ranks=RANKS,
        max_tokens=4096,
    )
    both = {slots: Layer(small, slots) for slots in (0, 2)}
    routings = {"even": even(small)}
    routings |= {f"zipf {zipf}": skewed(small, zipf) for zipf in (0.0, 0.5, 1.0)}
    for name, routing in routings.items():
        plan_us = {slots: layer.plan_us(routing, 20) for slots, layer in both.items()}
        without, with_slots = plan_us.values()
        layer_us = {slots: 1e3 * layer.time_ms(routing, 20) for slots, layer in both.items()}
        tell(
            measurement="plan, 256 experts",
            routing=name,
            planning_us=round(with_slots - without, 2) if with_slots and without else None,
            forward_and_backward_us=round(layer_us[2] - layer_us[0], 2),
            plan_us=plan_us,
            layer_us=layer_us,
            **loads(both[2].records()),
        )


def measure_ahead(shape: str, routing: Routing, iterations: int, tell: Callable[..., None]) -> None:
    """Tells what settling on replicas ahead takes, and what it takes off the launches behind it."""
    for placement in ("launch", "lookahead"):
        layer = Layer(SHAPES[shape].config(RANKS), 2, placement)
        both = [*zip(*layer.both_times_ms(routing, iterations), strict=True)]
        ahead_ms, median_ms = (round(statistics.median(each), 3) for each in both)
        about = {"shape": shape, "placement": placement, **loads(layer.records())}
        tell(**about, ahead_ms=ahead_ms, median_ms=median_ms)
        del layer
        torch.cuda.empty_cache()


def measure_links(shape: str, iterations: int, tell: Callable[..., None]) -> None:
    """Tells how long forwards over slow links take by the own rows that come first."""
    config = SHAPES[shape].config(RANKS)
    routing = skewed(config, 0.0)
    first: dict[int, torch.Tensor] = {}
    for ratio in (1, 2, 3, 1):
        layer = Layer(config, 0)
        layer.slow_links(ratio)
        median = layer.time_ms(routing, iterations, training=False)
        found = {rank: out.clone() for rank, out in layer.out.items()}
        first = first or found
        same = all(torch.equal(found[rank], first[rank]) for rank in range(RANKS))
        tell(shape=shape, overlap_ratio=ratio, forward_ms=round(median, 3), has_equal_bits=same)
        del layer
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b", "paper-8k"])
    parser.add_argument("--zipf", type=float, default=0.5)
    parser.add_argument("--imbalance", type=float, default=1.33)
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--only", choices=("shapes", "ahead", "links", "planning"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines: list[str] = []

    def tell(**what: object) -> None:
        lines.append(json.dumps(what))
        print(lines[-1], flush=True)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")

    for shape in options.shapes if options.only in (None, "shapes") else ():
        config = SHAPES[shape].config(RANKS)
        skew = skewed(config, options.zipf, options.imbalance)
        found = []
        for slots, routing in ((0, skewed(config, 0.0)), (0, skew), (2, skew)):
            layer = Layer(config, slots)
            found.append(layer.time_ms(routing, options.iterations))
            about = {"zipf": 0.0 if len(found) == 1 else options.zipf, "slots": slots}
            tell(shape=shape, **about, median_ms=round(found[-1], 3), **loads(layer.records()))
            del layer
            torch.cuda.empty_cache()
        uniform, without, with_slots = found
        tell(
            shape=shape,
            slots_over_none=round(with_slots / without, 3),
            slots_over_uniform=round(with_slots / uniform, 3),
        )
    for shape in options.shapes if options.only in (None, "ahead") else ():
        skew = skewed(SHAPES[shape].config(RANKS), options.zipf, options.imbalance)
        measure_ahead(shape, skew, options.iterations, tell)
    for shape in options.shapes if options.only in (None, "links") else ():
        measure_links(shape, options.iterations, tell)
    if options.only in (None, "planning"):
        measure_planning(tell)


if __name__ == "__main__":
    main()
