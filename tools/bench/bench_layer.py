"""Times one layer, forward and forward plus backward, together with its baselines and floors.

On all GPUs of a host, from the checkout (nothing needs to be installed but torch):

    torchrun --nproc-per-node 4 -m tools.bench.bench_layer --out results.jsonl

or on one GPU, with the share of the experts that it would have among 4:

    python -m tools.bench.bench_layer --one-of 4

For every shape, in one run, are timed: the fused kernel through autograd, as a model calls it;
the unfused baseline over NCCL (``unfused.py``); and its experts alone, without communication. Layer
and baseline have to pass the correctness gate first (every result within 6e-3 of float32, by
relative L2 over all ranks), and so has each way to route; a way that does not pass ends the run.
Times are medians over iterations of the slowest rank, each from an idle GPU. They vary between
machines and days; the ratios of one run are what counts.

Floors: FLOPs at the rate of a large cuBLAS product, the bytes that have to leave a GPU at least
(each token once per other rank, there and back) at the rate of a peer copy, or the bytes of weights
and their gradients at the rate of a copy in memory, whichever takes longest; all three rates are of
the same run. In a backward FLOPs and bytes that leave are twice the forward's.

Weight gradients are ordinary bfloat16 tensors for both, or with ``--grads main_grad`` are added to
float32 buffers by both (by the fused kernel itself; by an addition after the baseline's backward).
In float16 there is no baseline, since torch's grouped products take bfloat16 alone: ``--dtypes bf16
fp16`` measures both, one after the other. ``--router`` also times the layer with the router in its
launch and after a router of torch's operators, and ``--early`` when fc2's gradients are complete.

``--allow-cpu`` measures the reference backend over gloo where there is no GPU: to try, not to tell.
"""

import argparse
import sys
from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist

from examples.arguments import count
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.correctness import relative_errors, routed_errors
from flashmoe_megatron.bench.layers import (
    FusedLayer,
    UnfusedLayer,
    kernel_layer,
    replayed,
    without_grad,
)
from flashmoe_megatron.bench.problem import Problem, Router, make_problem
from flashmoe_megatron.bench.shapes import Shape, shares_of
from flashmoe_megatron.bench.timer import Timer, Timing, timing_of, wait_for_all
from flashmoe_megatron.bench.unfused import dispatch, experts
from flashmoe_megatron.call import Backend
from flashmoe_megatron.layer import RouterOutput, moe_router_forward
from flashmoe_megatron.telemetry.record import Direction
from tools.arguments import (
    add_shapes,
    exponent,
    not_negative,
    parse_with_shapes,
    parser_of,
    row_bound,
    share,
)
from tools.bench import common
from tools.bench.common import Record, log
from tools.bench.floors import Rates, floors_of
from tools.bench.gate import pass_gate

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAUNCHES_IN_ROW = 3  # only the last one is taken: it follows the others without a gap


def router_weight_for(problem: Problem) -> torch.Tensor:
    """A random router, ``[num_experts, hidden]`` in the dtype of the tokens."""
    config, x = problem.config, problem.x
    weight = torch.randn(config.num_experts, config.hidden, device=x.device) / config.hidden**0.5
    return weight.to(x.dtype)


def routed_calls(
    problem: Problem, backend: Backend, weight: torch.Tensor
) -> dict[str, Callable[[], RouterOutput]]:
    """The layer with its launch's router, and after torch's router in float32 as Megatron's."""
    config, x = problem.config, problem.x

    def in_torch() -> RouterOutput:
        logits = x.float() @ weight.float().t()
        chosen, experts = logits.topk(config.topk, dim=1)
        probs = torch.zeros_like(problem.probs).scatter(1, experts, chosen.softmax(1))
        routing_map = probs > 0
        out = moe_apply(backend, x, probs, routing_map, problem.weights)
        return RouterOutput(out, probs, logits, routing_map)

    return {
        "router in the launch": lambda: moe_router_forward(
            x, weight, problem.weights, backend=backend
        ),
        "router of torch": in_torch,
    }


def early_timing(fused: FusedLayer, iterations: int) -> Timing:
    """Times a forward and backward from an idle GPU until fc2's gradients are complete."""
    found = []
    for _ in range(iterations):
        wait_for_all()
        begin = stopwatch.now()
        fused.forward_and_backward()
        early = fused.backend.early_fc2_grads()
        if early is None:
            raise SystemExit("fc2's gradients of this backend are not early")
        with early:
            end = stopwatch.now()
        stopwatch.synchronize()
        found.append(stopwatch.between_ms(begin, end))
    return timing_of(found)


def kernel_timing(
    direction: Direction, call: Callable[[], object], backend: Backend, iterations: int
) -> Timing:
    """Times that launches record of themselves: from the first CTA's begin to the last one's end.

    Each is the last of ``LAUNCHES_IN_ROW`` calls that follow one another, so that neither the hosts
    nor the moment at which each rank begins is part of it. Collective over the default group.
    """
    found = []
    for _ in range(iterations):
        wait_for_all()
        backend.take_records()
        for _ in range(LAUNCHES_IN_ROW):
            call()
        torch.cuda.synchronize()
        launches = [one for one in backend.take_records() if one.direction == direction]
        found.append(launches[-1].duration_ns / 1e6)
    return timing_of(found)


def ceilings(timer: Timer, num_ranks: int, symmetric_memory: str) -> Rates:
    """Measures the most that this machine can do. Collective over the default group."""
    has_links = num_ranks > 1 and stopwatch.HAS_GPU
    rates = Rates(
        tflops=common.cublas_tflops(timer),
        link_gbps=common.link_gbps(timer, symmetric_memory) if has_links else None,
        memory_gbps=common.memory_gbps(timer),
    )
    torch.cuda.empty_cache()
    return rates


def measure(
    name: str,
    shape: Shape,
    dtype: str,
    router: Router,
    spare_slots: int,
    options: argparse.Namespace,
    timer: Timer,
    rates: Rates,
    record: Record,
    num_ranks: int,
) -> None:
    """Measures one shape. Collective over the default group.

    Raises:
        SystemExit: The layer or its baseline does not pass the correctness gate.
    """
    problem = make_problem(shape, num_ranks, router=router, dtype=DTYPES[dtype])
    use_main_grad = options.grads == "main_grad"
    fused = kernel_layer(
        problem,
        use_main_grad=use_main_grad,
        kind=options.backend,
        symmetric_memory=options.symmetric,
        row_bound=options.row_bound,
        spare_slots=spare_slots,
    )
    backend = fused.backend
    label = {} if options.backend == "kernel" else {"fused": options.backend}
    floors = floors_of(
        shape,
        rates,
        remote_rows=problem.remote_rows(),
        local_experts=problem.used_experts(),
        grads=options.grads,
    )
    about = {
        "shape": name,
        **vars(shape),
        "dtype": dtype,
        "num_ranks": num_ranks,
        **vars(router),
        "imbalance": round(problem.imbalance(), 3),
        "spare_slots": spare_slots,
        "grads": options.grads,
    }

    if dtype != "bf16":
        name = f"{name} {dtype}"
    if router.zipf:
        name = f"{name}, Zipf {router.zipf}, imbalance {about['imbalance']}"
    if router.locality is not None:
        name = f"{name}, locality {router.locality}"
    if spare_slots:
        name = f"{name}, {spare_slots} spare slots"

    def gate(errors: dict[str, float], implementation: str, way: str = "") -> None:
        behind = f", {way}" if way else ""
        pass_gate(f"{name}, {label.get(implementation, implementation)}{behind}", errors)
        record.write(
            measurement=f"gate{behind}",
            implementation=implementation,
            relative_l2=errors,
            **about,
        )

    gate(relative_errors(problem, fused.results()), "fused")
    fused_ms: dict[str, float] = {}

    def take(what: str, timing: Timing, floor: float, implementation: str = "fused") -> None:
        median = timing.median_ms
        record.write(
            measurement=what,
            implementation=implementation,
            **timing.as_dict(),
            floor_ms=round(floor, 4),
            **about,
        )
        ratios = f"{median / floor:.2f} times the floor"
        if implementation == "fused":
            fused_ms[what] = median
        else:
            ratios += f", {median / fused_ms[what]:.2f} times {label.get('fused', 'fused')}"
        log(f"{name}: {label.get(implementation, implementation)} {what} {median:.3f} ms, {ratios}")

    passes = [("forward", without_grad(fused), floors.forward)]
    directions: list[tuple[Direction, float]] = [("forward", floors.forward)]
    if not options.forward_only:
        passes.append(("forward+backward", fused.forward_and_backward, floors.both))
        directions.append(("backward", floors.backward))
    for (what, call, floor), (direction, kernel_floor) in zip(passes, directions, strict=True):
        take(what, timer(call), floor)
        if options.graph and (use_main_grad or direction == "forward"):
            take(f"{what} from a graph", timer(replayed(call)), floor)
        if options.kernel:
            timing = kernel_timing(direction, call, backend, options.iterations)
            take(f"{direction} kernel", timing, kernel_floor)
    if options.early:
        take("fc2's gradients complete", early_timing(fused, options.iterations), floors.both)
    if options.router:
        weight = router_weight_for(problem)
        for way, routed in routed_calls(problem, backend, weight).items():
            call = without_grad(routed)
            gate(routed_errors(problem, weight, call()), "fused", way)
            take(f"forward, {way}", timer(call), floors.forward)
    if options.no_baselines or dtype != "bf16" or spare_slots:
        return
    for tensor in (problem.x, problem.probs, *problem.parameters):
        tensor.grad = None
        tensor.__dict__.pop("main_grad", None)
    unfused = UnfusedLayer(problem, use_main_grad=use_main_grad)
    gate(relative_errors(problem, unfused.results()), "unfused")
    take("forward", timer(without_grad(unfused)), floors.forward, "unfused")
    with torch.no_grad():
        there = dispatch(problem)

    def experts_alone() -> torch.Tensor:
        return experts(there.rows, there.ends, unfused.weights, problem.config)

    take("forward", timer(without_grad(experts_alone)), floors.forward, "experts only")
    if not options.forward_only:
        take("forward+backward", timer(unfused.forward_and_backward), floors.both, "unfused")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_shapes(parser)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16"])
    parser.add_argument("--iterations", type=count, default=20)
    parser.add_argument("--warmup", type=not_negative, default=3)
    parser.add_argument("--forward-only", action="store_true", help="the gate still does both")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument(
        "--backend",
        choices=("kernel", "scheduled", "reference"),
        default="kernel",
        help="what is measured as our layer, on a GPU; records call it fused and name the backend",
    )
    parser.add_argument("--grads", choices=("bf16", "main_grad"), default="bf16")
    parser.add_argument(
        "--zipf",
        type=exponent,
        nargs="+",
        default=[0.0],
        help="exponents of skewed routings; 0: none",
    )
    parser.add_argument(
        "--order",
        type=int,
        help="seed of the order in which a skewed routing prefers experts; without it the first "
        "rank's come first",
    )
    parser.add_argument(
        "--locality",
        type=share,
        nargs="+",
        default=[None],
        help="shares of routes that stay on their token's rank; on several ranks",
    )
    parser.add_argument(
        "--spare-slots",
        type=not_negative,
        nargs="+",
        default=[0],
        help="for replicas, on each rank; baselines are measured without any",
    )
    parser.add_argument("--one-of", type=count, default=1, help="1/N of the experts, on one GPU")
    parser.add_argument("--symmetric", choices=("cuda", "nvshmem"), default="cuda")
    parser.add_argument(
        "--row-bound",
        type=row_bound,
        help="forwards are one launch; of this many times the mean rows",
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="also replay from a CUDA graph, forward and backward only with main_grad; with "
        "--row-bound where buffers are large",
    )
    parser.add_argument("--kernel", action="store_true", help="also what launches record")
    parser.add_argument("--router", action="store_true", help="also with routers, forward")
    parser.add_argument(
        "--early", action="store_true", help="also until fc2's gradients are complete"
    )
    parser.add_argument("--allow-cpu", action="store_true", help="without a GPU: the reference")
    common.add_record_flags(parser, a_line="measurement")
    return parse_with_shapes(parser, arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not options.allow_cpu and not common.has_gpu():
        return 2
    if not stopwatch.HAS_GPU:
        if options.kernel or options.graph:
            raise SystemExit("--kernel and --graph want a GPU, got none")
        options.backend = "reference"
    if options.kernel and options.backend != "kernel":
        raise SystemExit(f"--kernel wants the backend kernel, got {options.backend}")
    num_ranks = common.join_group()
    if num_ranks > 1 and options.one_of > 1:
        raise SystemExit("--one-of is for one GPU; torchrun started several ranks")
    if num_ranks == 1 and options.locality != [None]:
        raise SystemExit("--locality is for several ranks; torchrun started one")
    timer = Timer(options.iterations, options.warmup)
    rates = ceilings(timer, num_ranks, options.symmetric)
    machine = common.machine(options.commit)
    record = Record(
        options.out,
        **machine,
        command=common.called("tools.bench.bench_layer", arguments),
        backend=options.backend,
        symmetric=options.symmetric,
        row_bound=options.row_bound,
        one_of=options.one_of,
        cublas_tflops=round(rates.tflops, 1),
        link_gbps=rates.link_gbps and round(rates.link_gbps, 1),
        memory_gbps=round(rates.memory_gbps, 1),
    )
    device = machine["gpus"][0] if machine["gpus"] else "processor"
    link = f", peer copy {rates.link_gbps:.0f} GB/s" if rates.link_gbps else ""
    log(f"{num_ranks} x {device}, torch {machine['torch']}, {machine['commit']}")
    memory = f", copy {rates.memory_gbps:.0f} GB/s"
    log(f"bf16 product {rates.tflops:.3g} TFLOP/s{memory}{link}; medians:")
    for name, whole in options.shapes.items():
        # One after the other: the record keeps what was measured before a shape that fails.
        (shape,) = shares_of({name: whole}, options.one_of, num_ranks).values()
        cases = product(options.dtypes, options.zipf, options.locality, options.spare_slots)
        for dtype, zipf, locality, slots in cases:
            router = Router(zipf, options.order, locality)
            measure(name, shape, dtype, router, slots, options, timer, rates, record, num_ranks)
            torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
