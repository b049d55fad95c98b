"""Checkpoints of expert-parallel layers, read by other numbers of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.expert_group import local_part
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.reference.oracle import assert_close
from tests.distributed import RankPool
from tests.unit import cases

HIDDEN, TOKENS, NUM_STEPS = 64, 16, 10


class Model(nn.Module):
    """Experts behind a router of their own, which FSDP shards over all ranks."""

    def __init__(self, num_ranks: int, group=None) -> None:
        super().__init__()
        torch.manual_seed(num_ranks)
        self.router = nn.Linear(HIDDEN, 8)
        self.experts = make_layer(cases.make_config(num_ranks=num_ranks), group)
        self.last = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, idx = self.router(x).softmax(1).topk(2)
        return self.last(x + self.experts(x, idx, weight))


def make_layer(config: MoEConfig, group) -> FlashMoELayer:
    return FlashMoELayer(config, group=group, device="cpu", dtype=torch.float32, bias=True)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4 * TOKENS, HIDDEN, generator=cases.generator(step))


def train_sharded(group: dist.ProcessGroup, checkpoint: Path) -> torch.Tensor:
    """EP2 x FSDP2, saved; gives this rank's output."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    model = Model(2, mesh["ep"])
    fully_shard(model.experts, mesh=mesh["fsdp"])
    model.experts.set_gradient_divide_factor(4.0)  # by all ranks: a group's sum is in each rank's
    model.experts.set_force_sum_reduction_for_comms(True)  # gloo has no sums with a factor
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    # One model on all ranks, and the one that trains alone.
    model.load_state_dict(spread(Model(1).state_dict(), model.state_dict()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(batch(step).chunk(4)[dist.get_rank(group)]).square().mean().backward()
        optimizer.step()
    dcp.save(model.state_dict(), checkpoint_id=checkpoint)
    return model(batch(99).chunk(4)[dist.get_rank(group)]).detach()


def spread(plain: dict, like: dict) -> dict:
    """The values as the DTensors of a model have them."""
    return {
        name: distribute_tensor(plain[name], one.device_mesh, one.placements, src_data_rank=None)
        for name, one in like.items()
    }


def train_alone() -> nn.Module:
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    return model


def read_on_four(group: dist.ProcessGroup, checkpoint: Path) -> torch.Tensor:
    model = Model(4, group)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=checkpoint)
    model.load_state_dict(state)
    return model(batch(99).chunk(4)[dist.get_rank(group)]).detach()


def test_fsdp_trains_experts_and_other_numbers_of_ranks_read_them(ranks: RankPool, tmp_path: Path):
    want = train_alone()(batch(99)).detach()
    saved = torch.cat(ranks.run(train_sharded, tmp_path))
    assert_close("trained by EP2 x FSDP2", saved, want, rel_l2=1e-5)
    assert not torch.allclose(saved, Model(1)(batch(99)), rtol=1e-3)
    on_four = torch.cat(ranks.run(read_on_four, tmp_path))
    assert_close("read by EP4", on_four, saved, rel_l2=1e-6)
    alone = Model(1)
    state = alone.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    alone.load_state_dict(state)
    assert_close("read by EP1", alone(batch(99)), saved, rel_l2=1e-6)


def load_plain(group: dist.ProcessGroup) -> None:
    source, target = Model(1), Model(2, group)
    target.load_state_dict(source.state_dict())
    first = 4 * dist.get_rank(group)
    own = slice(first, first + 4)
    assert torch.equal(local_part(target.experts.fc1), source.experts.fc1[own])
    assert torch.equal(local_part(target.experts.fc2_bias), source.experts.fc2_bias[own])
    part = {name: local_part(value) for name, value in target.state_dict().items()}
    with pytest.raises(ConfigError, match=r"experts.fc1 has shape \(4, 128, 64\) and does not say"):
        target.load_state_dict(part)
    with pytest.raises(ConfigError, match="experts.fc1 is a DTensor of 2 ranks, wanted the plain"):
        source.load_state_dict(target.state_dict())


def test_plain_experts_are_taken_whole_alone(ranks: RankPool):
    ranks.run(load_plain, num_ranks=2)
