"""Shows what runs on the GPU between a layer's input and its output.

    python -m tools.bench.profile_layer --shape paper-8k --one-of 4 --out trace.json
    torchrun --nproc-per-node 4 -m tools.bench.profile_layer --shape qwen3-30b --out trace.json

One forward, or with ``--backward`` one forward and backward, is recorded with torch's profiler
after a few calls that are not. Prints every kernel and copy in its order on rank 0, with its start
and its duration, and writes a trace for chrome://tracing or Perfetto. The exit status is 1 if
anything but the layer's own kernels runs on the GPU (small copies apart, which are listed).
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from flashmoe_megatron.select import select_backend
from tools.bench import common
from tools.bench.bench_layer import TIMEOUT_S, FusedLayer, without_grad
from tools.bench.common import log
from tools.bench.shapes import SHAPES, make_problem

FORWARD = ("layer_kernel",)
FORWARD_AND_BACKWARD = ("plan_kernel", "layer_kernel", "layer_kernel")
COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Activity:
    """One kernel, copy or fill on the GPU; times in microseconds from the first one's start."""

    name: str
    start_us: float
    duration_us: float

    @property
    def is_copy(self) -> bool:
        """Whether it only moves or fills memory."""
        return self.name.startswith(COPIES)


def activities_of(trace: Path) -> list[Activity]:
    """What a trace of torch's profiler has on the GPU, in order of start."""
    events = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    events.sort(key=lambda event: event["ts"])
    return [
        Activity(event["name"], event["ts"] - events[0]["ts"], event["dur"]) for event in events
    ]


def unexpected(activities: list[Activity], wanted: tuple[str, ...]) -> str | None:
    """Why the kernels are not the wanted ones in this order, ``None`` if they are."""
    kernels = [activity.name for activity in activities if not activity.is_copy]
    if len(kernels) == len(wanted) and all(
        name in kernel for name, kernel in zip(wanted, kernels, strict=True)
    ):
        return None
    return f"the kernels are {kernels}, wanted {list(wanted)}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="paper-8k")
    parser.add_argument("--one-of", type=int, default=1, help="1/N of the experts, on one GPU")
    parser.add_argument("--backward", action="store_true", help="a backward as well")
    parser.add_argument("--grads", choices=("bf16", "main_grad"), default="main_grad")
    parser.add_argument("--warmup", type=int, default=3, help="calls that are not recorded, >= 1")
    parser.add_argument("--symmetric", choices=("cuda", "nvshmem"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("trace.json"), help="the trace of rank 0")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU is usable here: nothing can be profiled", file=sys.stderr)
        return 2
    num_ranks = common.join_group()
    rank = dist.get_rank() if num_ranks > 1 else 0
    device = torch.device("cuda", torch.cuda.current_device())
    shape = SHAPES[options.shape].one_of(options.one_of)
    problem = make_problem(shape, num_ranks, rank=rank, device=device)
    backend = select_backend(
        problem.config,
        dist.group.WORLD if num_ranks > 1 else None,
        device,
        kind="kernel",
        symmetric_memory=options.symmetric,
        timeout=TIMEOUT_S,
    )
    layer = FusedLayer(problem, backend, use_main_grad=options.grads == "main_grad")
    call = layer.forward_and_backward if options.backward else without_grad(layer)
    for _ in range(max(1, options.warmup)):
        call()
    common.wait_for_all()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()

    status = 0
    if rank == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(options.out))
        activities = activities_of(options.out)
        for activity in activities:
            log(f"{activity.start_us:10.1f} us  {activity.duration_us:9.1f} us  {activity.name}")
        busy = sum(activity.duration_us for activity in activities)
        if activities:
            span = activities[-1].start_us + activities[-1].duration_us
            log(f"{len(activities)} activities, {busy:.1f} us busy of {span:.1f} us")
        wanted = FORWARD_AND_BACKWARD if options.backward else FORWARD
        problem_found = unexpected(activities, wanted)
        log(problem_found or "nothing but the layer's own kernels runs between input and output")
        log(f"trace in {options.out}")
        status = int(problem_found is not None)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
