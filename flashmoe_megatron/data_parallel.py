"""Models with expert-parallel layers under DistributedDataParallel.

DistributedDataParallel gives every rank the parameters of rank 0 and averages gradients over all
ranks. Both are wrong for experts, which differ between the ranks of an expert-parallel group; their
replicas are in the other groups.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from flashmoe_megatron.config import check_class
from flashmoe_megatron.eager import eager
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.expert_group import local_part
from flashmoe_megatron.layer import PREPARE, RANK_BUFFER, FlashMoELayer
from flashmoe_megatron.ranks import OfGroup, Ranks, check_member


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that the ranks of an expert-parallel group do not share.

    Engines for data parallelism must not make them equal on all ranks.

    Yields:
        The names, as ``model.named_parameters()`` has them, and the parameters.
    """
    for name, layer in _spread_layers(model):
        for own, parameter in layer.expert_parameters():
            yield f"{name}.{own}" if name else own, parameter


def prepare_for_ddp(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Makes DistributedDataParallel train a model with expert-parallel layers right.

    Use it on the module that is wrapped: ``DistributedDataParallel(prepare_for_ddp(model))``.
    Collective over all ranks.

    Experts are made equal on their replicas, as other parameters are on all ranks. Their gradients
    are summed over the tokens of all ranks and divided by the number of ranks, at the end of a
    backward and in a fixed order, in the dtype that they have; within ``no_sync`` they are not
    reduced. Replicas may leave out layers of their own under ``find_unused_parameters=True``; else
    unused experts get gradients of zero.

    Args:
        model: The module to be wrapped, with its parameters on their devices.
        group: The group that DistributedDataParallel will get, by default all ranks.

    Raises:
        ConfigError: There is no process group, ranks have other layers, or the expert-parallel
            groups do not divide the ranks evenly. The group has not this rank: on this rank alone.
    """
    layers = list(_spread_layers(model))
    if not dist.is_initialized():
        raise ConfigError(
            "there is no process group: wanted torch.distributed.init_process_group before this"
        )
    check_member(group)
    ignored = [name for name, _ in expert_parameters(model)]
    ignored += [f"{name}.{RANK_BUFFER}" if name else RANK_BUFFER for name, _ in layers]
    ignored += [name for name in getattr(model, _IGNORED, ()) if name not in ignored]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        model, ignored
    )
    by_ranks = defaultdict(list)
    for _, layer in layers:
        if not _reducers_of(layer):
            by_ranks[layer.expert_group.ranks].append(layer)
    group = dist.distributed_c10d._get_default_group() if group is None else group
    for ranks, replicas in _make_replica_groups(list(by_ranks), group).items():
        _Reducer(by_ranks[ranks], replicas)
    for reducer in {hook for _, layer in layers for hook in _reducers_of(layer)}:
        reducer.follow(model)
    return model


_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute that names parameters to DistributedDataParallel, of the wrapped module alone."""


class _Reducer(OfGroup):
    """Reduces the gradients of the experts of layers of one group over the ranks that have them."""

    def __init__(self, layers: list[FlashMoELayer], replicas: dist.ProcessGroup) -> None:
        self._parameters = [one for layer in layers for _, one in layer.expert_parameters()]
        self._num_ranks = len(layers[0].expert_group.ranks)
        self._num_replicas = dist.get_world_size(replicas)
        self._group = replicas
        self._known = {id(parameter) for parameter in self._parameters}
        self._is_synchronous = self._may_be_unused = self._is_queued = False
        with torch.no_grad():
            for parameter in self._parameters:
                dist.broadcast(local_part(parameter), group=replicas, group_src=0)
        for layer in layers:
            layer.register_forward_pre_hook(self)
        for parameter in self._parameters:
            is_trained = parameter.requires_grad
            parameter.requires_grad_()  # for hooks, which stay if it is frozen and thawed
            parameter.register_hook(self._divide)  # type: ignore[no-untyped-call]
            if self._num_replicas > 1:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._queue
                )
            parameter.requires_grad_(is_trained)

    def follow(self, model: nn.Module) -> None:
        """Has a model's forwards say whether their backwards are to reduce gradients.

        Layers cannot: a checkpoint with reentry calls them without gradients, and once more in the
        backward, where DistributedDataParallel is not at work; and a rank that calls none of them
        reduces what its replicas have.
        """
        is_followed = self._note_forward in model._forward_pre_hooks.values()
        if self._num_replicas > 1 and not is_followed:
            model.register_forward_pre_hook(self._note_forward)
            model.register_forward_hook(self._note_outputs)

    def _note_forward(self, *_: Any) -> None:
        model = DistributedDataParallel._active_ddp_module
        if model is not None and torch.is_grad_enabled():
            self._is_synchronous = bool(model.require_backward_grad_sync)
            self._may_be_unused = bool(model.find_unused_parameters)
            self._is_queued = False  # also where a backward before has failed

    @eager  # a compiler would have to take the hooks of outputs along
    def _note_outputs(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        if DistributedDataParallel._active_ddp_module is None:
            return
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def __call__(self, layer: nn.Module, _: Any) -> None:
        """Refuses Join, and layers that were not prepared, before their forwards."""
        assert isinstance(layer, FlashMoELayer)
        model = DistributedDataParallel._active_ddp_module
        if model is not None and model._join_config.enable:
            raise ConfigError(
                "torch.distributed.algorithms.Join lets a rank without batches leave out its "
                "forwards, but the layer's calls need all ranks of its group: wanted no Join, and "
                "batches without tokens (x[:0]) on a rank that has no more, whose loss is 0"
            )
        if any(id(one) not in self._known for _, one in layer.expert_parameters()):
            raise ConfigError(
                "the layer is a copy of one that was prepared for DistributedDataParallel, or its "
                f"parameters were replaced since: wanted {PREPARE} after that"
            )

    def _divide(self, grad: torch.Tensor) -> torch.Tensor:
        """Makes a sum over the tokens of a group's ranks an average over these ranks.

        An average over replicas is then one over all ranks. An average may be taken again over
        gradients that were reduced and accumulated before; a sum may not.
        """
        return grad / self._num_ranks

    def _queue(self, _: torch.Tensor) -> None:
        """Has gradients reduced at the end of the backward that is under way."""
        if self._is_queued or not self._is_synchronous:
            return
        self._is_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        """Reduces the same gradients on all replicas, whichever layers each has called.

        A gradient that no replica has is left alone where DistributedDataParallel looks for unused
        parameters, which makes the host wait, too; else all parameters count as used.
        """
        self._is_queued = False
        trained = [one for one in self._parameters if one.requires_grad]
        if self._may_be_unused and trained:
            has_one = [one.grad is not None for one in trained]
            device = local_part(trained[0]).device
            is_used = torch.tensor(has_one, dtype=torch.int32, device=device)
            dist.all_reduce(is_used, dist.ReduceOp.MAX, group=self._group)
            trained = list(itertools.compress(trained, is_used.tolist()))
        grads = []
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(local_part(parameter.grad).div_(self._num_replicas))
        for work in [dist.all_reduce(grad, group=self._group, async_op=True) for grad in grads]:
            work.wait()


def _reducers_of(layer: FlashMoELayer) -> list[_Reducer]:
    return [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, _Reducer)]


def _spread_layers(model: nn.Module) -> Iterator[tuple[str, FlashMoELayer]]:
    check_class("the model", model, nn.Module, "a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, FlashMoELayer) and module.config.num_ranks > 1:
            yield name, module


def _make_replica_groups(
    mine: list[tuple[int, ...]], group: dist.ProcessGroup
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """The ranks that have the experts of this rank, for each of its expert-parallel groups.

    All ranks make all groups in one order, which is the form that torch.distributed wants.
    """
    everyone = Ranks(dist.group.WORLD).gather((tuple(dist.get_process_group_ranks(group)), mine))
    problems = [_problem(members, everyone) for members in sorted({one[0] for one in everyone})]
    if any(problems):
        raise ConfigError("; ".join(filter(None, problems)))
    found = {}
    for members in sorted({one[0] for one in everyone}):
        for index in range(len(everyone[members[0]][1])):
            groups = sorted({everyone[rank][1][index] for rank in members})
            for replicas in zip(*groups, strict=True):
                made = dist.new_group(replicas)
                if dist.get_rank() in replicas:
                    found[mine[index]] = made
    return found


def _problem(members: tuple[int, ...], everyone: list[Any]) -> str | None:
    """The error in the expert-parallel groups of data-parallel ranks, or None."""
    counts = [len(everyone[rank][1]) for rank in members]
    if len(set(counts)) > 1:
        return (
            f"ranks {members} have {counts} expert-parallel groups, wanted the same layers on all"
        )
    for index in range(counts[0]):
        groups = sorted({everyone[rank][1][index] for rank in members})
        covered = sorted(rank for one in groups for rank in one)
        if covered != sorted(members) or len({len(one) for one in groups}) > 1:
            return (
                f"the expert-parallel groups are {groups}, wanted groups of one size that divide "
                f"the data-parallel ranks {members}"
            )
    return None
