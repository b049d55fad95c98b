"""One rank of a job that runs cases on GPUs of one host; started by torchrun.

Run: ``torchrun --nproc-per-node 4 -m tests.multi_gpu.worker --symmetric cuda --out FILE``. Rank 0
writes one JSON object per case into the file: its name, whether every rank passed, seconds, and the
first traceback. The job ends with the first case that fails, since ranks may then disagree about
what comes next.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import datetime
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import planner
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError, PeerTimeoutError, RoutingError
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.gpu import steps
from tests.gpu.expected import Results, assert_as_good, expected, to_device
from tests.gpu.layers import make_config, zipf
from tests.gpu.virtual import poisoned_empties
from tests.multi_gpu.jobs import tell
from tests.unit import cases

TIMEOUT_S = 10.0
COLLECTIVE_TIMEOUT_S = 60


@dataclass
class Job:
    """What every case needs."""

    group: dist.ProcessGroup
    gloo: dist.ProcessGroup
    rank: int
    num_ranks: int
    device: torch.device
    symmetric: str

    def backend(
        self, config: MoEConfig, *, timeout_s: float = TIMEOUT_S, spare_slots: int = 0
    ) -> KernelBackend:
        backend = select_backend(
            config,
            self.group,
            self.device,
            kind="kernel",
            symmetric_memory=self.symmetric,
            timeout=timeout_s,
            spare_slots=spare_slots,
        )
        assert isinstance(backend, KernelBackend)
        return backend

    def inputs(
        self,
        config: MoEConfig,
        routing: cases.Routing,
        tokens: list[int],
        *,
        seed: int = 0,
    ) -> cases.Inputs:
        """All ranks' inputs, the same on every rank."""
        inputs = cases.make_inputs(config, routing, tokens, dtype=torch.bfloat16, seed=seed)
        return to_device(inputs, self.device)

    def weights(self, config: MoEConfig, inputs: cases.Inputs) -> ExpertWeights:
        first = self.rank * config.num_local_experts
        experts = slice(first, first + config.num_local_experts)
        return ExpertWeights(tuple(inputs.fc1[experts]), tuple(inputs.fc2[experts]))

    def step(self, backend: KernelBackend, inputs: cases.Inputs, weights: ExpertWeights) -> Results:
        """Forward and backward of this rank's share, in poisoned buffers."""
        with poisoned_empties():
            out, saved = backend.forward(
                inputs.x[self.rank],
                inputs.probs[self.rank],
                inputs.routing_map[self.rank],
                weights,
                training=True,
            )
            grads = [
                [WeightGrad(torch.empty_like(w, dtype=torch.float32), False) for w in share]
                for share in (weights.fc1, weights.fc2)
            ]
            grad_x, grad_probs = backend.backward(
                inputs.grad_out[self.rank], saved, weights, *grads
            )
        fc1, fc2 = (torch.stack([grad.buffer for grad in share]) for share in grads)
        return Results(out, grad_x, grad_probs, fc1, fc2)

    def check(
        self,
        config: MoEConfig,
        routing: cases.Routing,
        tokens: list[int],
        change: Callable[[cases.Inputs], cases.Inputs] = lambda inputs: inputs,
        launches: int = 2,
    ) -> None:
        """Compares this rank's results with the oracle's, after launches full of NaN."""
        backend = self.backend(config)
        inputs = change(self.inputs(config, routing, tokens))
        weights = self.weights(config, inputs)
        want = expected(config, inputs).share(config, tokens, self.rank)
        nan = replace(inputs, x=[torch.full_like(x, float("nan")) for x in inputs.x])
        nan.grad_out = nan.x
        for _ in range(launches):
            self.step(backend, nan, weights)
            assert_as_good(self.step(backend, inputs, weights), want)


def tokens_of(job: Job) -> list[int]:
    return [96, 0, 320, 77][: job.num_ranks] if job.num_ranks > 2 else [129, 200]


def routings(job: Job) -> None:
    config = make_config(job.num_ranks, topk=2)
    for routing in (
        cases.uniform,
        zipf,
        cases.to_one_expert,
        cases.to_one_rank,
        cases.with_empty_experts,
        cases.with_dropped_tokens,
        cases.to_nobody,
    ):
        job.check(config, routing, tokens_of(job))


def shapes(job: Job) -> None:
    for hidden, intermediate, num_experts, topk in (
        (64, 64, 4, 1),
        (320, 448, 8, 4),
        (1088, 192, 32, 8),
        (128, 1088, 16, 16),
    ):
        config = make_config(
            job.num_ranks,
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            topk=topk,
        )
        job.check(config, cases.uniform, tokens_of(job), launches=1)


def activations(job: Job) -> None:
    for activation in Activation:
        for gated in (True, False):
            config = make_config(job.num_ranks, activation=activation, gated=gated)
            job.check(config, cases.uniform, tokens_of(job), launches=1)


def probabilities(job: Job) -> None:
    def in_bfloat16(inputs: cases.Inputs) -> cases.Inputs:
        return replace(inputs, probs=[probs.bfloat16() for probs in inputs.probs])

    def filled_up(inputs: cases.Inputs) -> cases.Inputs:
        full = [torch.ones_like(selected) for selected in inputs.routing_map]
        return replace(inputs, routing_map=full)

    job.check(make_config(job.num_ranks), cases.uniform, tokens_of(job), in_bfloat16)
    padded = make_config(job.num_ranks, skip_zero_probs=True)
    job.check(padded, cases.uniform, tokens_of(job), filled_up)


def large(job: Job) -> None:
    config = make_config(
        job.num_ranks, hidden=2048, intermediate=768, num_experts=16, topk=6, max_tokens=1024
    )
    tokens = [1024 - 37 * rank for rank in range(job.num_ranks)]
    job.check(config, zipf, tokens)


def a_thousand_launches(job: Job) -> None:
    config = make_config(job.num_ranks, hidden=256, intermediate=128, num_experts=8, topk=2)
    backend = job.backend(config)
    kinds = (cases.uniform, zipf, cases.to_one_expert, cases.with_dropped_tokens, cases.to_nobody)
    sets = []
    for seed in range(20):
        tokens = [(37 * seed + 101 * rank) % 300 for rank in range(job.num_ranks)]
        sets.append(job.inputs(config, kinds[seed % len(kinds)], tokens, seed=seed))
        sets[seed] = replace(sets[seed], fc1=sets[0].fc1, fc2=sets[0].fc2)
    weights = job.weights(config, sets[0])
    first: list[Results] = []
    differences = torch.zeros((), dtype=torch.int64, device=job.device)
    for launch in range(1000):
        inputs = sets[launch % len(sets)]
        got = job.step(backend, inputs, weights)
        if launch < len(sets):
            tokens = [len(x) for x in inputs.x]
            want = expected(config, inputs).share(config, tokens, job.rank)
            assert_as_good(got, want)
            first.append(got)
            continue
        for name, tensor in vars(got).items():
            differences += (tensor != getattr(first[launch % len(sets)], name)).sum()
    assert int(differences) == 0, f"{int(differences)} values are not repeated bit by bit"


def layers_in_flight(job: Job) -> None:
    """Two layers of different shapes through autograd, two micro-batches, the later one larger."""
    configs = [
        make_config(job.num_ranks, topk=2, max_tokens=128),
        make_config(job.num_ranks, hidden=256, intermediate=320, num_experts=32, max_tokens=500),
    ]
    tokens = [128 - 31 * rank for rank in range(job.num_ranks)]
    batches = [job.inputs(config, cases.uniform, tokens) for config in configs]
    backends = [job.backend(config) for config in configs]
    leaves, outs = [], []
    for _ in range(2):
        for config, backend, inputs in zip(configs, backends, batches, strict=True):
            x = inputs.x[job.rank].clone().requires_grad_()
            probs = inputs.probs[job.rank].clone().requires_grad_()
            weights = job.weights(config, inputs)
            outs.append(moe_apply(backend, x, probs, inputs.routing_map[job.rank], weights))
            leaves.append((x, probs))
    for index in (3, 2, 1, 0):
        inputs = batches[index % 2]
        outs[index].backward(inputs.grad_out[job.rank])
    for index, (x, probs) in enumerate(leaves):
        config, inputs = configs[index % 2], batches[index % 2]
        want = expected(config, inputs).share(config, tokens, job.rank)
        weight_grads = {name: getattr(want.exact, name) for name in ("grad_fc1", "grad_fc2")}
        assert_as_good(Results(outs[index].detach(), x.grad, probs.grad, **weight_grads), want)


def main_grads(job: Job) -> None:
    config = make_config(job.num_ranks)
    inputs = job.inputs(config, cases.with_empty_experts, tokens_of(job))
    backend = job.backend(config)
    weights = job.weights(config, inputs)
    main_grads = [steps.make_main_grads(share) for share in (weights.fc1, weights.fc2)]
    for weight in (*weights.fc1, *weights.fc2):
        weight.requires_grad_()
    for _ in range(2):
        x = inputs.x[job.rank].clone().requires_grad_()
        probs = inputs.probs[job.rank].clone().requires_grad_()
        out = moe_apply(
            backend,
            x,
            probs,
            inputs.routing_map[job.rank],
            weights,
            accumulate_into_main_grad=True,
        )
        out.backward(inputs.grad_out[job.rank])
    fc1, fc2 = (torch.stack(share) / 2 for share in main_grads)
    for weight in (*weights.fc1, *weights.fc2):
        weight.requires_grad_(False)
    want = expected(config, inputs).share(config, tokens_of(job), job.rank)
    assert_as_good(Results(out.detach(), x.grad, probs.grad, fc1, fc2), want)


def reduce_early(
    job: Job,
    backend: KernelBackend,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_out: torch.Tensor,
    weights: ExpertWeights,
) -> None:
    """Ranks sum fc2's gradients while a backward runs, with the bits of a sum behind it."""
    grads = [
        [WeightGrad(torch.zeros_like(weight, dtype=torch.float32), True) for weight in share]
        for share in (weights.fc1, weights.fc2)
    ]
    for _ in range(20):
        _, saved = backend.forward(*given, weights, training=True)
        backend.backward(grad_out, saved, weights, *grads)
        early = backend.early_fc2_grads()
        assert early is not None
        with early:
            reduced = torch.stack([grad.buffer for grad in grads[1]])
            work = dist.all_reduce(reduced, group=job.group, async_op=True)
        work.wait()
        want = torch.stack([grad.buffer for grad in grads[1]])
        dist.all_reduce(want, group=job.group)
        torch.testing.assert_close(reduced, want, rtol=0, atol=0)


def early_reductions(job: Job) -> None:
    """Replicas of one rank each sum fc2's gradients while they still compute fc1's."""
    config = make_config(1, hidden=1024, intermediate=1024, max_tokens=4096)
    backend = KernelBackend(config, None, job.device)
    inputs = job.inputs(config, cases.uniform, [4096], seed=job.rank)
    weights = ExpertWeights(tuple(inputs.fc1), tuple(inputs.fc2))
    given = (inputs.x[0], inputs.probs[0], inputs.routing_map[0])
    reduce_early(job, backend, given, inputs.grad_out[0], weights)


def early_reductions_with_slots(job: Job) -> None:
    """Ranks sum fc2's gradients behind those of replicas, which their owners add."""
    config = make_config(job.num_ranks, hidden=1024, intermediate=1024, topk=2, max_tokens=4096)
    planner.HIDDEN_PUSH = 1.0  # a layer this small has replicas, too
    backend, tokens = job.backend(config, spare_slots=2), [4096] * job.num_ranks
    inputs = job.inputs(config, zipf, tokens)
    weights = job.weights(config, inputs)
    want = expected(config, inputs).share(config, tokens, job.rank)
    assert_as_good(job.step(backend, inputs, weights), want)
    given = (inputs.x[job.rank], inputs.probs[job.rank], inputs.routing_map[job.rank])
    reduce_early(job, backend, given, inputs.grad_out[job.rank], weights)
    torch.cuda.synchronize()
    held = [len(record.replicas.rows) for record in backend.take_records() if record.replicas]
    counts = torch.tensor([sum(held)])
    dist.all_reduce(counts, group=job.gloo)
    assert counts > 0, "no rank held a replica"


def bad_routing(job: Job) -> None:
    """A NaN on the last rank is an error on every rank; the next launch is right."""
    config = make_config(job.num_ranks)
    tokens = [64] * job.num_ranks
    inputs = job.inputs(config, cases.uniform, tokens)
    backend = job.backend(config)
    weights = job.weights(config, inputs)
    probs = inputs.probs[job.rank].clone()
    faulty = job.num_ranks - 1
    if job.rank == faulty:
        probs[3, inputs.routing_map[job.rank][3]] = float("nan")
    wanted = rf"^token 3 of rank {faulty}: its probability for expert \d+ is NaN"
    with pytest.raises(RoutingError, match=wanted):
        backend.forward(
            inputs.x[job.rank], probs, inputs.routing_map[job.rank], weights, training=True
        )
    want = expected(config, inputs).share(config, tokens, job.rank)
    assert_as_good(job.step(backend, inputs, weights), want)


def disagreement(job: Job) -> None:
    with pytest.raises(ConfigError, match="the ranks disagree on hidden: 512 on rank 0, 256 on"):
        job.backend(make_config(job.num_ranks, hidden=256 if job.rank else 512))


def a_peer_that_never_calls(job: Job) -> None:
    """The last case of a job: the ranks are out of step afterwards."""
    config = make_config(job.num_ranks)
    inputs = job.inputs(config, cases.uniform, [64] * job.num_ranks)
    backend = job.backend(config, timeout_s=2.0)
    weights = job.weights(config, inputs)
    job.step(backend, inputs, weights)
    torch.cuda.synchronize()
    dist.barrier()
    start = time.monotonic()
    if job.rank == 0:
        with pytest.raises(PeerTimeoutError, match="rank 0 waited too long from rank"):
            job.step(backend, inputs, weights)
        assert time.monotonic() - start < 8.0
    dist.barrier()
    assert torch.ones(8, device=job.device).sum() == 8


CASES: dict[str, Callable[[Job], None]] = {
    function.__name__: function
    for function in (
        disagreement,
        routings,
        shapes,
        activations,
        probabilities,
        large,
        main_grads,
        layers_in_flight,
        early_reductions,
        early_reductions_with_slots,
        bad_routing,
        a_thousand_launches,
        a_peer_that_never_calls,
    )
}


def run_case(job: Job, function: Callable[[Job], None]) -> dict[str, Any]:
    """Runs one case on all ranks; the record of all of them on each."""
    start = time.monotonic()
    text = None
    try:
        function(job)
        torch.cuda.synchronize()
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - rank 0 reports it
        text = f"rank {job.rank}:\n{traceback.format_exc()}"
    errors: list[str | None] = [None] * job.num_ranks
    dist.all_gather_object(errors, text, group=job.gloo)  # works without a CUDA context
    failed = [error for error in errors if error]
    return {
        "case": function.__name__,
        "passed": not failed,
        "seconds": round(time.monotonic() - start, 2),
        "error": "\n".join(failed),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--symmetric", choices=("cuda", "nvshmem"), default="cuda")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, help="file that takes one JSON object per case")
    options = parser.parse_args(arguments)

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", device_id=device, timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    )
    group = dist.group.WORLD
    assert group is not None
    job = Job(
        group=group,
        gloo=dist.new_group(backend="gloo"),
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        device=device,
        symmetric=options.symmetric,
    )
    status = 0
    for name in options.cases:
        record = run_case(job, CASES[name])
        if job.rank == 0:
            print(f"{'passed' if record['passed'] else 'FAILED'} {name} in {record['seconds']} s")
            print(record["error"], end="", flush=True)
            tell(options.out, **record)
        if not record["passed"]:
            status = 1
            break
    sys.stdout.flush()
    dist.barrier(group=job.gloo)
    os._exit(status)  # after a fault there may be no CUDA context left to tidy up


if __name__ == "__main__":
    main(sys.argv[1:])
