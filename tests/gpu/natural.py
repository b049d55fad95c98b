"""Times natural routing beside forced balance, on virtual ranks of one GPU, by replays of graphs.

    python -m tests.gpu.natural --out natural.jsonl

For each kind of routing of ``tools.simulate.workloads`` a forward and backward is captured on each
rank: routed so with no spare slots and with some, and as ``--moe-router-force-load-balancing`` has
it, with none. Buffers of all three hold as many blocks of rows: those of the row bound, or as many
as the fullest rank needs if that is more. They are replayed in turns, and a line tells the median
of turns, how many rows the busiest rank had over the mean, and what waiting for plans took: the
plan of the rank that arrives last is work alone, and what others' take beyond it is waiting.

Ranks of one GPU share its power and its memory's rate, which idle ranks leave to busy ones, and no
row crosses a link. So a skew costs less here than between GPUs, and replicas' weights and gradients
cost what copies within a GPU's memory do.
"""

import argparse
import statistics
import sys
from dataclasses import replace

import numpy as np
import torch

from flashmoe_megatron.bench.shapes import SHAPES, Shape
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.planner import bounded_row_blocks
from flashmoe_megatron.telemetry.record import Phase
from tests.gpu.skew import Layer, Routing, loads, of_experts
from tests.gpu.virtual import device, streams
from tools.arguments import parser_of
from tools.bench import common
from tools.bench.common import Record
from tools.simulate.workloads import Workload, workloads

TURNS, REPLAYS = 3, 3
FORCED = "W0_balanced"
"""Megatron forces balance by random choices, as this kind has them."""


def routing_of(workload: Workload, config: MoEConfig, num_tokens: int) -> Routing:
    """Draws the choices of all ranks, which have so many tokens on average."""
    rng, routing = np.random.default_rng(11), []
    for share in workload.tokens:
        scores = workload.scores(round(share * num_tokens), rng)
        chosen = np.argpartition(-scores, config.topk - 1, 1)[:, : config.topk]
        routing.append(of_experts(config, torch.from_numpy(chosen).to(device())))
    return routing


class Arm:
    """One routing of a layer, captured on every rank.

    Args:
        layer: The layer, on all ranks.
        routing: The choices of each rank's tokens.
        blocks: Blocks of rows that buffers hold.
        pools: A pool of memory for each rank, which arms share: one is replayed at a time, and
            none reads what another has left.
    """

    def __init__(
        self, layer: Layer, routing: Routing, blocks: int, pools: list[tuple[int, int]]
    ) -> None:
        self._layer, self._graphs = layer, []
        torch.cuda.synchronize()
        for rank, backend in enumerate(layer.layer.backends):
            graph, weights = torch.cuda.CUDAGraph(), layer.weights[rank]
            # Without torch.cuda.graph, whose collection of garbage takes longer than all replays.
            with torch.cuda.stream(streams()[rank]):
                graph.capture_begin(pools[rank], capture_error_mode="thread_local")
                x = layer.x[rank][: len(routing[rank][0])]
                pending = backend.begin(x, *routing[rank], blocks)
                out, saved = backend.finish(pending, weights, training=True)
                backend.backward(out, saved, weights, *layer.grads[rank])
                graph.capture_end()
                del out, saved, pending  # their memory is the next arm's, too
            self._graphs.append(graph)

    def time_ms(self, replays: int) -> float:
        """What a forward and backward of all ranks takes, one after the other."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        now = torch.cuda.current_stream()
        begin.record()
        for rank in range(len(self._graphs)):
            streams()[rank].wait_event(begin)
        for _ in range(replays):
            for rank, graph in enumerate(self._graphs):
                with torch.cuda.stream(streams()[rank]):
                    graph.replay()
        for rank in range(len(self._graphs)):
            now.wait_stream(streams()[rank])
        end.record()
        torch.cuda.synchronize()
        self._layer.layer.backends[0].raise_pending_fault()
        return begin.elapsed_time(end) / replays

    def about(self) -> dict[str, object]:
        """Tells the loads of a launch, and the shortest and longest beginning of its forwards.

        A record has times where the one before it was read.
        """
        self._layer.records()
        self.time_ms(1)
        records = self._layer.records()
        heads = [
            one.phase_ns[Phase.HEAD] / 1e3
            for of_rank in records
            for one in of_rank
            if one.direction == "forward" and Phase.HEAD in one.phase_ns
        ]
        return {**loads(records), "head_us": [round(min(heads), 1), round(max(heads), 1)]}


def measure(name: str, shape: Shape, options: argparse.Namespace, ranks: int, to: Record) -> None:
    """Measures one layer under kinds of routing."""
    plain_config = shape.config(ranks)
    wanted = tuple(options.workloads)
    kinds = {
        kind.name: kind
        for kind in workloads(ranks, shape.num_experts)
        if kind.name.startswith((FORCED, *wanted)) or not wanted
    }
    most = max(max(kind.tokens) for kind in kinds.values())
    config = replace(plain_config, max_tokens=round(most * shape.tokens))
    slots = min(options.slots, config.num_local_experts)
    plain, spare = Layer(config, 0), Layer(config, slots)
    forced = routing_of(kinds[FORCED], config, shape.tokens)
    enough = bounded_row_blocks(plain_config, options.row_bound, slots)
    for kind in kinds.values():
        natural = routing_of(kind, config, shape.tokens)
        asked = {"forced": (plain, forced), "natural": (plain, natural), "slots": (spare, natural)}
        needed = {arm: layer.step(routing) for arm, (layer, routing) in asked.items()}
        blocks = max(enough, *needed.values())
        pools = [torch.cuda.graph_pool_handle() for _ in range(ranks)]
        arms = {arm: Arm(layer, routing, blocks, pools) for arm, (layer, routing) in asked.items()}
        turns = [{arm: one.time_ms(REPLAYS) for arm, one in arms.items()} for _ in range(TURNS + 1)]
        times = {arm: [turn[arm] for turn in turns[1:]] for arm in arms}  # the first one warms
        medians = {arm: statistics.median(each) for arm, each in times.items()}
        about = {arm: one.about() for arm, one in arms.items()}
        for arm in arms:
            to.write(
                shape=name,
                num_ranks=ranks,
                workload=kind.name,
                arm=arm,
                spare_slots=slots if arm == "slots" else 0,
                blocks=blocks,
                needed_blocks=needed[arm],
                median_ms=round(medians[arm], 3),
                range_ms=[round(min(times[arm]), 3), round(max(times[arm]), 3)],
                over_forced=round(medians[arm] / medians["forced"], 3),
                **about[arm],
            )
        said = (f"{arm} {medians[arm]:.2f} ms, {about[arm]['busiest_over_mean']}" for arm in arms)
        common.log(f"{name}, {ranks} ranks, {kind.name}:", "; ".join(said))
        del arms
        torch.cuda.empty_cache()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b"], choices=SHAPES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--row-bound", type=float, default=1.25)
    parser.add_argument("--workloads", nargs="+", default=[], help="beginnings of names; else all")
    common.add_record_flags(parser, a_line="kind of routing and arm")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Runs the command line; the status is 2 without a GPU."""
    options = parse(arguments)
    if not common.has_gpu():
        return 2
    command = common.called("tests.gpu.natural", arguments)
    record = Record(options.out, **common.machine(options.commit), command=command)
    for name in options.shapes:
        for ranks in options.ranks:
            measure(name, SHAPES[name], options, ranks, record)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
