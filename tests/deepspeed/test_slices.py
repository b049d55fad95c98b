"""The size of ZeRO's buckets by hand, without an engine's training."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.deepspeed import slices
from flashmoe_megatron.adapters.deepspeed.settings import Settings
from flashmoe_megatron.adapters.gradients import LayerGradients, ReductionPlan


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
        optimizer=SimpleNamespace(reduce_bucket_size=7),
    )
    layer = SimpleNamespace(layer=0, backend=None, dtype=dtype, bound_of_tokens=64)
    layers: Any = [layer, layer]
    slices.size_buckets(engine, layers, None, Settings())
    size = dtype.itemsize
    assert engine.optimizer.reduce_bucket_size == (7 if given else 4096 // size)
    assert [one.own_bytes for one in planned] == [320 * size * (replicas > 1)] * 2
    assert [one.other_bytes for one in planned] == [300 * size] * 2
