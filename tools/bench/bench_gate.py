"""Times the gate in the layer's launch beside a router of torch's operators in front of it.

On all GPUs of a host, from the checkout:

    torchrun --nproc-per-node 4 -m tools.bench.bench_gate --out results.jsonl

or on one GPU with ``--one-of 4``, as ``bench_layer``. For every shape, in one run: the layer with
the routing at hand, which is the floor of both; with the gate in its launch; and behind the router
of torch, in float32 as Megatron's with ``--moe-router-dtype fp32``. First the gate's choice has to
be that of float64 wherever two logits are further apart than rounding goes.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from flashmoe_megatron import GateConfig, moe_apply, moe_gated_forward
from flashmoe_megatron.backend import Backend
from flashmoe_megatron.layer import Gated
from flashmoe_megatron.select import select_backend
from tools.bench import common
from tools.bench.bench_layer import without_grad
from tools.bench.common import Record, Timer, Timing, log
from tools.bench.shapes import SHAPES, Problem, make_problem

MARGIN = 1e-4
"""Logits that are closer than this may be chosen in either order."""


def check(found: Gated, problem: Problem, weight: torch.Tensor) -> None:
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


def measure(problem: Problem, backend: Backend, timer: Timer) -> dict[str, Timing]:
    """Times the three ways of one forward, after the check."""
    config, x, weights = problem.config, problem.x, problem.weights
    weight = torch.randn(config.num_experts, config.hidden, device=x.device) / config.hidden**0.5
    weight = weight.to(x.dtype)

    def in_launch() -> Gated:
        return moe_gated_forward(x, weight, weights, backend=backend)

    with torch.no_grad():
        chosen = in_launch()
    check(chosen, problem, weight)

    def at_hand() -> torch.Tensor:
        return moe_apply(backend, x, chosen.probs, chosen.routing_map, weights)

    def in_torch() -> torch.Tensor:
        logits = x.float() @ weight.float().t()
        choice = logits.topk(config.topk, dim=1).indices
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, choice, True)
        probs = GateConfig().probs_of(logits, routing_map)
        return moe_apply(backend, x, probs, routing_map, weights)

    return {call.__name__: timer(without_grad(call)) for call in (at_hand, in_launch, in_torch)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--one-of", type=int, default=1, help="1/N of the experts, on one GPU")
    parser.add_argument("--commit", help="what is measured, where the checkout has no git")
    parser.add_argument("--out", type=Path, help="file that takes one JSON object per measurement")
    options = parser.parse_args(arguments)
    num_ranks = common.join_group()
    timer = Timer(options.iterations, options.warmup)
    command = " ".join(["tools.bench.bench_gate", *arguments])
    record = Record(options.out, **common.machine(options.commit), command=command)
    group = dist.group.WORLD if num_ranks > 1 else None
    rank = dist.get_rank() if num_ranks > 1 else 0
    log("| shape | routing at hand, ms | gate in the launch | router of torch | gate adds |")
    log("| --- | --- | --- | --- | --- |")
    for name in options.shapes:
        shape = SHAPES[name].one_of(options.one_of)
        device = torch.device("cuda", torch.cuda.current_device())
        problem = make_problem(shape, num_ranks, rank=rank, device=device, seed=1)
        backend = select_backend(problem.config, group, device, kind="kernel", timeout_s=10.0)
        times = measure(problem, backend, timer)
        medians = [timing.median_ms for timing in times.values()]
        adds = medians[1] - medians[0]
        log(f"| {name} | " + " | ".join(f"{ms:.3f}" for ms in medians) + f" | {adds:.3f} |")
        record.write(shape=name, **{key: timing.as_dict() for key, timing in times.items()})
        del problem, backend
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
