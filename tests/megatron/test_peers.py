"""Ranks of an expert-parallel group that were given different things hear of it at once."""

from typing import Any

import pytest
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron import peers
from flashmoe_megatron.config import TILE_M
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.ranks import Ranks
from tests.distributed import PATIENCE_S, RankPool, renamed
from tests.megatron.harness import Layout, prepare, transformer_config
from tests.megatron.layers import make_layer

EP2 = Layout(expert=2)


def build(group: dist.ProcessGroup, dispatchers: list[str], timeout: float) -> str:
    """What a rank hears when it builds a layer with its dispatcher, "none" being no layer."""
    prepare(Layout())
    prepare(EP2, timeout=timeout)  # new groups: they know nothing of other tests' layers
    dispatcher = dispatchers[dist.get_rank()]
    said = ""
    try:
        if dispatcher == "none":
            Ranks(expert_group()).next_name()  # so that ranks give later groups one name
        else:
            make_layer(transformer_config(EP2, dispatcher))
    except ConfigError as error:
        said = str(error)
    dist.barrier()
    return said


def expert_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_expert_model_parallel_group()
    return group


def test_ranks_that_are_made_up_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run has one process for all ranks."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 8)
    monkeypatch.setattr(dist, "get_backend", lambda _: "fake")
    nobody: Any = "a group"
    peers.tell_dispatcher(nobody, "flashmoe")
    peers.check_dispatchers(nobody, timeout=0.0)


@pytest.mark.parametrize("flashmoe_rank", [0, 1])
def test_different_dispatchers_are_an_error(flashmoe_rank: int, two_ranks: RankPool) -> None:
    dispatchers = ["alltoall", "alltoall"]
    dispatchers[flashmoe_rank] = "flashmoe"
    said = two_ranks.run(build, dispatchers, PATIENCE_S)
    listed = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(dispatchers))
    wanted = f"different token dispatchers: {listed}; pass one --moe-token-dispatcher-type"
    assert wanted in said[flashmoe_rank]
    assert said[1 - flashmoe_rank] == ""


def test_a_rank_without_a_layer_is_not_waited_for_without_end(two_ranks: RankPool) -> None:
    said, _ = two_ranks.run(build, ["flashmoe", "none"], 1.0)
    assert (
        "ranks [1] of the expert-parallel group [0, 1] have built no MoE layer within 1 s" in said
    )
    assert "flashmoe_megatron installed on every host" in said


def build_in_a_group_of_any_name(group: dist.ProcessGroup) -> str:
    """What a rank hears when it builds a layer over ranks that name their group differently."""
    prepare(Layout())
    prepare(EP2, timeout=5.0)
    try:
        with renamed(expert_group(), f"any {dist.get_rank()}"):
            make_layer(transformer_config(EP2, "flashmoe"))
    except ConfigError as error:
        return str(error)
    return ""


def test_groups_may_have_any_name(two_ranks: RankPool) -> None:
    """As those of a program's mesh can."""
    assert two_ranks.run(build_in_a_group_of_any_name) == ["", ""]


def build_with(group: dist.ProcessGroup, settings: list[dict[str, Any]]) -> str:
    """What a rank hears when it builds a layer with its settings."""
    prepare(Layout())
    prepare(EP2, **settings[dist.get_rank()])
    try:
        make_layer(transformer_config(EP2, "flashmoe"))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            [{"calibration": "/of/rank/0.json"}, {}],
            "calibration: a file on rank 0, None on rank 1",
        ),
        ([{}, {"metrics": "none"}], "metrics: default on rank 0, none on rank 1"),
        ([{}, {"multipath": "auto"}], "multipath: off on rank 0, auto on rank 1"),
        # As many as an unbounded layer is made for, whose ranks agree on them in every call.
        (
            [{"max_tokens": TILE_M}, {"max_tokens": None}],
            f"max_tokens: {TILE_M} on rank 0, None on rank 1",
        ),
    ],
    ids=["calibration", "metrics", "multipath", "max_tokens"],
)
def test_different_settings_are_an_error_on_every_rank(
    settings: list[dict[str, Any]], told: str, two_ranks: RankPool
) -> None:
    said = two_ranks.run(build_with, settings)
    assert said == [f"the ranks disagree on {told}; wanted one value"] * 2


@pytest.mark.parametrize("dispatcher", ["flashmoe", "alltoall"])
def test_ranks_with_one_dispatcher_go_on(dispatcher: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(build, [dispatcher] * 2, PATIENCE_S) == ["", ""]
