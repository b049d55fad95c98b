"""Layers of Megatron whose expert-parallel group is a wrapper that is destroyed and made again."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.oracle import assert_close
from tests.distributed import RankPool, refusal
from tests.megatron.harness import Layout, prepare, transformer_config
from tests.megatron.layers import make_layer
from tests.wrapped_groups import FORMS, unwrapping

EP2 = Layout(expert=2)
SHAPES: list[dict[str, Any]] = [{}, {}, {"moe_ffn_hidden_size": 128}]


def make(dispatcher: str, changes: dict[str, Any], group: Any = None) -> Any:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    groups = get_default_pg_collection()
    groups.ep = group or groups.ep
    return make_layer(transformer_config(EP2, dispatcher, **changes), groups=groups)


def step(layer: Any, seed: int) -> dict[str, torch.Tensor]:
    """The output of one call, and all gradients."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    x = torch.randn(16, 2, 64, generator=generator).requires_grad_()
    layer.zero_grad()
    out, _ = layer(x)
    (out.square().sum()).backward()
    grads = {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}
    return {"out": out, "grad of x": x.grad, **grads}


def called(group: dist.ProcessGroup, layer: Any) -> Any:
    x = torch.ones(16, 64)
    return layer.flashmoe_routed_experts(x, x[:, :8], x[:, :8] > 0)


def destroy_in_turn(wrapper: Any, cycle: int) -> None:
    """Has the ranks of a group destroy it one after the other, each told by the one before."""
    store, rank, first = dist.distributed_c10d._get_default_store(), dist.get_rank(), cycle % 2
    key = f"wrapped {cycle} {rank // 2} "
    if rank % 2 != first:
        store.wait([key + "destroyed"])
    wrapper.destroy()
    store.set(key + "destroyed", "")
    if rank % 2 == first:
        store.set(key + "seen", "")
    store.wait([key + "seen"])
    dist.barrier()
    store.delete_key(key + ("seen" if rank % 2 == first else "destroyed"))


def sleeps(group: dist.ProcessGroup, form: str, patch: str, backend: str) -> list[tuple[int, int]]:
    """How many backends there are, of how many groups, after each of three sleeps."""
    prepare(EP2, backend=backend)
    stock = [make("alltoall", changes) for changes in SHAPES]
    found = []
    with unwrapping() if patch == "patched" else contextlib.nullcontext():
        first = range(0, dist.get_world_size(), 2)
        wrapper = FORMS[form]([(rank, rank + 1) for rank in first])
        fused = [make("flashmoe", changes, wrapper) for changes in SHAPES]
        for cycle in range(4):
            if cycle:
                destroy_in_turn(wrapper, cycle)
                if cycle == 1:
                    said = refusal(group, called, fused[0])
                    assert "has been destroyed: wanted it to be made again" in said
                wrapper.reload()
            for ours, theirs in zip(reversed(fused), reversed(stock), strict=True):
                wanted, got = step(theirs, cycle), step(ours, cycle)
                assert got.keys() == wanted.keys()
                for name, value in got.items():
                    assert_close(f"{name}, cycle {cycle}", value, wanted[name], rel_l2=1e-5)
            routed = [layer.flashmoe_routed_experts for layer in fused]
            backends = {id(one.backend) for one in routed}
            found.append((len(backends), len({id(one._backends) for one in routed})))
        wrapper.destroy()
    return found


FOUND = [(2, 1)] * 4
"""A backend for each shape, and one owner of them."""


@pytest.mark.parametrize(
    ("form", "patch", "backend"),
    [("subclass", "patched", "reference"), ("delegate", "patched", "scheduled")],
)
def test_layers_match_alltoall_over_sleeps(
    form: str, patch: str, backend: str, two_ranks: RankPool
) -> None:
    assert two_ranks.run(sleeps, form, patch, backend) == [FOUND] * 2


def test_layers_of_two_groups_match_alltoall_over_sleeps(four_ranks: RankPool) -> None:
    assert four_ranks.run(sleeps, "nested", "patched", "scheduled") == [FOUND] * 4
