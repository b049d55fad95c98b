"""Counts what a layer has a GPU do, by torch's profiler: kernels, copies and fills.

    python -m tools.bench.launches --one-of 2 --out launches.jsonl
    torchrun --nproc-per-node 2 -m tools.bench.launches --out launches.jsonl

This is table 1 of FlashMoE's paper: one layer in the forward of a training, from a routing to
results, and a forward with its backward. Ours is counted on the kernel and on the scheduled
backend, beside the unfused layer of ``unfused.py`` and Megatron's own ``alltoall`` layer, which is
left out with a line where it is not installed. Each passes the correctness gate first. On several
GPUs rank 0's operations are counted.

Every call is profiled twice after it has warmed up. Numbers that differ are no result: the tool
says so, goes on with the others, and its exit status is 1.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from examples.arguments import count
from flashmoe_megatron.bench.correctness import relative_errors
from flashmoe_megatron.bench.layers import FusedLayer, UnfusedLayer, kernel_layer
from flashmoe_megatron.bench.megatron_layer import MegatronLayer
from flashmoe_megatron.bench.problem import Problem, make_problem
from flashmoe_megatron.bench.shapes import Shape, shares_of
from flashmoe_megatron.bench.timer import wait_for_all
from tools.arguments import add_shapes, parse_with_shapes, parser_of
from tools.bench import common
from tools.bench.common import Record, log
from tools.bench.gate import pass_gate

Layer = FusedLayer | UnfusedLayer | MegatronLayer
Call = Callable[[], object]

KINDS = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "fills"}
"""Categories of the profiler's events of a GPU, and what they are called here."""
WARM = 3
"""Calls before one is counted."""

_own = partial(kernel_layer, use_main_grad=False)
LAYERS: dict[str, Callable[[Problem], Layer]] = {
    "kernel": _own,
    "kernel, row bound": partial(_own, row_bound=common.ROW_BOUND),
    "scheduled": partial(_own, kind="scheduled"),
    "scheduled, two parts": partial(_own, kind="scheduled", degree="2"),
    "unfused": partial(UnfusedLayer, use_main_grad=False),
    "megatron": MegatronLayer,
}
"""What is counted, by name."""


def counts_of(events: Iterable[dict[str, Any]]) -> Counter[str]:
    """Counts a trace's operations of the GPU by kind; ranges that somebody named are none."""
    return Counter(KINDS[event["cat"]] for event in events if event.get("cat") in KINDS)


def profiled(call: Call) -> list[dict[str, Any]]:
    """Returns the profiler's events of one call. Collective over the default group."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    wait_for_all()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


class UncountedError(Exception):
    """A call has no number of operations that repeats."""


def counted(call: Call, take: Callable[[Call], list[dict[str, Any]]] = profiled) -> dict[str, int]:
    """Counts the operations of a call that has warmed up, by kind and in all.

    Args:
        call: It runs :data:`WARM` times before, then once beside a profiler that warms up, too, and
            twice to be counted.
        take: Returns the events of one call.

    Raises:
        UncountedError: Both times differ, or there were none.
    """
    for _ in range(WARM):
        call()
    take(call)
    first, second = (counts_of(take(call)) for _ in range(2))
    if first != second or not first:
        raise UncountedError(
            f"the profiler saw {dict(first)} and then {dict(second)}, wanted the same twice, and "
            "some"
        )
    return {**{kind: first[kind] for kind in KINDS.values()}, "operations": first.total()}


def measure(name: str, shape: Shape, names: list[str], record: Record) -> bool:
    """Counts one shape's layers. Collective over the default group.

    Layers that are not installed are removed from ``names``.

    Returns:
        Whether all could be counted.
    """
    num_ranks = dist.get_world_size()
    is_whole = True
    for kind in list(names):
        problem = make_problem(shape, num_ranks)
        layer = common.made_if_installed(kind, names, partial(LAYERS[kind], problem))
        if layer is None:
            continue
        pass_gate(f"{name}, {kind}", relative_errors(problem, layer.results()))
        for passes, call in (("forward", layer), ("both", layer.forward_and_backward)):
            try:
                found = counted(call)
            except UncountedError as error:
                is_whole = False
                log(f"{name}, {kind}, {passes}: {error}")
                continue
            said = ", ".join(f"{number} {each}" for each, number in found.items())
            log(f"{name}, {kind}, {passes}: {said}")
            record.write(
                measurement="launches",
                shape=name,
                **vars(shape),
                layer=kind,
                passes=passes,
                num_ranks=num_ranks,
                **found,
            )
        del layer, call
        torch.cuda.empty_cache()
    return is_whole


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_shapes(parser, ["paper-8k", "qwen3-30b"])
    parser.add_argument("--one-of", type=count, default=1, help="1/N of the experts, on one GPU")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    common.add_record_flags(parser, a_line="layer and pass")
    return parse_with_shapes(parser, arguments)


def main(arguments: list[str]) -> int:
    """Runs the command line; the status is 1 if something was not counted, 2 without a GPU."""
    options = parse(arguments)
    if not common.has_gpu():
        return 2
    num_ranks = common.join_group()
    if num_ranks == 1:  # Megatron wants a group of its one rank
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    if num_ranks > 1 and options.one_of > 1:
        raise SystemExit("--one-of is for one GPU; torchrun started several ranks")
    shapes = shares_of(options.shapes, options.one_of, num_ranks)
    record = Record(
        options.out,
        **common.machine(options.commit),
        command=common.called("tools.bench.launches", arguments),
        one_of=options.one_of,
    )
    are_whole = [measure(name, shape, options.layers, record) for name, shape in shapes.items()]
    dist.destroy_process_group()
    return int(not all(are_whole))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
