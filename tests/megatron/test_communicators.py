"""Collectives that run concurrently with launches fit into what these leave."""

import importlib
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_megatron.adapters.megatron.config import communicators
from flashmoe_megatron.adapters.megatron.config.communicators import limits, most_ctas, patch_groups
from flashmoe_megatron.adapters.megatron.config.notices import find_notices
from tests.megatron.test_notices import FLASHMOE, parse

OTHERS = """
cp embd ep ep_tp expt_gtp_remat gtp_remat hcp mp pos_embd pp tp tp_cp tp_dp tp_dp_cp
tp_ep_gtp_remat_pp tp_ep_mp tp_ep_pp
"""
"""Groups whose collectives a host waits for, or orders, before it launches."""


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("NCCL_MAX_CTAS", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)


def arguments(line: str = "", **others: Any) -> Any:
    """The script's, of a training that reduces gradients concurrently."""
    sizes = {"expert_model_parallel_size": 2, "world_size": 2, "overlap_grad_reduce": True}
    return parse(f"{FLASHMOE} {line}", **(sizes | others))


@pytest.mark.parametrize(
    ("line", "others", "most"),
    [
        ("", {}, 4),
        ("", {"world_size": 4}, 2),  # gradients of experts are reduced, too
        ("", {"world_size": 4, "pipeline_model_parallel_size": 2}, 4),
        ("--flashmoe-reserved-sms 16", {}, 16),
        ("--flashmoe-reserved-sms 1", {"world_size": 4}, 0),
        ("--flashmoe-backend reference", {}, None),
        ("", {"expert_model_parallel_size": 1}, None),
        ("", {"overlap_grad_reduce": False}, None),
        ("", {"moe_token_dispatcher_type": "alltoall"}, None),
    ],
)
def test_how_much_fits(line: str, others: dict[str, Any], most: int | None) -> None:
    assert most_ctas(arguments(line, **others)) == most


def test_one_hardware_queue_needs_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert most_ctas(arguments()) is None
    assert limits(arguments(), "dp") == {}


@pytest.mark.parametrize(
    ("line", "allowed", "world_size", "said"),
    [
        ("", "", 2, "get 4 CTAs of NCCL"),
        ("", "", 4, "get 2 CTAs of NCCL"),
        ("", "16", 2, "NCCL_MAX_CTAS=16 allows it more CTAs"),
        ("", "4", 2, None),
        ("", "4", 4, "NCCL_MAX_CTAS=4 allows it more CTAs"),
        ("", "2", 4, None),
        ("--flashmoe-reserved-sms 16", "16", 2, None),
        ("--flashmoe-reserved-sms 0", "", 2, "it has no room"),
    ],
)
def test_the_start_says_what_they_get(
    line: str, allowed: str, world_size: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MAX_CTAS", allowed)
    args = arguments(line, world_size=world_size)
    told = [notice for notice in find_notices(args) if "--overlap-grad-reduce" in notice]
    assert len(told) == (said is not None)
    assert said is None or said in told[0]
    args.overlap_grad_reduce = False
    assert not any("--overlap-grad-reduce" in notice for notice in find_notices(args))


def test_communicators_of_megatron_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Megatron's own function; what its file says for a group goes before."""
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    monkeypatch.setattr(parallel_state, "get_nccl_options", parallel_state.get_nccl_options)

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()

    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
    patch_groups(parallel_state)
    script = ModuleType("megatron.training.global_vars")
    vars(script)["_GLOBAL_ARGS"] = arguments(world_size=4)
    monkeypatch.setitem(communicators.sys.modules, script.__name__, script)

    def config(group: str, given: dict[str, dict[str, int]]) -> dict[str, int] | None:
        options = parallel_state.get_nccl_options(group, given)
        return None if options is None else vars(options.config)

    given = {"dp_cp": {"max_ctas": 1}, "tp": {"max_ctas": 8}}
    for group in (*communicators.OF_OTHERS, *communicators.OF_EXPERTS, *communicators.OF_BOTH):
        assert config(group, {}) == {"max_ctas": 2, "cga_cluster_size": 1}
    assert config("dp_cp", given) == {"max_ctas": 1, "cga_cluster_size": 1}
    assert config("tp", given) == {"max_ctas": 8}
    assert config("tp", {}) is None
    assert given == {"dp_cp": {"max_ctas": 1}, "tp": {"max_ctas": 8}}
    vars(script)["_GLOBAL_ARGS"] = arguments(moe_token_dispatcher_type="alltoall")
    assert config("dp", {}) is None
    vars(script)["_GLOBAL_ARGS"] = None
    assert config("dp", {}) is None


def test_every_group_of_megatron_is_known() -> None:
    """A release with another group is noticed."""
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    text = Path(str(parallel_state.__file__)).read_text()
    names = set(re.findall(r"""get_nccl_options\(\s*["'](\w+)["']""", text))
    ours = {*communicators.OF_OTHERS, *communicators.OF_EXPERTS, *communicators.OF_BOTH}
    assert {"dp", "dp_cp", "ep_dp"} <= names
    assert names <= {*ours, *OTHERS.split()}
