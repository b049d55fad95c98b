"""Hosts ahead of the GPU hear of an error in one call, and the group goes on in step.

Ranks are threads with streams of their own. All backwards of a GPU run on one thread of autograd,
so that none may wait for another rank's: ``keep="inputs"`` is tested on simulated GPUs alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from flashmoe_megatron.config import Keep
from tests.gpu.virtual import VirtualGroup, VirtualLayer, device, streams
from tests.unit import in_step
from tests.unit.in_step import BAD, CONFIG, RANKS, Rank, check_in_step

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


class OnStream(Rank):
    """A rank whose launches are on its own stream."""

    def run(self) -> None:
        with torch.cuda.stream(streams()[self.rank]):
            super().run()


def load_operators() -> None:
    """Runs what a call without a result needs of torch, before any rank waits for another."""
    x = torch.ones(4, 64, device=device(), dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        one = torch.full_like(x.to(dtype), torch.nan).requires_grad_()
        (one.mean() * one.to(torch.bfloat16)).sum().backward()
        one.new_full((4, 2), torch.nan, dtype=torch.float32)
    for change, _ in BAD.values():
        call = {
            "x": x,
            "topk_idx": torch.arange(2, device=device()).repeat(4, 1),
            "topk_weight": torch.ones(4, 2, device=device()),
        }
        call = change(call)
        if isinstance(call["topk_idx"], torch.Tensor):
            ids = call["topk_idx"]
            ((ids < -1) | (ids >= 6)).nonzero()
            ids.sort(1).values.diff(dim=1).eq(0).nonzero()
            (call["topk_weight"].isnan() & (ids >= 0)).nonzero()
    torch.cuda.synchronize()


def run_on_streams(layer: VirtualLayer, ranks: Sequence[OnStream]) -> None:
    """Makes the layer's memory and tables, and runs the ranks side by side to their end."""
    layer.prepare()
    for backend, one in zip(layer.backends, ranks, strict=True):
        backend._use_weights(one.weights)
    torch.cuda.synchronize()
    in_step.run_ranks(list(ranks))
    torch.cuda.synchronize()


@pytest.mark.parametrize("keep", ["all", "preactivations"])
@pytest.mark.parametrize("name", BAD)
def test_all_raise_in_one_call(name: str, keep: Keep) -> None:
    change, message = BAD[name]
    load_operators()
    group = VirtualGroup(RANKS)
    group.options = replace(group.options, row_bound=2.0)
    layer = VirtualLayer(CONFIG, group, is_guarded=False)
    ranks = []
    for rank, backend in enumerate(layer.backends):
        backend.keep = keep
        wait = streams()[rank].synchronize
        ranks.append(OnStream(backend, change, wait, device=device()))
    run_on_streams(layer, ranks)
    check_in_step(list(ranks), message)
