"""ZeRO's buckets and the gaps of backwards: their size, when they are reduced, and the losses."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.deepspeed import slices
from flashmoe_megatron.adapters.deepspeed.settings import Settings
from flashmoe_megatron.adapters.gradients import LayerGradients, ReductionPlan
from flashmoe_megatron.measured.fit import write_fit
from flashmoe_megatron.separate.slices import GradientSlices
from tests.deepspeed import gaps
from tests.deepspeed.harness import DEEPSPEED, Case, prepare, train
from tests.distributed import RankPool
from tests.fits import make_fit
from tests.side_by_side import Outcome, assert_same


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("replicas", "given"), [(1, {}), (2, {"reduce_bucket_size": 7}), (2, {})])
def test_buckets_have_as_many_elements_as_fit(
    dtype: torch.dtype, replicas: int, given: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of experts that no other rank has are not reduced, and take no time."""
    planned: list[LayerGradients] = []

    def plan(layers: list[LayerGradients], *_: Any) -> ReductionPlan:
        planned.extend(layers)
        return ReductionPlan({}, {}, piece_bytes=4096)

    monkeypatch.setattr(slices, "plan_reduction", plan)
    monkeypatch.setattr(slices, "_num_replicas", lambda _: replicas)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    module = torch.nn.Module()
    module.dense = torch.nn.Parameter(torch.zeros(900, dtype=dtype))
    module.experts = torch.nn.Parameter(torch.zeros(640, dtype=dtype))
    module.experts.allreduce = False  # type: ignore[attr-defined]
    engine = SimpleNamespace(
        zero_optimization_stage=lambda: 2,
        module=module,
        device=torch.device("cpu"),
        config={"zero_optimization": given},
        optimizer=SimpleNamespace(reduce_bucket_size=7, overlap_comm=False),
    )
    layer = SimpleNamespace(layer=0, backend=None, dtype=dtype, bound_of_tokens=64)
    layers: Any = [layer, layer]
    slices.size_buckets(engine, layers, None, Settings())
    size = dtype.itemsize
    assert engine.optimizer.reduce_bucket_size == (7 if given else 4096 // size)
    assert [one.own_bytes for one in planned] == [320 * size * (replicas > 1)] * 2
    assert [one.other_bytes for one in planned] == [300 * size] * 2


def case_of(folder: Path, zero: int, *, bucket: int | None, **zero_optimization: Any) -> Case:
    """A training whose gaps take a few tens of KB."""
    fit = folder / "fit.json"
    write_fit(fit, make_fit(product=(1e-6, 1e-10), copy=(1e-6, 1e-10)))
    given = {"stage": zero, "overlap_comm": True, **zero_optimization}
    if bucket is not None:
        given["reduce_bucket_size"] = bucket
    settings = {
        "backend": "scheduled",
        "degree": "2",
        "slice_gradients": True,
        "degree_fit": str(fit),
        "max_tokens": 32,
    }
    model = {"k": 2, "drop_tokens": False}
    config = {"zero_optimization": given}
    return Case(model=model, zero=zero, config=config, settings=settings, micro_batches=2)


@pytest.mark.parametrize("bucket", [None, 3000])  # the second is less than some gradients have
@pytest.mark.parametrize("zero", [1, 2])
def test_buckets_wait_for_gaps_and_losses_are_the_same(
    zero: int, bucket: int | None, two_ranks: RankPool, tmp_path: Path
) -> None:
    case = case_of(tmp_path, zero, bucket=bucket)
    plain = dataclasses.replace(case, settings={**case.settings, "slice_gradients": False})
    want = two_ranks.run(train, plain, True)
    found = two_ranks.run(watch, case)
    for (got, places), one in zip(found, want, strict=True):
        assert_same(got, one, DEEPSPEED.tolerance)
        assert {"take", "drain"} <= set(places), "gaps take some, and the end the rest"
    assert found[0][1] == found[1][1], "ranks start them in one order"


def watch(group: dist.ProcessGroup, case: Case) -> tuple[Outcome, list[str]]:
    """Trains, and says where queued buckets were started."""
    prepare()
    places: list[str] = []
    place = ["elsewhere"]
    with pytest.MonkeyPatch.context() as patches:
        for name in ("take", "leave", "put", "drain"):
            method = getattr(GradientSlices, name)

            def at(*args: Any, name: str = name, method: Any = method) -> None:
                place.append(name)
                method(*args)
                place.pop()

            patches.setattr(GradientSlices, name, at)
        start = slices._WaitingBuckets._start

        def noted(*args: Any) -> None:
            places.append(place[-1])
            start(*args)

        patches.setattr(slices._WaitingBuckets, "_start", noted)
        return train(group, case, True), places


def test_without_overlap_no_bucket_waits(two_ranks: RankPool, tmp_path: Path) -> None:
    case = case_of(tmp_path, 2, bucket=None, overlap_comm=False)
    assert [places for _, places in two_ranks.run(watch, case)] == [[], []]


def test_waiting_is_faster_where_a_reduction_fills_a_gap(two_ranks: RankPool) -> None:
    """By a clock that counts, so that no machine's load is in it."""
    for in_gaps, at_once in two_ranks.run(compare_ways):
        assert in_gaps < 0.95 * at_once


def compare_ways(group: dist.ProcessGroup) -> tuple[float, float]:
    in_gaps, bucket = gaps.step_ms(10.0, waits=True, bucket=None)
    return in_gaps, gaps.step_ms(10.0, waits=False, bucket=bucket)[0]
