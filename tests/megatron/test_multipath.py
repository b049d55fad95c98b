"""Megatron's gathers of parameters and reductions of gradients over several links."""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron.buckets import links
from flashmoe_megatron.adapters.megatron.config.notices import find_notices
from flashmoe_megatron.errors import ConfigError, LinkError
from flashmoe_megatron.multipath import LinkTotals, Multipath
from tests.distributed import RankPool, refusal
from tests.megatron.harness import Case, Layout, prepare, train, transformer_config

EP2_DP2 = Layout(expert=2)
DDP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def over_links(group: dist.ProcessGroup, case: Case) -> tuple[list[float], int, set[int]]:
    """Trains with all buckets over the links of CPUs.

    Returns:
        The losses, how many exchanges went over the links, and how many ranks reduced so.
    """
    links._least_bytes = 1
    reducing: set[int] = set()

    def reduced(one: Multipath, *args: Any) -> Any:
        reducing.add(one.num_ranks)
        return reduce_scatter(one, *args)

    reduce_scatter = Multipath.reduce_scatter
    Multipath.reduce_scatter = reduced
    try:
        losses = train(group, case, True).losses
        # Buckets have been offered to peers to write to, which these links refuse.
        assert not any(one._can_share for one in links._made.values())
        assert all(one._watchdog is not None for one in links._made.values())
        number = sum(one.transfers._number for one in links._made.values())
        return losses, number, reducing
    finally:
        Multipath.reduce_scatter = reduce_scatter
        links._least_bytes = links.MIN_BYTES
        for one in links._made.values():
            one.close()
        links._made.clear()


@pytest.mark.parametrize("ddp", [DDP, {}], ids=["overlapped", "in turn"])
def test_losses_are_those_of_one_link(ddp: dict, four_ranks: RankPool) -> None:
    plain = four_ranks.run(train, Case(EP2_DP2, ddp=ddp), True)
    settings = {"multipath": "auto", "multipath_watch": 300.0}
    case = Case(EP2_DP2, ddp=ddp, settings=settings)
    for found, want in zip(four_ranks.run(over_links, case), plain, strict=True):
        losses, number, reducing = found
        torch.testing.assert_close(losses, want.losses, rtol=1e-4, atol=1e-4)
        assert number > 0
        assert reducing == {2}, "NCCL reduces the gradients of four ranks in less time"


def wrapped(group: dist.ProcessGroup, choices: list[str]) -> str:
    """Wraps a model on ranks with their own choice; returns the error."""
    prepare(Layout(), multipath=choices[dist.get_rank()])
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = transformer_config(Layout(), "flashmoe")
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = torch.nn.Linear(2, 2)
    return refusal(group, lambda _: DistributedDataParallel(config, ddp_config, model))


def test_ranks_that_share_buckets_agree(four_ranks: RankPool) -> None:
    """Also without a MoE layer, as on a stage of dense ones."""
    said = four_ranks.run(wrapped, ["auto", "off", "auto", "auto"])
    told = "multipath: auto on rank 0, off on rank 1, auto on rank 2, auto on rank 3"
    assert said == [f"ConfigError: the ranks disagree on {told}; wanted one value"] * 4


def test_small_buckets_go_as_before(four_ranks: RankPool) -> None:
    case = Case(EP2_DP2, ddp=DDP, settings={"multipath": "auto"})
    plain = four_ranks.run(train, Case(EP2_DP2, ddp=DDP), True)
    for one, want in zip(four_ranks.run(train, case, True), plain, strict=True):
        assert one.losses == want.losses


def of_groups(group: dist.ProcessGroup) -> None:
    """Asks for the links of a group that is destroyed then, and of another one."""
    tensor = torch.ones(4)
    first, second = (dist.new_group(backend="gloo") for _ in range(2))
    gone = links._multipath(first, tensor)
    dist.destroy_process_group(first)
    there = links._multipath(second, tensor)
    try:
        with pytest.raises(LinkError, match="has been closed"):
            gone.all_reduce(tensor)
        assert list(links._made.values()) == [there]
    finally:
        links._made.pop(second).close()
        dist.destroy_process_group(second)


def test_parameters_in_the_memory_of_gradients_are_not_shared() -> None:
    """Megatron gives that back while others generate."""
    shared, own = torch.zeros(8), torch.zeros(4)
    for bucket, is_own in (
        (SimpleNamespace(param_data=own, grad_data=shared), True),
        (SimpleNamespace(param_data=shared[:4], grad_data=shared), False),
        (SimpleNamespace(param_data=None, grad_data=shared), False),
    ):
        given = own if bucket.param_data is None else bucket.param_data
        assert links._has_own_memory(bucket, given) == is_own


def test_links_of_all_groups_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"peer": LinkTotals(1, 2, 0.5), "host": LinkTotals(4, 8, 1.0)}
    other = {"peer": LinkTotals(10, 20, 0.25)}
    groups = {
        name: SimpleNamespace(take_totals=lambda totals=totals: totals)
        for name, totals in (("a group", one), ("another", other))
    }
    monkeypatch.setattr(links, "_made", groups)
    assert links.take_link_totals() == {
        "peer": LinkTotals(11, 22, 0.75),
        "host": LinkTotals(4, 8, 1.0),
    }


def test_one_rank_has_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has all of a bucket copies it, as Megatron does."""
    monkeypatch.setattr(links, "_least_bytes", 16)
    for num_ranks, length, is_large in ((1, 4, False), (2, 4, True), (2, 3, False)):
        monkeypatch.setattr(dist, "get_world_size", lambda _, n=num_ranks: n)
        assert links._is_large(torch.ones(length), "a group") == is_large


def test_links_end_with_their_group(four_ranks: RankPool) -> None:
    four_ranks.run(of_groups)


def test_what_has_no_effect_or_meaning_is_said() -> None:
    args = argparse.Namespace(
        moe_token_dispatcher_type="flashmoe",
        num_experts=8,
        flashmoe_multipath="auto",
        use_distributed_optimizer=False,
    )
    (notice,) = find_notices(args)
    assert notice.startswith("--flashmoe-multipath is without effect")
    assert notice.endswith("wanted --use-distributed-optimizer")
    args.use_distributed_optimizer = True
    args.flashmoe_multipath_watch = 30.0
    assert not list(find_notices(args))
    args.flashmoe_multipath = "off"
    (notice,) = find_notices(args)
    assert notice.startswith("--flashmoe-multipath-watch is without effect: nothing goes over")
    from flashmoe_megatron.adapters.megatron import Settings

    with pytest.raises(ConfigError, match="--flashmoe-multipath 'on': wanted one of auto, off"):
        Settings(multipath="on")
