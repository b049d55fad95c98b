"""Prints what a layer takes on the kernel, and checks it against what is allocated where GPUs are.

Without a GPU, from the planner alone, for 4 ranks:

    python -m tools.memory_table

on all GPUs of a host, compared with the heap and torch's allocator after a forward and a backward:

    torchrun --nproc-per-node 4 -m tools.memory_table --out results.jsonl

The allocator's figures are bytes that were requested, current after the forward and at the peak of
either direction, counted from before it. The exit status is 1 if one differs from the plan by more
than ``--tolerance``, or if the symmetric heap exceeds its bound; it is 2 if a layer cannot be on so
many ranks, or if the library, which knows the sizes, is not built.
"""

import argparse
import gc
import itertools
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.bench.problem import make_problem
from flashmoe_megatron.bench.shapes import Shape
from flashmoe_megatron.config import KEEPS, Keep
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.memory import MemoryPlan, plan_memory
from flashmoe_megatron.weights import WeightGrad
from tools.arguments import add_shapes, not_negative, parse_with_shapes, parser_of
from tools.bench import common
from tools.bench.common import Record, log

MIB = 2**20
TIMEOUT_S = 20.0
BOUND_BYTES = 16 * MIB
"""The symmetric heap may exceed 1 + min(topk, ranks) token buffers by this much."""


def symmetric_bound(shape: Shape, plan: MemoryPlan, num_ranks: int) -> int:
    """Most bytes of the symmetric heap."""
    return (1 + min(shape.topk, num_ranks)) * plan.token_buffer + BOUND_BYTES


def requested(what: str) -> int:
    """Bytes that torch's allocator has been asked for: "current", or "peak" since its reset."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])


def measure(shape: Shape, num_ranks: int, keep: Keep) -> tuple[MemoryPlan, dict[str, int]]:
    """Allocates one layer and runs it. Collective over the default group if there is one.

    Returns:
        The plan for as many rows as this rank received, and by the names of its attributes what
        this rank's heap and allocator say.
    """
    from flashmoe_megatron.kernel.backend import KernelBackend
    from flashmoe_megatron.kernel.group_memory import GroupMemory
    from flashmoe_megatron.options import BackendOptions

    rank = dist.get_rank() if num_ranks > 1 else 0
    device = torch.device("cuda", torch.cuda.current_device())
    problem = make_problem(shape, num_ranks)
    group = dist.group.WORLD if num_ranks > 1 else None
    options = BackendOptions(keep=keep, timeout=TIMEOUT_S)
    memory = GroupMemory(group, device, options)  # no other layer shares it
    backend = KernelBackend(
        problem.config, group, device, memory=memory, rank=rank, options=options
    )
    x, probs = problem.x.detach(), problem.probs.detach()
    weights = problem.weights
    grads = [
        [WeightGrad(torch.empty_like(w), False) for w in share]
        for share in (weights.fc1, weights.fc2)
    ]
    found: dict[str, int] = {}

    def forward(*, training: bool) -> tuple[torch.Tensor, Any]:
        return backend.forward(x, probs, problem.routing_map, weights, training=training)

    def step() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        out, saved = forward(training=keep != "inputs")
        torch.cuda.synchronize()
        found["kept"] = requested("current") - before - out.numel() * out.element_size()
        found["forward"] = requested("peak") - requested("current")
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        if saved is None:
            saved = forward(training=True)[1]
        grad_x, grad_probs = backend.backward(problem.grad_out, saved, weights, *grads)
        torch.cuda.synchronize()
        outputs = sum(t.numel() * t.element_size() for t in (grad_x, grad_probs))
        found["backward_out"] = outputs
        found["backward"] = requested("peak") - before - outputs
        return saved.num_row_blocks

    step()  # the first one makes what stays
    num_row_blocks = step()
    found["symmetric"] = memory.heap_bytes
    plan = plan_memory(
        problem.config, keep=keep, num_row_blocks=num_row_blocks, num_ctas=backend.num_ctas
    )
    return plan, found


COLUMNS = {
    "token buffer": "token_buffer",
    "symmetric": "symmetric",
    "workspace": "workspace",
    "kept per forward": "kept",
    "besides in forward": "forward",
    "besides in backward": "backward",
}
"""Titles, and the attributes of a plan below them."""


def print_titles(num_ranks: int) -> None:
    """Begins a table in Markdown."""
    log(f"\n{num_ranks} ranks, MiB on each; planned, and in brackets measured\n")
    log(f"| layer | keeps | {' | '.join(COLUMNS)} |")
    log("| --- " * (2 + len(COLUMNS)) + "|")


def print_row(layer: str, keep: Keep, plan: MemoryPlan, found: dict[str, int]) -> None:
    """One layer of the table."""
    cells = [layer, keep]
    for key in COLUMNS.values():
        measured = f" ({found[key] / MIB:.1f})" if key in found else ""
        cells.append(f"{getattr(plan, key) / MIB:.1f}{measured}")
    log(f"| {' | '.join(cells)} |")


def problems(
    name: str, shape: Shape, plan: MemoryPlan, found: dict[str, int], num_ranks: int, tolerance: int
) -> list[str]:
    """The sentences that say where one layer differs from its plan."""
    wrong = []
    bound = symmetric_bound(shape, plan, num_ranks)
    if plan.symmetric > bound:
        wrong.append(f"{name}: the symmetric heap has {plan.symmetric} bytes, bound {bound}")
    for key, value in found.items():
        planned = getattr(plan, key)
        if abs(value - planned) > (0 if key == "symmetric" else tolerance):
            wrong.append(f"{name}: {key} is {value} bytes, planned {planned}")
    return wrong


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_shapes(parser)
    add("--ranks", type=int, default=4, help="where there is no GPU")
    add("--tolerance", type=not_negative, default=256 * 2**10, help="bytes, for small tables")
    common.add_record_flags(parser, a_line="layer")
    return parse_with_shapes(parser, arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not bindings.library_path().is_file():
        print(
            f"error: {bindings.library_path()} is missing, which knows a layer's sizes: run "
            "`python tools/build.py` (it needs no GPU)",
            file=sys.stderr,
        )
        return 2
    has_gpu = torch.cuda.is_available()
    num_ranks = common.join_group() if has_gpu else options.ranks
    try:
        plans = {
            (name, keep): plan_memory(options.shapes[name].config(num_ranks), keep=keep)
            for name, keep in itertools.product(options.shapes, KEEPS)
        }
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record = Record(
        options.out,
        **(common.machine(options.commit) if has_gpu else {}),
        command=common.called("tools.memory_table", arguments),
        num_ranks=num_ranks,
    )
    wrong = []
    print_titles(num_ranks)
    for (name, keep), planned in plans.items():
        shape, plan, found = options.shapes[name], planned, {}
        if has_gpu:
            plan, found = measure(shape, num_ranks, keep)
            gc.collect()
            torch.cuda.empty_cache()
        print_row(f"{name}, {shape.tokens} tokens", keep, plan, found)
        wrong += problems(name, shape, plan, found, num_ranks, options.tolerance)
        record.write(
            measurement="memory", shape=name, keep=keep, planned=asdict(plan), measured=found
        )
    everyone: list[Any] = [wrong]
    if dist.is_initialized():
        everyone = [None] * num_ranks
        dist.all_gather_object(everyone, wrong)
    for rank, lines in enumerate(everyone):
        for line in lines:
            log(f"failed on rank {rank}: {line}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(any(everyone))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
