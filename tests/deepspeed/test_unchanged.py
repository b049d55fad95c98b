"""Weights of experts in FP8 that are quantized once in each batch of a DeepSpeed engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.deepspeed import harness, models
from tests.deepspeed.harness import Case, batch, build, train_engine
from tests.distributed import RankPool

BF16 = {"bf16": {"enabled": True}}
STEPS, MICRO_BATCHES = 3, 4
# Experts of two matrices, which no backend has to join for a call.
MODEL = {"expert": "silu_no_bias", "k": 2}


def case_of(often: str, zero: int) -> Case:
    return Case(
        family="native",
        model=MODEL,
        zero=zero,
        config=BF16,
        steps=STEPS,
        micro_batches=MICRO_BATCHES,
        settings={"experts": "fp8", "quantize": often},
    )


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts quantized matrices, at sizes that have whole blocks."""
    from flashmoe_megatron.separate import precision

    counts, quantize = [0], precision.quantize

    def count(x: torch.Tensor, height: int) -> Any:
        counts[-1] += height > 1
        return quantize(x, height)

    with (
        mock.patch.object(models, "HIDDEN", 128),
        mock.patch.object(harness, "HIDDEN", 128),
        mock.patch.object(precision, "quantize", count),
    ):
        yield counts


def trained(group: dist.ProcessGroup, zero: int) -> list[tuple[Any, ...]]:
    found = []
    for often in ("pass", "step"):
        with counted() as counts:
            outcome = train_engine(build(case_of(often, zero), fused=True), case_of(often, zero))
        found.append((outcome.losses, outcome.eval_losses, outcome.parameters, counts[0]))
    return found


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_training_has_the_same_bits(zero: int, two_ranks: RankPool) -> None:
    """Evaluation quantizes in each pass."""
    for want, got in two_ranks.run(trained, zero):
        assert got[:2] == want[:2]
        assert got[2].keys() == want[2].keys()
        for name, value in want[2].items():
            assert torch.equal(got[2][name], value), name
        matrices, rest = divmod(got[3], STEPS + 1)
        assert matrices > 0
        assert rest == 0
        assert want[3] == matrices * (STEPS * MICRO_BATCHES * 2 + 1)


def quantized(group: dist.ProcessGroup, folder: str) -> list[list[int]]:
    """What each forward of two batches quantizes, with other things between."""
    case = case_of("step", 0)
    found = []
    with counted() as counts:
        engine = build(case, fused=True)
        engine.save_checkpoint(folder, tag="begin")

        def forward(number: int) -> None:
            counts.append(0)
            loss = engine(*batch(case, number, torch.bfloat16))
            if engine.module.training:
                engine.backward(loss)
                engine.step()

        def of_batches(*between: Any) -> list[int]:
            counts[:] = []
            for number in range(2 * MICRO_BATCHES):
                forward(number)
                if number == 1:
                    for change in between:
                        change()
            return counts[:]

        def evaluate() -> None:
            engine.eval()
            with torch.no_grad():
                forward(0)
            engine.train()

        found.append(of_batches())
        found.append(of_batches(evaluate))
        found.append(of_batches(lambda: engine.load_checkpoint(folder, tag="begin")))
        # A loop with boundaries of its own.
        for number in range(MICRO_BATCHES):
            engine.set_gradient_accumulation_boundary(number == 1)
            if number == 0:
                counts[:] = []
            forward(number)
        found.append(counts[:])
    return found


def test_what_ends_a_promise(tmp_path: Any, two_ranks: RankPool) -> None:
    for plain, evaluated, loaded, own in two_ranks.run(quantized, str(tmp_path)):
        most = plain[0]
        assert most > 0
        assert plain == [most, 0, 0, 0] * 2
        twice = 2 * most  # a forward and its backward
        assert evaluated == [most, 0, most, twice, twice, most, 0, 0, 0]
        assert loaded == [most, 0, twice, twice, most, 0, 0, 0]
        assert own == [most, 0, twice, twice]


def test_engines_whose_weights_change_in_other_ways_are_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run(problems):
        assert said == [
            None,
            'flashmoe.quantize is "step" with ZenFlow, which updates weights within a batch; '
            'wanted "pass"',
            'flashmoe.quantize is "step" in a PipelineEngine, which counts no micro-batches; '
            'wanted "pass"',
            None,
        ]


def problems(group: dist.ProcessGroup) -> list[str | None]:
    harness.prepare()
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from flashmoe_megatron.adapters.deepspeed.settings import Settings
    from flashmoe_megatron.adapters.deepspeed.unchanged import promise_problem

    step = Settings(enabled=True, experts="fp8", quantize="step")
    pipeline = PipelineEngine.__new__(PipelineEngine)
    return [
        promise_problem(SimpleNamespace(zenflow=False), step),
        promise_problem(SimpleNamespace(zenflow=True), step),
        promise_problem(pipeline, step),
        promise_problem(pipeline, Settings(enabled=True)),
    ]
