"""Trains a small GPT whose tokens crowd on one rank in some iterations. Runs in ranks of a pool.

As a program it trains three times, with a bound that overflows, with one that its first iterations
measure and with one that never overflows, and compares all losses and tensors::

    python -m tests.megatron.repeats --steps 2000 --crowded 20
"""

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from flashmoe_megatron.options import RowBound
from tests.distributed import RankPool
from tests.forks import ForkServer
from tests.megatron import harness
from tests.megatron.harness import Layout

LENGTH, SEQUENCES = 96, 2
"""Tokens of one value fill more blocks than a bound of 1 allows, with one in part per expert."""
VOCABULARY = harness.VOCABULARY


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        crowded: Iterations in which all tokens of a micro-batch are the same one.
        evaluated: Iterations after which a crowded batch is evaluated.
        measured: Iterations with exact buffers, if the bound is measured.
        room: How many times the rows of a repeat buffers hold afterwards; 0 leaves the bound.
        parallel: Settings of Megatron's DDP.
        save_to: The folder of a checkpoint after the last iteration.
        load_from: The folder of one that the training resumes from.
        most_in_a_row: The limit of repeats, if not the package's.
        wrong: A mistake of the loop.
    """

    layout: Layout
    row_bound: RowBound | None = 1.0
    steps: int = 4
    crowded: tuple[int, ...] = (1, 3)
    evaluated: tuple[int, ...] = ()
    micro_batches: int = 2
    measured: int = 2
    room: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    save_to: str | None = None
    load_from: str | None = None
    most_in_a_row: int | None = None
    wrong: str | None = None


@dataclass
class Trained:
    """Results on one rank.

    Attributes:
        losses: The losses of all micro-batches, evaluations included.
        state: All tensors that a training goes on with, by their names.
        repeats: Iterations and evaluations that were repeated.
        read: Batches that were read of the iterators.
    """

    losses: list[float]
    state: dict[str, torch.Tensor]
    repeats: int
    read: int


def train(group: dist.ProcessGroup, case: Case) -> Trained:
    """Trains from one seed, with dropout, biases of experts and losses that are logged."""
    settings = {"max_tokens": LENGTH * SEQUENCES, "row_bound": case.row_bound, **case.settings}
    harness.prepare(case.layout, **settings)
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from flashmoe_megatron import attempts, repeats
    from flashmoe_megatron.adapters.megatron.repeat import iteration

    harness.forget_metrics()
    MTPLossLoggingHelper.tracker.clear()
    before, attempts.ATTEMPTS.blocks = iteration.ITERATIONS.num_repeats, 0
    iteration.ITERATIONS._measured.clear()
    config = harness.transformer_config(
        case.layout,
        "flashmoe",
        **{
            "num_moe_experts": 4,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 1e-2,
            **case.config,
        },
    )
    vars(config).update(case.later)
    random.seed(5)
    np.random.seed(5)
    chunks = harness.build_model(config, case.layout)
    parallel = DistributedDataParallelConfig(
        **{"use_distributed_optimizer": True, "bucket_size": 10_000, **case.parallel}
    )
    model = [
        DistributedDataParallel(config, parallel, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if parallel.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in model]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=5e-3,
            clip_grad=1.0,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
            overlap_param_gather=parallel.overlap_param_gather,
        ),
        model,
    )
    config.grad_scale_func = optimizer.scale_loss
    if case.load_from is not None:
        harness._load(case.load_from, model, optimizer)
    run = get_forward_backward_func()
    losses: list[float] = []
    read = [0]

    def go(number: int, *, is_crowded: bool, forward_only: bool) -> None:
        iterators: list[Any] = [_batches(case, number, is_crowded, read) for _ in model]
        if case.wrong == "batches":
            iterators = [Queue(each) for each in iterators]
        reduced = harness.call_schedule(
            run,
            model,
            iterators,
            forward_step_func=_forward_step,
            num_microbatches=case.micro_batches,
            seq_length=LENGTH,
            micro_batch_size=SEQUENCES,
            forward_only=forward_only,
        )
        losses.extend(float(one["loss"]) for one in reduced)

    limit = case.most_in_a_row or repeats.MOST_IN_A_ROW
    with (
        mock.patch.object(repeats, "MOST_IN_A_ROW", limit),
        mock.patch.object(iteration, "MEASURED", case.measured),
        mock.patch.object(attempts, "ROOM", case.room),
    ):
        for step in range(case.steps):
            keeps_gradients = case.wrong == "gradients" or (case.wrong, step) == ("later", 1)
            for chunk in () if keeps_gradients else model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            if case.wrong == "weights":
                chunks[0].decoder.layers[0].mlp.router.weight.data.fill_(torch.nan)
            go(step, is_crowded=step in case.crowded, forward_only=False)
            optimizer.step()
            if step in case.evaluated:
                with _evaluating(model, parallel):
                    go(100 + step, is_crowded=True, forward_only=True)
    if parallel.overlap_param_gather:
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=True)
    if case.save_to is not None:
        harness._save(case.save_to, model, optimizer)
    config.grad_scale_func = None
    state = dict(_state(model, optimizer))
    return Trained(losses, state, iteration.ITERATIONS.num_repeats - before, read[0])


def zeroed_chunk() -> torch.nn.Module:
    """A model that is only asked to drop its gradients."""
    from flashmoe_megatron.adapters.megatron.repeat.iteration import patch_ddp

    class DistributedDataParallel(torch.nn.Module):
        def zero_grad_buffer(self) -> None:
            pass

    harness.prepare(Layout())
    patch_ddp(SimpleNamespace(DistributedDataParallel=DistributedDataParallel))  # type: ignore[arg-type]
    return DistributedDataParallel()


class Queue:
    """Batches that are taken by another method than an iterator's."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.take = batches.__next__


@contextlib.contextmanager
def _evaluating(model: list[Any], parallel: Any) -> Iterator[None]:
    for chunk in model:
        if parallel.overlap_param_gather:
            chunk.disable_forward_pre_hook(param_sync=True)
        chunk.eval()
    with torch.no_grad():
        yield
    for chunk in model:
        chunk.train()
        if parallel.overlap_param_gather:
            chunk.enable_forward_pre_hook()


def _batches(case: Case, number: int, is_crowded: bool, read: list[int]) -> Iterator[Any]:
    """Batches that are the same on all ranks; each may be taken from its table once."""
    generator = torch.Generator().manual_seed(number)
    for _ in range(case.micro_batches):
        shape = (SEQUENCES, LENGTH + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        if is_crowded:
            tokens[:] = tokens[0, 0]
        read[0] += 1
        yield {"tokens": tokens}


def _forward_step(
    batches: Iterator[Any], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    batch = batches.take() if isinstance(batches, Queue) else next(batches)
    tokens = batch.pop("tokens")
    labels = tokens[:, 1:].contiguous()
    tokens = tokens[:, :-1].contiguous()
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    forward = model.build_schedule_plan if return_schedule_plan else model
    return forward(tokens, torch.zeros_like(tokens), mask, labels=labels), _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    loss = output.float().mean()
    for is_wrong in (torch.isnan, torch.isinf):
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=is_wrong, message="a loss", fatal=True
        )
    return loss, {"loss": loss.detach().clone()}


def _state(model: list[Any], optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All that the next iteration begins with, by names."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    for index, chunk in enumerate(model):
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            yield f"{index}.{name}", tensor.detach().clone()
    for index, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        for number, values in enumerate(part.optimizer.state.values()):
            for name, tensor in values.items():
                yield f"optimizer.{index}.{number}.{name}", torch.as_tensor(tensor).clone()
    for name, entry in get_moe_layer_wise_logging_tracker().items():
        yield f"logged.{name}", entry["values"].clone()
    for name, value in MTPLossLoggingHelper.tracker.items():
        if isinstance(value, torch.Tensor):
            yield f"logged.predicted.{name}", value.clone()
    for name, state in get_cuda_rng_tracker().get_states().items():
        yield f"generator.{name}", state.clone()
    yield "generator.cpu", torch.get_rng_state()
    yield "generator.numpy", torch.as_tensor(np.random.get_state()[1].astype(np.int64))
    yield "generator.python", torch.tensor(random.getstate()[1])
    for layer in (layer for chunk in model for layer in harness._routed_experts([chunk])):
        yield f"counted.{layer.layer}", torch.tensor([layer.num_calls, layer.num_tokens])


def differences(got: Trained, want: Trained) -> list[str]:
    """The names of what is not equal digit by digit in two trainings of one rank."""
    found = ["losses"] if got.losses != want.losses else []
    if got.state.keys() != want.state.keys():
        found.append("names")
    pairs = ((name, got.state[name], tensor) for name, tensor in want.state.items())
    return found + [name for name, one, other in pairs if not torch.equal(one, other)]


def main() -> int:
    """Trains by the command line; returns 1 if anything differs or nothing was repeated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--crowded", type=int, default=20, help="iterations of one token")
    parser.add_argument("--bound", type=float, default=1.0, help="a row bound that overflows")
    options = parser.parse_args()
    every = options.steps // options.crowded
    crowded = tuple(range(every // 2, options.steps, every))
    from tests.megatron import repeats  # ranks know its names, and not those of a program

    case = repeats.Case(Layout(expert=2), steps=options.steps, crowded=crowded)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(contextlib.closing(ForkServer("tests.megatron.preloaded")))
            for _ in range(2)
        ]
        pool = stack.enter_context(contextlib.closing(RankPool(2, servers)))
        never, fixed, measured = (
            pool.run(repeats.train, replace(case, **changed), timeout_s=36000.0)
            for changed in (
                {"row_bound": 9.0},
                {"row_bound": options.bound},
                {"row_bound": "auto", "room": 1.1, "measured": 10},
            )
        )
    failed = False
    for bound, outcome in ((str(options.bound), fixed), ("auto", measured)):
        for rank, (got, want) in enumerate(zip(outcome, never, strict=True)):
            found = differences(got, want)
            failed |= bool(found) or bool(want.repeats) or not (got.repeats or bound == "auto")
            print(
                f"bound {bound}, rank {rank}: {options.steps} iterations, {got.repeats} repeated, "
                f"{len(got.losses)} losses to {got.losses[-1]:.6f}, {len(got.state)} tensors, "
                f"different: {found or 0}"
            )
    print(f"{time.perf_counter() - began:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
