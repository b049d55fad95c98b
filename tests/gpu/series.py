"""Tells what launches that come before a layer's own wait for, on virtual ranks of one GPU.

    python -m tests.gpu.series --out series.jsonl

A forward that counts its rows first has its plan as a launch of its own, and a backward of rows
that were not kept begins with their gather. Both wait for all ranks. Forwards and backwards follow
one another on a stream of each rank, as in a training, and a profile has the time of every kernel.
The rank that comes last to a launch waits for nobody, so the shortest time of the ranks is its
work; what another rank takes beyond it, it has waited. How late a rank is follows from its rows: a
rank that has more of them multiplies longer, and in a backward the others do not wait for its
products for weights' gradients.

Ranks of one GPU are issued by one thread, so a host that is late is not in these figures.
"""

import argparse
import statistics
import sys
from collections import defaultdict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from flashmoe_megatron.bench.shapes import SHAPES
from tests.gpu.natural import FORCED, routing_of
from tests.gpu.skew import Layer, Routing, loads
from tests.gpu.virtual import streams
from tools.arguments import parser_of
from tools.bench import common
from tools.simulate.workloads import workloads

WARM, STEPS = 2, 6
KERNELS = {
    "plan": "plan_kernel",
    "gather": "gather_kernel",
    "forward": "ForwardPass",
    "backward": "BackwardPass",
}
"""A part of the name that each kernel has in a profile; the layer's own have their pass in it."""


def run(layer: Layer, routing: Routing, num_steps: int) -> None:
    """Runs forwards and backwards of all ranks, none of which waits for another on the host."""
    backends = layer.layer.backends
    for _ in range(num_steps):
        pending, saved = [], []
        for rank, backend in enumerate(backends):
            with torch.cuda.stream(streams()[rank]):
                x = layer.x[rank][: len(routing[rank][0])]
                pending.append(backend.begin(x, *routing[rank]))
        for rank, backend in enumerate(backends):
            with torch.cuda.stream(streams()[rank]):
                saved.append(backend.finish(pending[rank], layer.weights[rank], training=True))
        for rank, (out, kept) in enumerate(saved):
            with torch.cuda.stream(streams()[rank]):
                backends[rank].backward(out, kept, layer.weights[rank], *layer.grads[rank])
    torch.cuda.synchronize()
    backends[0].raise_pending_fault()


def kernel_times(layer: Layer, routing: Routing) -> dict[str, list[tuple[float, ...]]]:
    """Returns for each kind of launch the ms of all ranks, step by step."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        run(layer, routing, STEPS)
    by_stream = defaultdict(lambda: defaultdict(list))
    events = [
        event
        for event in profile.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    ]
    for event in sorted(events, key=lambda event: event.start_ns()):
        for kind, part in KERNELS.items():
            if part in event.name():
                ms = event.duration_ns() / 1e6
                by_stream[kind][event.device_resource_id()].append(ms)
    found = {}
    for kind, of_streams in by_stream.items():
        counts = {stream: len(times) for stream, times in of_streams.items()}
        assert set(counts.values()) == {STEPS}, f"{kind}: {counts} launches by stream"
        assert len(counts) == len(layer.layer.backends), f"{kind}: {counts} launches by stream"
        found[kind] = [*zip(*of_streams.values(), strict=True)]
    return found


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["mixtral-8x7b"], choices=SHAPES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--slots", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--workloads", nargs="+", default=[FORCED, "Zipf 0.5", "Zipf 1.0"])
    common.add_record_flags(parser, a_line="routing, number of slots and kind of launch")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Runs the command line; the status is 2 without a GPU."""
    options = parse(arguments)
    if not common.has_gpu():
        return 2
    command = common.called("tests.gpu.series", arguments)
    record = common.Record(options.out, **common.machine(options.commit), command=command)
    for name in options.shapes:
        for ranks in options.ranks:
            config = SHAPES[name].config(ranks)
            kinds = {one.name: one for one in workloads(ranks, config.num_experts)}
            for slots in options.slots:
                layer = Layer(config, min(slots, config.num_local_experts))
                for backend in layer.layer.backends:
                    backend.keep = "preactivations"
                for workload in options.workloads:
                    routing = routing_of(kinds[workload], config, SHAPES[name].tokens)
                    layer.step(routing)
                    run(layer, routing, WARM)
                    layer.records()
                    times = kernel_times(layer, routing)
                    about = loads(layer.records())
                    for kind, steps in times.items():
                        work, most = ([f(step) for step in steps] for f in (min, max))
                        waited = [max(step) - min(step) for step in steps]
                        figures = {
                            "work_ms": round(statistics.median(work), 3),
                            "longest_ms": round(statistics.median(most), 3),
                            "waited_ms": round(statistics.median(waited), 3),
                        }
                        where = {"shape": name, "num_ranks": ranks, "workload": workload}
                        record.write(**where, spare_slots=slots, launch=kind, **figures, **about)
                        common.log(name, ranks, workload, f"{slots} slots", kind, figures, about)
                del layer
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
