"""Times the gate in the layer's launch beside a router of torch's operators in front of it.

On one GPU, or on all of a host, from the checkout:

    python -m tools.bench.bench_gate --out results.jsonl
    torchrun --nproc-per-node 4 -m tools.bench.bench_gate --out results.jsonl

For every shape, in turns of some launches: the layer with the routing at hand, which is the floor
of both; with the gate in its launch; and behind the router of torch, in float32 as Megatron's with
``--moe-router-dtype fp32``. Launches of a turn follow one another without a pause. Tokens and the
router's weight are random, but experts have weights of zero, since at its power limit a GPU's time
moves by more than a gate takes. First the gate's choice has to be that of float64 wherever two
logits are further apart than rounding goes.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from flashmoe_megatron import RouterConfig, moe_apply, moe_router_forward
from flashmoe_megatron.backend import Backend
from flashmoe_megatron.layer import RouterOutput
from flashmoe_megatron.select import select_backend
from tools.bench import common, stopwatch
from tools.bench.bench_layer import without_grad
from tools.bench.common import Record, Timing, log
from tools.bench.shapes import SHAPES, Problem, make_problem

MARGIN = 1e-4
"""Logits that are closer than this may be chosen in either order."""


def check(found: RouterOutput, problem: Problem, weight: torch.Tensor) -> None:
    """Compares the gate with float64.

    Raises:
        AssertionError: A token has chosen another expert than it should.
    """
    logits = problem.x.detach().double() @ weight.double().t()
    topk = problem.config.topk
    ordered = logits.sort(dim=1, descending=True).values
    is_clear = torch.ones_like(found.routing_map[:, 0])
    if topk < logits.shape[1]:
        is_clear = ordered[:, topk - 1] - ordered[:, topk] > MARGIN
    wanted = logits >= ordered[:, topk - 1 : topk]
    assert torch.equal(found.routing_map[is_clear], wanted[is_clear]), "another choice"
    assert is_clear.float().mean() > 0.9, "logits too close to tell"
    error = (found.logits - logits).norm() / logits.norm()
    assert error < 1e-5, f"logits: relative L2 error {error:.2e}"


def measure(problem: Problem, backend: Backend, turns: int, launches: int) -> dict[str, Timing]:
    """Times the three ways of one forward, after the check."""
    config, x, weights = problem.config, problem.x, problem.weights
    weight = torch.randn(config.num_experts, config.hidden, device=x.device) / config.hidden**0.5
    weight = weight.to(x.dtype)

    def in_launch() -> RouterOutput:
        return moe_router_forward(x, weight, weights, backend=backend)

    with torch.no_grad():
        chosen = in_launch()
    check(chosen, problem, weight)

    def at_hand() -> torch.Tensor:
        return moe_apply(backend, x, chosen.probs, chosen.routing_map, weights)

    def in_torch() -> torch.Tensor:
        logits = x.float() @ weight.float().t()
        choice = logits.topk(config.topk, dim=1).indices
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, choice, True)
        probs = RouterConfig().probs_of(logits, routing_map)
        return moe_apply(backend, x, probs, routing_map, weights)

    calls = {call.__name__: without_grad(call) for call in (at_hand, in_launch, in_torch)}
    times = stopwatch.in_turns(calls, turns, launches)
    return {name: common.timing_of(milliseconds) for name, milliseconds in times.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--turns", type=int, default=8, help="of each way")
    parser.add_argument("--launches", type=int, default=20, help="of a turn")
    parser.add_argument("--commit", help="what is measured, where the checkout has no git")
    parser.add_argument("--out", type=Path, help="file that takes one JSON object per measurement")
    options = parser.parse_args(arguments)
    if not common.has_gpu():
        return 2
    num_ranks = common.join_group()
    record = Record(
        options.out,
        **common.machine(options.commit),
        command=" ".join(["tools.bench.bench_gate", *arguments]),
        num_ranks=num_ranks,
    )
    group = dist.group.WORLD if num_ranks > 1 else None
    rank = dist.get_rank() if num_ranks > 1 else 0
    log("| shape | routing at hand, us | gate in the launch adds | router of torch adds |")
    log("| --- | --- | --- | --- |")
    for name in options.shapes:
        device = torch.device("cuda", torch.cuda.current_device())
        problem = make_problem(SHAPES[name], num_ranks, rank=rank, device=device, seed=1)
        for parameter in problem.parameters:
            parameter.detach().zero_()
        backend = select_backend(
            problem.config,
            group,
            device,
            kind="kernel",
            timeout=10.0,
            row_bound=common.ROW_BOUND,
        )
        times = measure(problem, backend, options.turns, options.launches)
        floor, *others = (1e3 * timing.median_ms for timing in times.values())
        log(" | ".join([f"| {name}", f"{floor:.1f}", *(f"{us - floor:.1f}" for us in others)]), "|")
        found = {key: timing.as_dict() for key, timing in times.items()}
        record.write(measurement="gate", shape=name, **found)
        del problem, backend
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
