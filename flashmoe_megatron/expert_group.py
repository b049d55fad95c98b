"""The ranks that a layer's experts are spread over, and its parameters on them."""

from collections.abc import Hashable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.ranks import OfGroup, check_member
from flashmoe_megatron.torch_groups import is_destroyed, living_group, torch_group


class ExpertGroup(OfGroup):
    """An expert-parallel group as the owner of experts sees it.

    Attributes:
        given: The process group, or the wrapper of one, that it was made for.
        group: That group as torch knows it, ``None`` for one rank.
        ranks: Its processes' ranks among all.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None) -> None:
        """Takes a group or a mesh of one dimension.

        Raises:
            ConfigError: The mesh has several dimensions, or this rank is not in the group.
        """
        check_member(group)
        self._mesh: DeviceMesh | None = None
        self._owns_mesh = not isinstance(group, DeviceMesh)
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ConfigError(
                    f"the mesh of the experts has {group.ndim} dimensions, wanted one, as "
                    'mesh["ep"] has'
                )
            self._mesh, group = group, group.get_group()
        self.given = group
        self.group: dist.ProcessGroup | None = torch_group(group)
        self.rank = 0 if group is None else dist.get_rank(self.group)
        self.ranks = (0,) if group is None else tuple(dist.get_process_group_ranks(self.group))

    def follow(self) -> bool:
        """Takes the group that a wrapper has made again, if the last one has been destroyed.

        Returns whether it has been.

        Raises:
            ConfigError: The group has not been made again.
        """
        if not is_destroyed(self.group):
            return False
        self.group = living_group(self.given)
        if self._mesh is not None and self._owns_mesh:
            _mesh_of(self.group, self._mesh.device_type)  # which parameters have
        return True

    def parameter(self, local: torch.Tensor) -> nn.Parameter:
        """A parameter of all experts from this rank's, ``[num_local_experts, ...]``.

        It is the tensor itself, or on several ranks the ``[num_experts, ...]`` DTensor that the
        tensor is this rank's part of, so that checkpoints tell whose experts are in them.
        """
        if len(self.ranks) == 1:
            return nn.Parameter(local)
        if self._mesh is None:
            assert self.group is not None
            kind = local.device.type
            if local.is_meta:
                has_gpus = torch.device("cuda") in self.group._device_types
                kind = "cuda" if torch.cuda.is_available() and has_gpus else "cpu"
            self._mesh = _mesh_of(self.group, kind)
        return nn.Parameter(DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False))

    def mark(self, parameter: torch.Tensor) -> None:
        """Tells Megatron and DeepSpeed, by attributes they know, that ranks do not share it."""
        if len(self.ranks) > 1:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = f"ep_size_{len(self.ranks)}"  # type: ignore[attr-defined]

    def like(self, parameter: torch.Tensor, given: torch.Tensor, name: str) -> torch.Tensor:
        """Distributes a value of a checkpoint like a parameter of this group.

        Raises:
            ConfigError: It is some rank's part that does not say which, another rank's part, or a
                DTensor where one process has all experts.
        """
        if isinstance(given, DTensor):
            if isinstance(parameter, DTensor):
                return _placed_as(parameter, given, name)
            raise ConfigError(
                f"{name} is a DTensor of {given.device_mesh.size()} ranks, wanted the plain "
                "experts of one: call .full_tensor(), or load with torch.distributed.checkpoint"
            )
        if not isinstance(parameter, DTensor):
            return given
        if given.shape != parameter.shape:
            raise ConfigError(
                f"{name} has shape {tuple(given.shape)} and does not say whose experts it has, "
                f"wanted all in {tuple(parameter.shape)}, or the DTensors of a state_dict on "
                f"{len(self.ranks)} ranks"
            )
        return distribute_tensor(
            given, parameter.device_mesh, parameter.placements, src_data_rank=None
        )


def _placed_as(parameter: DTensor, given: DTensor, name: str) -> DTensor:
    """The same part of the same whole, on the mesh of a parameter.

    torch copies a DTensor's part whatever the place that it was saved from, and a mesh that comes
    out of a file is the one of the process that wrote it.
    """
    if given.device_mesh is parameter.device_mesh or given.shape != parameter.shape:
        return given  # torch distributes it as the parameter is, or says that the sizes differ
    part, own = _place(given), _place(parameter)
    if part != own:
        raise ConfigError(
            f"{name} has the part {part} of {tuple(parameter.shape)}, wanted this rank's, {own}: "
            "another rank has saved it, or another number of ranks. Save a state_dict on every "
            "rank, and load each rank's own on as many; or use torch.distributed.checkpoint; or "
            "save what get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) "
            "of torch.distributed.checkpoint.state_dict gives where all ranks call it, which has "
            "all experts"
        )
    return DTensor.from_local(
        local_part(given.detach()),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _place(tensor: DTensor) -> str:
    """This process's place in the whole, as an index that a reader knows."""
    if tensor.device_mesh.get_coordinate() is None:
        return "[]"  # a live mesh of other ranks
    return "[" + ", ".join(f"{one.start}:{one.stop}" for one in local_slices(tensor)) + "]"


_meshes: dict[tuple[Hashable, ...], DeviceMesh] = {}


def _mesh_of(group: dist.ProcessGroup, kind: str) -> DeviceMesh:
    """The mesh of all layers over the same ranks, which finds a group of them that is there.

    Parameters keep their mesh when a wrapper makes its group again. Further, torch remembers what
    it has found out for one mesh and uses it for every equal one, also one of a group that is gone.
    """
    made = DeviceMesh.from_group(group, kind)
    key = (*dist.get_process_group_ranks(group), dist.get_rank(), kind)
    mesh = _meshes.setdefault(key, made)
    try:
        mesh.get_group()
    except (RuntimeError, ValueError):  # it has been destroyed
        mesh._dim_group_names = made._dim_group_names
        if hasattr(made, "_pg_registry"):
            mesh._pg_registry = made._pg_registry
    return mesh


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's experts of a parameter or gradient; differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Returns where :func:`local_part` lies in the whole, also if FSDP has sharded it further."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    with torch.device("cpu"):  # torch counts with tensors on the default device, maybe on "meta"
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    ends = zip(chunk.offsets, chunk.sizes, strict=True)
    return tuple(slice(first, first + size) for first, size in ends)
