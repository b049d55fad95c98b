"""Checkpoints of expert-parallel layers, read by other numbers of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from flashmoe_megatron import prepare_for_ddp
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.expert_group import local_part
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.oracle import assert_close
from tests.distributed import RankPool, refusal
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


WAYS_OUT = ("on every rank", "torch.distributed.checkpoint;", "full_state_dict=True")


def pairs() -> DeviceMesh:
    """Two expert-parallel groups of two ranks; collective over four."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))


def model_of(seed: int, mesh: DeviceMesh) -> Model:
    """Experts by a seed on the ranks of a mesh of one dimension."""
    model = Model(mesh.size(), mesh)
    torch.manual_seed(seed)
    model.experts.reset_parameters()
    return model


def files_of(model: nn.Module, folder: Path, name: str) -> list[Path]:
    """Every rank's own file, as torch.save writes it; collective."""
    paths = [folder / f"{name}{rank}.pt" for rank in range(dist.get_world_size())]
    torch.save(model.state_dict(), paths[dist.get_rank()])
    dist.barrier()
    return paths


def load_file(_: object, model: nn.Module, file: Path, **options: Any) -> None:
    # torch 2.11 does not count the placements of FSDP's DTensors among weights.
    model.load_state_dict(torch.load(file, weights_only=False), **options)


def load_behind_ddp(group: dist.ProcessGroup, model: nn.Module, file: Path) -> None:
    load_file(group, DistributedDataParallel(prepare_for_ddp(model)).module, file)


def load_assigned(group: dist.ProcessGroup, model: nn.Module, file: Path) -> None:
    load_file(group, model, file, assign=True)


def load_laxly(group: dist.ProcessGroup, model: nn.Module, file: Path) -> None:
    load_file(group, model, file, strict=False)


def load_by_torch(_: object, model: nn.Module, file: Path) -> None:
    set_model_state_dict(model, torch.load(file, weights_only=False))


LOADS = (load_file, load_assigned, load_laxly, load_behind_ddp, load_by_torch)


def load_files_of_others(
    group: dist.ProcessGroup, folder: Path, load: Callable[..., None]
) -> list[str]:
    """Loads the file of each of the first two ranks in all four; gives what each load says."""
    mesh, rank = pairs(), dist.get_rank(group)
    source = model_of(0, mesh["ep"])
    said = []
    for number, file in enumerate(files_of(source, folder, "pairs")[:2]):
        target = model_of(1, mesh["ep"])
        before = local_part(target.experts.fc1).clone()
        said.append(refusal(group, load, target, file))
        want = local_part(source.experts.fc1) if rank % 2 == number else before
        assert torch.equal(local_part(target.experts.fc1), want)
    target = model_of(1, mesh["ep"])
    load(group, target, folder / f"pairs{rank % 2}.pt")
    x = batch(rank)
    assert torch.equal(target(x), source(x))
    # The mesh is this group's, and not one of those who wrote the file.
    assert torch.equal(target.experts.fc2.full_tensor(), source.experts.fc2.full_tensor())
    return said


def load_what_other_pairs_have_saved(group: dist.ProcessGroup, folder: Path) -> None:
    """Pairs of ranks 0 and 2, and of 1 and 3, have saved what ranks 0 and 1, and 2 and 3, share."""
    mesh, rank = pairs(), dist.get_rank(group)
    source = model_of(0, mesh["fsdp"])
    files_of(source, folder, "strided")
    for load in (load_file, load_assigned):
        target = model_of(1, mesh["ep"])
        if rank in (0, 3):  # the halves that they have in both meshes
            load(group, target, folder / f"strided{rank}.pt")
        ranks = dist.get_process_group_ranks(target.experts.fc2.device_mesh.get_group())
        assert ranks == [rank - rank % 2, rank - rank % 2 + 1]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
def test_a_file_of_another_rank_is_refused(
    ranks: RankPool, tmp_path: Path, load: Callable[..., None]
):
    for rank, said in enumerate(ranks.run(load_files_of_others, tmp_path, load)):
        assert said[rank % 2] == "no error"
        error = said[1 - rank % 2]
        parts = ["[0:4, 0:128, 0:64]", "[4:8, 0:128, 0:64]"]
        theirs, own = reversed(parts) if rank % 2 == 0 else parts
        assert error.startswith("ConfigError: ")
        assert f"experts.fc1 has the part {theirs} of (8, 128, 64), wanted this rank's" in error
        assert f"{own}: another rank has saved it" in error
        assert all(words in error for words in WAYS_OUT)


def test_experts_of_a_file_are_on_the_mesh_of_their_layer(ranks: RankPool, tmp_path: Path):
    ranks.run(load_what_other_pairs_have_saved, tmp_path)


def load_where_files_are_right(group: dist.ProcessGroup, folder: Path) -> None:
    """Takes each of the ways out that the error names, where one rank writes the only file."""
    mesh, file = pairs(), folder / "whole.pt"
    source = model_of(0, mesh["ep"])
    state = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank(group) == 0:
        torch.save(state, file)
    dist.barrier()
    for load in LOADS:
        target = model_of(1, mesh["ep"])
        load(group, target, file)
        assert torch.equal(target.experts.fc1.full_tensor(), source.experts.fc1.full_tensor())


def test_a_file_of_all_experts_is_loaded_by_all_ranks(ranks: RankPool, tmp_path: Path):
    ranks.run(load_where_files_are_right, tmp_path)


def sharded(seed: int, mesh: DeviceMesh) -> Model:
    model = model_of(seed, mesh["ep"])
    fully_shard(model.experts, mesh=mesh["fsdp"])
    return model


def load_files_of_shards(group: dist.ProcessGroup, folder: Path) -> list[str]:
    mesh = pairs()
    source = sharded(0, mesh)
    files = files_of(source, folder, "shards")
    said = [refusal(group, load_file, sharded(1, mesh), file) for file in files]
    target = sharded(1, mesh)
    load_file(group, target, files[dist.get_rank(group)])
    assert torch.equal(target.experts.fc1.full_tensor(), source.experts.fc1.full_tensor())
    wide = model_of(1, init_device_mesh("cpu", (4,)))
    narrow = files_of(model_of(0, mesh["ep"]), folder, "pairs")[0]
    return [*said, refusal(group, load_file, wide, narrow)]


def test_with_fsdp_both_dimensions_count_and_so_do_sizes(ranks: RankPool, tmp_path: Path):
    places = ["0:2", "4:6", "2:4", "6:8"]
    for rank, said in enumerate(ranks.run(load_files_of_shards, tmp_path)):
        for other, place in enumerate(places):
            want = f"has the part [{place}, 0:128, 0:64]" if other != rank else "no error"
            assert want in said[other]
        assert f"[0:4, 0:128, 0:64] of (8, 128, 64), wanted this rank's, [{2 * rank}:" in said[4]


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def load_parametrized(group: dist.ProcessGroup, folder: Path) -> str:
    """A parametrization has the experts in a module of its own, which torch loads."""
    mesh = pairs()
    model = model_of(0, mesh["ep"])
    parametrize.register_parametrization(model.experts, "fc2", Doubled())
    files = files_of(model, folder, "doubled")
    load_file(group, model, files[dist.get_rank(group) % 2])
    key = "experts.parametrizations.fc2.original"
    alone = {key: torch.load(files[0], weights_only=True)[key]}
    return refusal(group, lambda _: model.load_state_dict(alone, strict=False))


def test_parametrized_experts_of_another_rank_are_refused(ranks: RankPool, tmp_path: Path):
    for rank, said in enumerate(ranks.run(load_parametrized, tmp_path)):
        want = "no error" if rank % 2 == 0 else "experts.parametrizations.fc2.original has the part"
        assert want in said
