"""Expert-parallel layers in models that DistributedDataParallel trains."""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from flashmoe_megatron.data_parallel import _problem, expert_parameters, prepare_for_ddp
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.expert_group import ExpertGroup, local_part
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.ranks import check_member
from tests.distributed import RankPool
from tests.unit import cases


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two processes that are all there are, since groups are made by all together."""
    with contextlib.closing(RankPool(2)) as pool:
        yield pool


HIDDEN, NUM_STEPS, TOKENS = 64, 10, 24


class Model(nn.Module):
    """Two expert layers between linear ones."""

    def __init__(self, num_ranks: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(8, HIDDEN)
        self.experts = nn.ModuleList(
            FlashMoELayer(
                cases.make_config(num_ranks=num_ranks),
                group=group,
                device="cpu",
                dtype=torch.float32,
                router=True,
                bias=True,
            )
            for _ in range(2)
        )
        self.last = nn.Linear(HIDDEN, 1)
        self.recomputes = False
        self.called = [0, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in (self.experts[index] for index in self.called):
            x = x + (checkpoint(layer, x, use_reentrant=True) if self.recomputes else layer(x))
        losses = self.last(x).square()
        return losses.mean() if len(losses) else losses.sum()


def batch(step: int, world: int, rank: int | None = None) -> torch.Tensor:
    """The tokens of a step, ``TOKENS`` of one rank or those of all."""
    x = torch.randn(world * TOKENS, 8, generator=cases.generator(step))
    return x if rank is None else x.chunk(world)[rank]


def expert_group(num_ranks: int) -> dist.ProcessGroup:
    """This rank's group of ``num_ranks``; collective over all ranks."""
    groups = [
        dist.new_group(list(range(first, first + num_ranks)))
        for first in range(0, dist.get_world_size(), num_ranks)
    ]
    return groups[dist.get_rank() // num_ranks]


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, of all experts; collective."""
    return {
        name: getattr(parameter, "full_tensor", parameter.clone)().detach()
        for name, parameter in model.named_parameters()
    }


def train_on_ranks(
    group: dist.ProcessGroup, num_ranks: int, accumulation: str
) -> dict[str, torch.Tensor]:
    """Trains with data parallelism over all ranks and expert parallelism over ``num_ranks``."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    experts = expert_group(num_ranks)
    model = Model(num_ranks, experts)
    with torch.no_grad():  # what the ranks drew may differ: rank 0 decides
        for parameter in model.parameters():
            local_part(parameter).mul_(1 if rank < num_ranks else 2)
    model.recomputes = accumulation == "recomputed"
    ddp = DistributedDataParallel(prepare_for_ddp(model, group), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        x = batch(step, world, rank)
        if accumulation in ("none", "recomputed"):
            ddp(x).backward()
        else:
            early, late = x.chunk(2)
            if accumulation == "no_sync":
                with ddp.no_sync():
                    (ddp(early) / 2).backward()
            else:  # reduced twice
                (ddp(early) / 2).backward()
            (ddp(late) / 2).backward()
        optimizer.step()
    return whole(model)


def train_alone(world: int) -> dict[str, torch.Tensor]:
    model = Model(1, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(batch(step, world)).backward()
        optimizer.step()
    return whole(model)


@pytest.mark.parametrize("accumulation", ["none", "no_sync", "twice", "recomputed"])
@pytest.mark.parametrize("world", [2, 4], ids=["ep2", "ep2 dp2"])
def test_ten_steps_are_those_of_one_process(
    ranks: RankPool, pair: RankPool, world: int, accumulation: str
):
    want = train_alone(world)
    before = whole(Model(1, None))
    for got in (pair if world == 2 else ranks).run(train_on_ranks, 2, accumulation):
        assert got.keys() == want.keys()
        for name, parameter in got.items():
            assert_close(name, parameter, want[name], rel_l2=1e-5)
            assert not torch.allclose(parameter, before[name], rtol=1e-3), name


def drop_layers(group: dist.ProcessGroup, called: list[list[int]]) -> dict[str, torch.Tensor]:
    """Gradients where each of the two replicas of a model calls layers of its own."""
    rank = dist.get_rank(group)
    model = Model(2, expert_group(2))
    ddp = DistributedDataParallel(
        prepare_for_ddp(model, group), process_group=group, find_unused_parameters=True
    )
    model.called = called[rank // 2]
    ddp(batch(0, 4, rank)).backward()
    return {
        name: getattr(one.grad, "full_tensor", one.grad.clone)()
        for name, one in model.named_parameters()
        if one.grad is not None
    }


@pytest.mark.parametrize("called", [[[0], [1]], [[0], [0, 1]], [[], [0]], [[0], [0]]])
def test_replicas_may_call_other_layers(ranks: RankPool, called: list[list[int]]):
    alone = Model(1, None)
    losses = []
    for part, layers in zip(batch(0, 4).chunk(2), called, strict=True):
        alone.called = layers
        losses.append(alone(part))
    torch.stack(losses).mean().backward()
    want = {name: one.grad for name, one in alone.named_parameters() if one.grad is not None}
    for got in ranks.run(drop_layers, called):
        assert got.keys() == want.keys()
        for name, grad in got.items():
            assert_close(name, grad, want[name], rel_l2=1e-5)


def train_frozen(group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """Trains beside frozen experts, of which fc2 is thawed for the later half of the steps."""
    model = Model(1, None) if group is None else Model(2, expert_group(2))
    for layer in model.experts:
        for _, parameter in layer.expert_parameters():
            parameter.requires_grad_(False)
    run = model if group is None else DistributedDataParallel(prepare_for_ddp(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        for layer in model.experts:
            layer.fc2.requires_grad_(step >= 2)
        optimizer.zero_grad()
        run(batch(step, 4, None if group is None else dist.get_rank(group))).backward()
        optimizer.step()
    return whole(model)


def test_frozen_experts_stay_and_thawed_ones_are_reduced(ranks: RankPool):
    want, before = train_frozen(None), whole(Model(1, None))
    for got in ranks.run(train_frozen):
        for name, parameter in got.items():
            assert_close(name, parameter, want[name], rel_l2=1e-5)
            is_frozen = "fc1" in name or "fc2_bias" in name
            assert torch.equal(parameter, before[name]) == is_frozen, name


def fail_once(group: dist.ProcessGroup) -> bool:
    """Whether gradients after a backward that has failed are those of a model without one."""
    rank, found = dist.get_rank(group), []
    experts = expert_group(2)
    for fails in (False, True):
        model = Model(2, experts)
        ddp = DistributedDataParallel(prepare_for_ddp(model, group), process_group=group)
        if fails:
            handle = model.first.weight.register_hook(refuse)
            with pytest.raises(ZeroDivisionError):
                ddp(batch(0, 4, rank)).backward()
            handle.remove()
            model.zero_grad()
            del ddp  # which does not go on, and whose hooks would count what a new one counts
            gc.collect()
            ddp = DistributedDataParallel(prepare_for_ddp(model, group), process_group=group)
        ddp(batch(1, 4, rank)).backward()
        found.append({name: local_part(one.grad) for name, one in expert_parameters(model)})
    return all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


def refuse(grad: torch.Tensor) -> torch.Tensor:
    """A hook of the first layer, whose gradient is the last to come."""
    raise ZeroDivisionError


def test_experts_are_reduced_behind_a_backward_that_has_failed(ranks: RankPool):
    assert ranks.run(fail_once) == [True] * 4


def step_with_experts_apart(group: dist.ProcessGroup) -> None:
    """Fused and scaled steps want the experts, which are DTensors, in an optimizer of their own."""
    plain, model = Model(2, group), Model(2, group)
    step_of(plain, group, [torch.optim.AdamW(plain.parameters())])
    experts = [one for _, one in expert_parameters(model)]
    others = [one for one in model.parameters() if not isinstance(one, DTensor)]
    assert len(experts) + len(others) == len(list(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for is_fused in (True, False):
        mixed = torch.optim.AdamW(model.parameters(), fused=is_fused)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            step_of(model, group, [mixed], None if is_fused else scaler)
    apart = [torch.optim.AdamW(each, fused=True) for each in (experts, others)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    step_of(model, group, apart, scaler)
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(name, local_part(got).detach(), local_part(want).detach(), rel_l2=1e-6)
    # What overflows in one rank's experts is skipped on all.
    before = [local_part(one).clone() for one in experts]
    step_of(model, group, apart, scaler, overflows=dist.get_rank(group) == 0)
    assert all(torch.equal(local_part(one), was) for one, was in zip(experts, before, strict=True))
    assert scaler.get_scale() == 1.0


def step_of(
    model: Model,
    group: dist.ProcessGroup,
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None = None,
    *,
    overflows: bool = False,
) -> None:
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    ddp = DistributedDataParallel(prepare_for_ddp(model, group), process_group=group)
    model.zero_grad()
    scaler.scale(ddp(batch(0, 2, dist.get_rank(group)))).backward()
    if overflows:
        local_part(model.experts[0].fc1.grad)[0, 0, 0] = torch.inf
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def join_uneven_batches(group: dist.ProcessGroup) -> None:
    """Join would have the rank with more batches wait for the other's part in its calls."""
    model, rank = prepare_for_ddp(Model(2, group), group), dist.get_rank(group)
    ddp = DistributedDataParallel(model, process_group=group)
    with Join([ddp]), pytest.raises(ConfigError, match=r"wanted no Join, .*\(x\[:0\]\)"):
        ddp(batch(0, 2, rank))
    ddp = DistributedDataParallel(model, process_group=group)  # the other one stays in Join
    ddp(batch(0, 2, rank)[: TOKENS if rank == 0 else 0]).backward()
    alone = Model(1, None)
    (alone(batch(0, 2, 0)) / 2).backward()
    for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
        grad = getattr(got.grad, "full_tensor", got.grad.clone)()
        assert_close(name, grad, want.grad, rel_l2=1e-5)


def train_parametrized(group: dist.ProcessGroup) -> None:
    """The experts are below a parametrization, whose own scale is a parameter as others are."""
    model, alone = Model(2, group), Model(1, None)
    for one in (model, alone):
        parametrize.register_parametrization(one.experts[0], "fc2", Scaled())
    ddp = DistributedDataParallel(prepare_for_ddp(model, group), process_group=group)
    ddp(batch(0, 2, dist.get_rank(group))).backward()
    alone(batch(0, 2)).backward()
    for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
        grad = getattr(got.grad, "full_tensor", got.grad.clone)()
        assert_close(name, grad, want.grad, rel_l2=1e-5)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        # torch multiplies no DTensor by a plain parameter.
        local = local_part(weight) * self.scale
        if not isinstance(weight, DTensor):
            return local
        return DTensor.from_local(local, weight.device_mesh, weight.placements)


def wrap_unprepared(group: dist.ProcessGroup) -> None:
    """Torch itself will not broadcast experts beside others; the layer sees to what is left."""
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        DistributedDataParallel(Model(2, group), process_group=group)
    ddp = DistributedDataParallel(Model(2, group), process_group=group, init_sync=False)
    with pytest.raises(ConfigError, match="those of rank 0: .*prepare_for_ddp"):
        ddp(batch(0, 2, dist.get_rank(group)))


def wrap_a_prepared_part(group: dist.ProcessGroup) -> None:
    """DistributedDataParallel reads names from the module that it wraps, not from within."""
    model = Model(2, group)
    for layer in model.experts:
        prepare_for_ddp(layer, group)
    ddp = DistributedDataParallel(model, process_group=group, init_sync=False)
    with pytest.raises(ConfigError, match="those of rank 0: .*prepare_for_ddp"):
        ddp(batch(0, 2, dist.get_rank(group)))


def broadcast_by_hand(group: dist.ProcessGroup) -> None:
    """Any engine that makes ranks equal is found out where it changed something."""
    model = Model(2, group)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(local_part(tensor).detach(), 0, group)
    layer = model.experts[0]
    if dist.get_rank(group) == 0:
        layer._check_experts()
    else:
        with pytest.raises(ConfigError, match="rank 1 has the experts of rank 0: .*prepare_for_dd"):
            layer._check_experts()
    layer.to_empty(device="cpu")  # which leaves anything in buffers
    layer._check_experts()


def copy_a_prepared_model(group: dist.ProcessGroup) -> None:
    """A copy has no hooks that would reduce its gradients."""
    model = prepare_for_ddp(prepare_for_ddp(Model(2, group), group), group)
    x = batch(0, 2, dist.get_rank(group))
    want = grads_of(model, x)
    once = grads_of(prepare_for_ddp(Model(2, group), group), x)
    assert all(torch.equal(one, other) for one, other in zip(want, once, strict=True))
    ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
    with pytest.raises(ConfigError, match="a copy of one that was prepared .*prepare_for_ddp"):
        ddp(x)


def grads_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).backward()
    return [local_part(parameter.grad) for parameter in model.parameters()]


def prepare_uneven_groups(group: dist.ProcessGroup) -> None:
    experts = expert_group(2)
    layers = nn.ModuleList()
    if dist.get_rank(group) < 2:
        config = cases.make_config(num_ranks=2)
        layers.append(FlashMoELayer(config, group=experts, device="cpu"))
    with pytest.raises(ConfigError, match=r"have \[1, 1, 0, 0\] expert-parallel groups"):
        prepare_for_ddp(layers, group)


def leave_out_what_the_user_says(group: dist.ProcessGroup) -> None:
    model = Model(2, group)
    left_out = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    left_out(model, ["last.weight"])
    ddp = DistributedDataParallel(prepare_for_ddp(model, group), process_group=group)
    ddp(batch(0, 2, dist.get_rank(group))).backward()
    for layer, is_shared in ((model.first, True), (model.last, False)):
        both = [torch.empty_like(layer.weight) for _ in range(2)]
        dist.all_gather(both, layer.weight.grad, group=group)
        assert torch.equal(*both) == is_shared


def give_a_mesh_of_two_dimensions(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    with pytest.raises(ConfigError, match=r"has 2 dimensions, wanted one, as mesh\[\"ep\"\] has"):
        ExpertGroup(mesh)
    assert ExpertGroup(mesh["dp"]).ranks == (0, 1)


@pytest.mark.parametrize(
    "function",
    [
        give_a_mesh_of_two_dimensions,
        wrap_unprepared,
        wrap_a_prepared_part,
        broadcast_by_hand,
        copy_a_prepared_model,
        leave_out_what_the_user_says,
    ],
)
def test_what_is_refused(pair: RankPool, function: Callable[[dist.ProcessGroup], None]):
    pair.run(function)


@pytest.mark.parametrize("function", [join_uneven_batches, train_parametrized])
def test_batches_and_experts_of_other_kinds(
    pair: RankPool, function: Callable[[dist.ProcessGroup], None]
):
    pair.run(function)


def evaluate_in_between(group: dist.ProcessGroup) -> None:
    """An evaluation without gradients, and without sync, between a forward and its backward."""
    model = Model(2, expert_group(2))
    ddp = DistributedDataParallel(prepare_for_ddp(model, group), process_group=group)
    x = batch(0, 4, dist.get_rank(group))
    loss = ddp(x)
    with torch.no_grad(), ddp.no_sync():
        ddp(x)
    loss.backward()
    for parameter in (one for _, one in expert_parameters(model)):
        own = local_part(parameter.grad)
        everyone = [torch.empty_like(own) for _ in range(4)]
        dist.all_gather(everyone, own, group=group)
        assert torch.equal(everyone[0], everyone[2])
        assert torch.equal(everyone[1], everyone[3])


def test_an_evaluation_before_a_backward_leaves_its_reduction(ranks: RankPool):
    ranks.run(evaluate_in_between)


def test_groups_of_experts_divide_the_ranks_evenly():
    """A mean over replicas would weigh those of a smaller group twice."""
    everyone = (0, 1, 2)
    told = [(everyone, [(0, 1)]), (everyone, [(0, 1)]), (everyone, [(2,)])]
    problem = _problem(everyone, told)
    assert problem is not None
    assert problem.startswith("the expert-parallel groups are [(0, 1), (2,)], wanted groups of one")
    four = (0, 1, 2, 3)
    assert _problem(four, [(four, [(rank // 2 * 2, rank // 2 * 2 + 1)]) for rank in four]) is None


def test_a_mesh_that_this_rank_is_not_in_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Those in it do not wait for this rank, which would wait for them."""
    mesh = DeviceMesh.__new__(DeviceMesh)
    monkeypatch.setattr(DeviceMesh, "__repr__", lambda _: "a mesh")
    for coordinate, is_member in (([0], True), (None, False)):
        monkeypatch.setattr(DeviceMesh, "get_coordinate", lambda _, found=coordinate: found)
        said = "" if is_member else "group=a mesh is no group of this rank"
        with contextlib.nullcontext() if is_member else pytest.raises(ConfigError, match=said):
            check_member(mesh)


def test_fused_and_scaled_steps(pair: RankPool):
    pair.run(step_with_experts_apart)


def test_other_layers_on_other_ranks_are_refused(ranks: RankPool):
    ranks.run(prepare_uneven_groups)


def test_without_a_process_group():
    with pytest.raises(ConfigError, match="no process group: wanted .*init_process_group"):
        prepare_for_ddp(Model(1, None))


def names_of_experts(group: dist.ProcessGroup) -> list[str]:
    return [name for name, _ in expert_parameters(Model(2, group))]


def marks_of_experts(group: dist.ProcessGroup) -> list[list[object]]:
    model = Model(2, group)
    marked = [name for name, one in model.named_parameters() if hasattr(one, "allreduce")]
    assert marked == [name for name, _ in expert_parameters(model)]
    moved = Model(2, group).to("meta").to_empty(device="cpu")
    return [
        [(one.allreduce, one.group_name) for _, one in expert_parameters(each)]
        for each in (model, moved, copy.deepcopy(model))
    ]


def test_marks_of_experts(ranks: RankPool):
    """By these Megatron's DDP and DeepSpeed's engine find experts."""
    marks = [[(False, "ep_size_2")] * 8] * 3
    assert ranks.run(marks_of_experts, num_ranks=2) == [marks] * 2
    assert not any(hasattr(one, "allreduce") for one in Model(1, None).parameters())


def test_names_of_experts(ranks: RankPool):
    kinds = ("fc1", "fc2", "fc1_bias", "fc2_bias")
    want = [f"experts.{layer}.{kind}" for layer in range(2) for kind in kinds]
    assert ranks.run(names_of_experts, num_ranks=2) == [want, want]
    assert not list(expert_parameters(Model(1, None)))
