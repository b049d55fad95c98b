"""Experts that are trained on some ranks alone: refused by name without a hang, and the way out."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.errors import FlashMoEError
from tests.distributed import RankPool
from tests.megatron.harness import Layout, prepare, transformer_config
from tests.megatron.layers import make_layer
from tests.megatron.test_ddp_gradients import Model, tokens

SETTINGS: dict[str, dict[str, Any]] = {
    "reference": {},
    "keep_inputs": {"keep": "inputs"},
    "scheduled": {"backend": "scheduled", "degree": "2"},
}


def make_model(dispatcher: str, settings: dict[str, Any], *, overlap: bool) -> Any:
    """A layer behind Megatron's DDP of which nothing is trained but the experts of rank 0."""
    layout = Layout(expert=2)
    prepare(layout, **settings)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = transformer_config(layout, dispatcher, moe_aux_loss_coeff=0.0)
    model = Model([make_layer(config)])
    model.requires_grad_(False)
    if dist.get_rank() == 0:
        model.layers[0].experts.requires_grad_(True)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=overlap)
    return DistributedDataParallel(config, ddp_config, model)


def train(ddp: Any) -> list[torch.Tensor]:
    """Tokens that require a gradient on every rank: the gradients of what is trained."""
    ddp.zero_grad_buffer()
    x = tokens(2)
    ddp(x, 1).square().mean().backward()
    ddp.finish_grad_sync()
    trained = [each.main_grad.clone() for each in ddp.module.parameters() if each.requires_grad]
    assert bool(trained) == (dist.get_rank() == 0)
    assert x.grad is not None
    return [x.grad, *trained]


def tune_some_experts(
    group: dist.ProcessGroup, settings: dict[str, Any], overlap: bool
) -> tuple[list[str], float]:
    """What a rank is told, and the largest error of a gradient afterwards."""
    stock = make_model("alltoall", {}, overlap=False)
    with torch.no_grad():
        out = stock(tokens(1), 1)
    want = train(stock)
    ddp = make_model("flashmoe", settings, overlap=overlap)
    said = []
    got = ddp(tokens(1).detach(), 1)
    assert got.requires_grad == (dist.get_rank() == 0)
    torch.testing.assert_close(got, out)
    if got.requires_grad:
        with pytest.raises(FlashMoEError) as raised:
            got.square().mean().backward()
        said.append(str(raised.value))
    with pytest.raises(FlashMoEError) as raised:
        ddp(tokens(1).detach(), 1)
    said.append(str(raised.value))
    errors = [
        float((ours - theirs).norm() / (theirs.norm() or 1.0))
        for _ in range(2)
        for ours, theirs in zip(train(ddp), want, strict=True)
    ]
    return said, max(errors)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_experts_of_one_rank_alone(name: str, overlap: bool, two_ranks: RankPool) -> None:
    found = two_ranks.run(tune_some_experts, SETTINGS[name], overlap)
    assert [len(said) for said, _ in found] == [2, 1]
    for said, error in found:
        for text in said:
            assert text.startswith("rank 0: this rank has a backward of its experts")
            assert "none follows this forward on rank 1, where" in text
        assert error < 1e-6
