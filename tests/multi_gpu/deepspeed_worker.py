"""One rank of a job that trains with DeepSpeed on GPUs of one host; started by torchrun.

Run: ``torchrun --nproc-per-node 4 -m tests.multi_gpu.deepspeed_worker --out FILE``. Rank 0 writes
one JSON object per case into the file, with what was measured; the job ends with the first case
that fails, and a case that takes too long ends it with every thread's stack. Without a GPU the same
runs on processors, with gloo and the reference backend.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import dataclasses
import faulthandler
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.bench.shapes import Shape
from flashmoe_megatron.deepspeed import attach
from tests.multi_gpu.jobs import tell
from tools.bench.bench_training.decoder import (
    HAS_GPU,
    Experts,
    Setup,
    build_engine,
    mean_over_ranks,
    release,
    start,
    step,
    text_batches,
)

CASE_LIMIT_S = 90
KERNEL_TIMEOUT_S = 10
LAYER = (
    Shape(1024, 512, 1024, 16, 4, gated=True) if HAS_GPU else Shape(128, 64, 128, 8, 2, gated=True)
)
STOCK = Experts("DeepSpeed", is_fused=False)
OURS = Experts("flashmoe", is_fused=True)

WORSE = 1.1
"""Our gradients' error against float32 is at most this many times DeepSpeed's own ..."""
EQUAL = 1e-3
"""... and this, which is a quarter of a unit of bfloat16."""
GRADIENTS_APART = 2e-2
LOSSES_APART = 1e-2
"""Largest relative distances between the two kinds of layers."""

Measured = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """What every case needs."""

    device: torch.device
    gloo: dist.ProcessGroup
    num_steps: int

    def setup(self, **changes: Any) -> Setup:
        """The small decoder of all cases."""
        usual = {"shape": LAYER, "sequence": LAYER.tokens // 2, "drop_tokens": False, "lr": 3e-4}
        return Setup(**{**usual, **changes})

    def engine(self, setup: Setup, experts: Experts, dtype: torch.dtype = torch.bfloat16) -> Any:
        engine = build_engine(setup, experts, self.device, dtype=dtype, timeout=KERNEL_TIMEOUT_S)
        if experts.is_fused:
            outcomes = set(attach(engine).values())
            wanted = {f"fused, backend {'kernel' if HAS_GPU else 'reference'}"}
            assert outcomes == wanted, f"wanted {wanted}, got {outcomes}"
        return engine

    def batches(self, setup: Setup) -> Any:
        """Bytes with some order in them, so that there is something to learn."""
        generator = torch.Generator().manual_seed(5)
        words = torch.randint(256, (64, 8), generator=generator)
        order = torch.randint(64, (8192,), generator=generator)
        return text_batches(words[order].flatten(), setup, self.device)

    def gradients(
        self, setup: Setup, experts: Experts, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The first batch's gradients by the parameter's name, whole, in float32."""
        from deepspeed.utils import safe_get_full_grad

        engine = self.engine(setup, experts, dtype)
        tokens, labels = next(self.batches(setup))
        engine.backward(engine(tokens, labels))
        found = {}
        for name, parameter in engine.module.named_parameters():
            gradient = safe_get_full_grad(parameter)
            assert gradient is not None, f"{name} has no gradient"
            found[name] = gradient.float() / engine.optimizer.loss_scale
        release(engine)
        return found

    def losses(
        self, setup: Setup, experts: Experts, num_steps: int, dtype: torch.dtype = torch.bfloat16
    ) -> list[float]:
        engine = self.engine(setup, experts, dtype)
        batches = self.batches(setup)
        losses = [step(engine, next(batches)) for _ in range(num_steps)]
        if experts.is_fused:
            layers = [m.flashmoe.experts for m in engine.module.modules() if hasattr(m, "flashmoe")]
            calls = {layer.num_calls for layer in layers}
            assert calls == {num_steps}, f"{calls} calls of a layer, wanted {num_steps}"
        release(engine)
        return mean_over_ranks(losses)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The relative distance in the L2 norm."""
    scale = torch.linalg.vector_norm(want)
    return float(torch.linalg.vector_norm(got - want) / scale.clamp_min(1e-30))


def parity(
    job: Job,
    family: str,
    zero: int,
    ep_size: int | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    has_biases: bool = False,
) -> Measured:
    """Gradients of one layer against float32 and each other, then the losses of a training.

    AutoEP's router rounds its logits to bfloat16, so that a few tokens go elsewhere than in
    float32, with both kinds of layers: there it is how far these are apart that tells.
    """
    ep_size = min(ep_size or dist.get_world_size(), dist.get_world_size())
    options = {"stage3_param_persistence_threshold": 0} if zero == 3 else {}
    setup = job.setup(
        family=family, zero=zero, ep_size=ep_size, zero_options=options, has_biases=has_biases
    )
    alone = dataclasses.replace(setup, num_layers=1, has_attention=False)
    exact = job.gradients(alone, STOCK, torch.float32)
    stock = job.gradients(alone, STOCK, dtype)
    ours = job.gradients(alone, OURS, dtype)
    assert ours.keys() == stock.keys() == exact.keys()
    measured: Measured = {"gradients": {}}
    problems = []
    for name, want in exact.items():
        of_stock, of_ours = distance(stock[name], want), distance(ours[name], want)
        apart = distance(ours[name], stock[name])
        measured["gradients"][name] = {"deepspeed": of_stock, "flashmoe": of_ours, "apart": apart}
        if not (of_ours <= WORSE * of_stock + EQUAL and apart <= GRADIENTS_APART):
            problems.append(f"{name}: {measured['gradients'][name]}")
    assert not problems, "gradients do not agree: " + "; ".join(problems)

    stock_losses = job.losses(setup, STOCK, 10, dtype)
    our_losses = job.losses(setup, OURS, 10, dtype)
    measured["losses"] = {"deepspeed": stock_losses, "flashmoe": our_losses}
    for mine, theirs in zip(our_losses, stock_losses, strict=True):
        assert abs(mine - theirs) <= LOSSES_APART * theirs, f"losses do not agree: {measured}"
    return measured


def overlap(job: Job) -> Measured:
    """ZeRO-2 reduces small buckets of gradients with NCCL while our kernels run, for long."""
    setup = job.setup(
        family="native",
        ep_size=2,
        drop_tokens=True,
        lr=2e-3,
        zero_options={
            "overlap_comm": True,
            "reduce_bucket_size": 1_000_000,
            "allgather_bucket_size": 1_000_000,
        },
    )
    begin = time.monotonic()
    losses = job.losses(setup, OURS, job.num_steps)
    seconds = time.monotonic() - begin
    tenth = max(job.num_steps // 10, 1)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    assert last < 0.9 * first, f"the loss went from {first} to {last}"
    return {"steps": job.num_steps, "seconds": round(seconds, 1), "first": first, "last": last}


CASES: dict[str, Callable[[Job], Measured]] = {
    f"{family}_zero{zero}": functools.partial(parity, family=family, zero=zero, ep_size=ep_size)
    for family, zero, ep_size in (
        ("native", 1, None),
        ("native", 2, 2),  # with data parallelism where there are more ranks
        ("autoep", 1, None),
        ("autoep", 2, 2),
        ("autoep", 3, None),
    )
}
CASES["native_zero2_biases"] = functools.partial(
    parity, family="native", zero=2, ep_size=2, has_biases=True
)
CASES["native_zero2_float16"] = functools.partial(
    parity, family="native", zero=2, ep_size=2, dtype=torch.float16, has_biases=True
)
CASES["zero2_overlap"] = overlap


def run_case(job: Job, name: str) -> dict[str, Any]:
    """Runs one case on all ranks; the record of all of them on each."""
    begin = time.monotonic()
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    measured: Measured = {}
    text = None
    try:
        measured = CASES[name](job)
        if HAS_GPU:
            torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - rank 0 reports it
        text = f"rank {dist.get_rank()}:\n{traceback.format_exc()}"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, text, group=job.gloo)  # works without a CUDA context
    faulthandler.cancel_dump_traceback_later()
    failed = [error for error in errors if error]
    return {
        "case": name,
        "passed": not failed,
        "seconds": round(time.monotonic() - begin, 2),
        "measured": measured,
        "error": "\n".join(failed),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=1000, help="of the long case")
    parser.add_argument("--out", type=Path, help="file that takes one JSON object per case")
    options = parser.parse_args(arguments)
    device = start(timeout=60)
    job = Job(device, dist.new_group(backend="gloo"), options.steps)
    status = 0
    for name in options.cases:
        record = run_case(job, name)
        if dist.get_rank() == 0:
            print(f"{'passed' if record['passed'] else 'FAILED'} {name} in {record['seconds']} s")
            print(record["error"], end="", flush=True)
            tell(options.out, **record)
        if not record["passed"]:
            status = 1
            break
    sys.stdout.flush()
    os._exit(status)  # a rank that failed alone would wait for the others for ever


if __name__ == "__main__":
    main(sys.argv[1:])
