"""CUDA graphs around the experts' launch, with a stand-in for Transformer Engine's graphs."""

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from flashmoe_megatron import repeats
from flashmoe_megatron.adapters.megatron import schedule
from flashmoe_megatron.errors import RowBoundError
from flashmoe_megatron.kernel.captured import Captured
from tests.distributed import RankPool
from tests.megatron.harness import MEGATRON, Case, Layout
from tests.megatron.test_training import OVERLAP, OVERLAPPED

ALL_PARTS = ["attn", "moe_router", "moe_preprocess"]


def graphed(*parts: str) -> dict[str, Any]:
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": list(parts)}


CASES: dict[str, Case] = {
    **{
        "_".join(parts): Case(Layout(expert=2), config=graphed(*parts), graphs=1)
        for parts in (["moe_router"], ALL_PARTS[1:], ALL_PARTS)
    },
    **{
        f"keep_{keep}": Case(
            Layout(expert=2),
            config=graphed(*ALL_PARTS),
            graphs=1,
            ddp=OVERLAP,
            settings={"keep": keep},
        )
        for keep in ("preactivations", "inputs")
    },
    "shared_expert": Case(
        Layout(expert=2),
        config={**graphed(*ALL_PARTS), "moe_shared_expert_intermediate_size": 64},
        graphs=1,
    ),
    "shared_expert_beside": Case(
        Layout(expert=2),
        config={
            **graphed(*ALL_PARTS),
            "moe_shared_expert_intermediate_size": 64,
            "moe_shared_expert_overlap": True,
            "moe_shared_expert_gate": True,
        },
        graphs=1,
    ),
    "latent_experts_and_recomputed_norms": Case(
        Layout(expert=2),
        config={
            **graphed(*ALL_PARTS),
            "hidden_size": 128,
            "moe_latent_size": 64,
            "recompute_granularity": "selective",
            "recompute_modules": ["layernorm"],
        },
        graphs=1,
        settings={"keep": "preactivations"},
    ),
    **{
        f"overlapped_keep_{keep}": Case(
            Layout(expert=2),
            config={**graphed(*ALL_PARTS[1:]), **OVERLAPPED},
            later={"bf16": False},
            graphs=4,
            micro_batches=4,
            settings={"keep": keep},
        )
        for keep in ("all", "preactivations", "inputs")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_graphs_beside_the_launch_match_alltoall(name: str, two_ranks: RankPool) -> None:
    """A graph's outputs are written over by its next replay, and belong to others in between."""
    MEGATRON.compare(two_ranks, CASES[name])


def test_faults_of_replayed_launches_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay runs nothing of the layer on the host, which hears of a fault all the same."""
    found: list[Exception] = []

    def raise_pending_fault() -> None:
        if found:
            raise found.pop()

    class FullCudaGraphWrapper:
        cuda_graph: ClassVar[dict[str, Any]] = {}

        def __call__(self, fault: Exception | None = None) -> str:
            found.extend([fault] if fault else [])
            return "reduced losses"

    module = ModuleType("full_cuda_graph")
    module.FullCudaGraphWrapper = FullCudaGraphWrapper  # type: ignore[attr-defined]
    schedule.patch_full_graph(module)
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("for the replay"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    backend = SimpleNamespace(
        raise_pending_fault=raise_pending_fault, config=SimpleNamespace(num_ranks=1)
    )
    monkeypatch.setattr(schedule, "live_experts", lambda: [SimpleNamespace(backend=backend)])
    monkeypatch.setattr(repeats, "living_backends", lambda: [backend])
    step = FullCudaGraphWrapper()
    assert step() == "reduced losses"
    with pytest.raises(RowBoundError, match="during"):
        step(RowBoundError("during a replay"))
    found.append(RowBoundError("since the last one"))
    with pytest.raises(RowBoundError, match="since"):
        step()
    assert not waits
    backend.config.num_ranks = 2  # ranks hear of a fault in the same call
    assert step() == "reduced losses"
    assert len(waits) == 1


def test_graphs_are_dropped_at_exit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NCCL would wait for them in groups' destructors; a GPU that has failed does not matter."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(
        "atexit.register", lambda call, *args: at_exit.append(functools.partial(call, *args))
    )
    reset: list[str] = []

    def fail() -> None:
        raise RuntimeError("the GPU has failed")

    def graph(on_reset: Callable[[], None]) -> SimpleNamespace:
        return SimpleNamespace(reset=on_reset)

    class FullCudaGraphWrapper:
        curr_iteration: ClassVar[dict[str, int]] = {"training": 7}
        cuda_graph: ClassVar[dict[str, Any]] = {"training": graph(lambda: reset.append("one"))}
        result: ClassVar[dict[str, Any]] = {"training": "losses"}

        def __call__(self) -> None:
            raise AssertionError("not called here")

    module = ModuleType("full_cuda_graph")
    module.FullCudaGraphWrapper = FullCudaGraphWrapper  # type: ignore[attr-defined]
    schedule.patch_full_graph(module)
    (leave,) = at_exit
    leave()
    assert reset == ["one"]
    assert FullCudaGraphWrapper.cuda_graph == {"training": None}
    FullCudaGraphWrapper.cuda_graph["training"] = graph(fail)
    leave()
    assert "the GPU has failed" in caplog.text


def test_graphs_of_a_group_that_is_destroyed_are_captured_again() -> None:
    """A replay would run on memory that is no more; graphs without experts stay."""
    reset: list[str] = []
    graph = SimpleNamespace(reset=lambda: reset.append("training"))

    class FullCudaGraphWrapper:
        curr_iteration: ClassVar[dict[str, int]] = {"training": 7, "validation": 1}
        cuda_graph: ClassVar[dict[str, Any]] = {"training": graph, "validation": None}
        result: ClassVar[dict[str, Any]] = {"training": "losses", "validation": "others"}

        def __call__(self) -> None:
            for memory in (heap, other):
                memory.note_launch()

    module = ModuleType("full_cuda_graph")
    module.FullCudaGraphWrapper = FullCudaGraphWrapper  # type: ignore[attr-defined]
    module._shared_graph_pool = (0, 1)  # type: ignore[attr-defined]
    schedule.patch_full_graph(module)
    heap, other = Captured(), Captured()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "live_experts", list)
        patch.setattr(repeats, "living_backends", list)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        FullCudaGraphWrapper()()
        other.note_launch()  # in a graph of the user's
    assert heap.end()
    assert reset == ["training"]
    assert FullCudaGraphWrapper.cuda_graph == {"training": None, "validation": None}
    assert FullCudaGraphWrapper.result == {"training": None, "validation": "others"}
    assert FullCudaGraphWrapper.curr_iteration == {"training": 0, "validation": 1}
    assert module._shared_graph_pool is None  # else PyTorch refuses to capture into the old one
    assert not other.end()
    assert reset == ["training"]
