"""The stress of launches, run on a processor, notices what it is there to notice."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from flashmoe_megatron.config import Activation
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import WeightGrad
from tests.gpu import stress
from tests.gpu.stress import Ledger, Report, Scenario, Values, Way, make_scenario, schedule


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(stress, "CHECK_EVERY", 10)


class ReferenceRun:
    """Stands for one rank, computes by the reference and flips one bit of a result if told to."""

    rank, num_ranks, experts = 0, 1, "bf16"

    def __init__(self, spoiled: str | None = None, after: int = 20) -> None:
        self._spoiled, self._left = spoiled, after

    def prepare(self, scenario: Scenario) -> None:
        pass

    def run(self, scenario: Scenario, way: Way) -> list[Values]:
        inputs, weights = scenario.inputs, scenario.weights[0]
        if scenario.dtype == torch.float16:  # which the reference does not compute in
            inputs = replace(inputs, x=[inputs.x[0].float()], grad_out=[inputs.grad_out[0].float()])
            weights = replace(
                weights,
                fc1=tuple(weight.float() for weight in weights.fc1),
                fc2=tuple(weight.float() for weight in weights.fc2),
            )
        backend = ReferenceBackend(scenario.config)
        given = inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights
        out, saved = backend.forward(*given, training=way.training)
        found = {"out": out}
        if way.training:
            grads = [
                [
                    WeightGrad(torch.empty_like(weight, dtype=torch.float32), False)
                    for weight in part
                ]
                for part in (weights.fc1, weights.fc2)
            ]
            grad_x, grad_probs = backend.backward(inputs.grad_out[0], saved, weights, *grads)
            found.update(grad_x=grad_x, grad_probs=grad_probs)
            for name, part in zip(("grad_fc1", "grad_fc2"), grads, strict=True):
                found.update({f"{name}[{i}]": grad.buffer for i, grad in enumerate(part)})
        self._left -= 1
        if self._left <= 0 and self._spoiled in found and found[self._spoiled].numel():
            value = found[self._spoiled]
            bits = torch.int16 if value.dtype.itemsize == 2 else torch.int32
            value.view(bits).view(-1)[-1] ^= 1
        return [found]

    def enter(self, ledger: Ledger, scenario: Scenario, way: Way, got: list[Values]) -> None:
        ledger.enter(scenario, way, 0, got[0])

    def check_first(self, scenario: Scenario, got: list[Values]) -> None:
        assert got[0]["out"].isfinite().all()


SCENARIOS = 6


def run(spoiled: str | None, steps: int) -> Report:
    report = Report("reference", 1, "none", seed=3)
    left = itertools.count(steps // stress.CHECK_EVERY - 1, -1)

    def agree_to_stop(_: bool) -> bool:
        return next(left) <= 0

    stress.stress(ReferenceRun(spoiled), report, 1e-9, agree_to_stop, scenarios=SCENARIOS)
    return report


def test_repeats_are_counted_and_equal():
    report = run(None, 60)
    assert report.failure == ""
    assert (report.steps, report.differences) == (60, 0)
    assert report.scenarios >= 4
    assert report.launches > report.steps
    assert report.compared > 100_000


def test_few_scenarios_are_run_until_there_are_launches_enough():
    report = Report("reference", 1, "none", seed=3)
    bounds = {"scenarios": 2, "launches": 100}
    stress.stress(ReferenceRun(), report, 3600, bool, **bounds)
    assert report.failure == ""
    assert report.scenarios == 2
    assert 100 <= report.launches < 100 + 2 * stress.CHECK_EVERY


@pytest.mark.parametrize("name", ["out", "grad_x", "grad_fc1[0]", "grad_probs"])
def test_one_bit_is_noticed(name: str):
    report = run(name, 200)
    assert "values differ from the first run's" in report.failure
    assert name in report.failure
    assert report.differences >= 1


def test_scenarios_in_fp8_are_compared_with_rounded_operands():
    """Results in bfloat16 are further from them than is allowed."""
    scenario = make_scenario(1, 1, "fp8")
    way = Way(training=True, bounded=False)
    stress.check_first(scenario, ReferenceRun().run(scenario, way))
    in_bf16 = replace(scenario, config=replace(scenario.config, experts="bf16"))
    with pytest.raises(AssertionError):
        stress.check_first(scenario, ReferenceRun().run(in_bf16, way))


def test_activations_of_scenarios_in_fp8_have_no_step():
    drawn = {
        experts: {stress.draw_activation(random.Random(i), experts) for i in range(60)}
        for experts in ("bf16", "fp8")
    }
    assert drawn["bf16"] == set(Activation)
    assert drawn["fp8"] == set(Activation) - {Activation.RELU}


def test_ranks_draw_the_same_scenarios_and_order():
    first, second = make_scenario(5, 4), make_scenario(5, 4)
    assert first.config == second.config
    for one, other in zip(first.inputs.x, second.inputs.x, strict=True):
        assert torch.equal(one, other)
    endless = [schedule(7, looks_ahead=True, scenarios=SCENARIOS) for _ in range(2)]
    orders = [list(itertools.islice(one, 500)) for one in endless]
    assert orders[0] == orders[1]
    number, way, on_nan = zip(*orders[0], strict=True)
    assert set(number) == set(range(SCENARIOS))
    assert {one.bounded for one in way} == {one.training for one in way} == set(on_nan)
    assert {one.ahead for one in way} == set(on_nan)
    assert not any(one.ahead for _, one, _ in itertools.islice(schedule(7, looks_ahead=False), 500))
    assert not on_nan[: number.index(1) + 1].count(True), "a first run on NaN"
