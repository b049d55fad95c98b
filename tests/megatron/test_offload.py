"""What a launch saves goes to the host's memory by Megatron's own manager, and comes back."""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters import megatron as adapter
from flashmoe_megatron.adapters.megatron.offload import unused_modules
from tests.distributed import RankPool
from tests.megatron.harness import MEGATRON, Case, Layout, prepare, train, transformer_config
from tests.side_by_side import Outcome

BOTH = ["expert_fc1", "moe_act"]
FC1, ACTIVATION = 64, 128
"""Widths of the inputs of an expert's first projection and of its activation."""


def offloaded(*modules: str) -> dict[str, Any]:
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(modules),
        "min_offloaded_tensor_size": 1,
    }


@pytest.mark.parametrize(
    ("keep", "modules", "widths", "hosts"),
    [
        ("all", BOTH, {FC1, ACTIVATION}, 1),
        ("all", BOTH, {FC1, ACTIVATION}, 2),
        ("all", BOTH[:1], {FC1}, 1),
        ("all", BOTH[1:], {ACTIVATION}, 1),
        ("preactivations", BOTH, {ACTIVATION}, 1),
        ("inputs", BOTH, set(), 1),
    ],
)
def test_what_is_offloaded_gives_the_same_training(
    keep: str, modules: list[str], widths: set[int], hosts: int, two_ranks: RankPool
) -> None:
    case = Case(
        Layout(expert=2),
        hosts=hosts,
        config={**offloaded(*modules), "moe_grouped_gemm": True, "bf16": True},
        later={"bf16": False},
        experts="te_grouped",
        settings={"keep": keep},
    )
    for stock, fused, got in two_ranks.run(trained_and_offloaded, case):
        MEGATRON.check(stock, fused, case)
        assert got == widths


def trained_and_offloaded(
    group: dist.ProcessGroup, case: Case
) -> tuple[Outcome, Outcome, set[int]]:
    """Both trainings, and the widths of what the second has moved."""
    prepare(case.layout, hosts=case.hosts)
    with _on_processors() as moved:
        stock = train(group, case, False)
        assert moved
        moved.clear()
        fused = train(group, case, True)
    return stock, fused, {tensor.shape[-1] for tensor in moved}


@contextlib.contextmanager
def _on_processors() -> Iterator[list[torch.Tensor]]:
    """Lets Megatron's manager run without CUDA; lists what it has copied."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    moved: list[torch.Tensor] = []
    original = offload.ChunkOffloadHandler.offload
    extension = "megatron.core.extensions.transformer_engine"

    def copy(handler: Any, tensor: torch.Tensor, **options: Any) -> Any:
        moved.append(tensor)
        return original(handler, tensor, **{**options, "pin_memory": False})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(offload.ChunkOffloadHandler, "offload", copy)
        patched.setattr(torch.Tensor, "record_stream", lambda *_: None)
        for name in ("range_push", "range_pop"):
            patched.setattr(torch.cuda.nvtx, name, lambda *_: None)
        module = sys.modules.get(extension) or ModuleType(extension)
        patched.setitem(sys.modules, extension, module)
        patched.setattr(module, "cpu_offload", ModuleType("cpu_offload"), raising=False)
        patched.setattr(module, "set_save_original_input", lambda _: None, raising=False)
        if hasattr(offload.ChunkOffloadHandler, "_can_manage_tensor_for_offload"):
            patched.setattr(
                offload.ChunkOffloadHandler,
                "_can_manage_tensor_for_offload",
                staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter)),
            )
        offload.PipelineOffloadManager.reset_instance()
        yield moved
        offload.PipelineOffloadManager.reset_instance()


@pytest.mark.parametrize(
    ("keep", "unused"), [("all", []), ("preactivations", BOTH[:1]), ("inputs", BOTH)]
)
def test_what_is_not_kept_is_not_offloaded(keep: Any, unused: list[str]) -> None:
    adapter.install()
    config = transformer_config(Layout(), "flashmoe")
    vars(config).update(offloaded(*BOTH, "core_attn"))
    said = list(unused_modules(config, keep))
    assert [line.split()[1] for line in said] == unused
    assert all(f"--flashmoe-keep {keep}, which keeps no input of it" in line for line in said)
    vars(config).update(offloaded("core_attn"))
    assert not list(unused_modules(config, keep))
