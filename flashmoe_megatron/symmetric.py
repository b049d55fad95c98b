"""Symmetric memory: one allocation on every rank of a group, mapped into every other rank.

The only user of torch's symmetric-memory interface. NVLink multicast is never used and is switched
off before the first allocation.
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from flashmoe_megatron.errors import ConfigError, HeapError

SymmetricBackend = Literal["cuda", "nvshmem"]
_TORCH_NAMES: dict[str, Literal["CUDA", "NVSHMEM"]] = {"cuda": "CUDA", "nvshmem": "NVSHMEM"}


@dataclass(frozen=True)
class SymmetricAllocation:
    """One rank's view of a symmetric allocation.

    Attributes:
        local: This rank's bytes, ``[nbytes]`` uint8.
        addresses: Where each rank's bytes are mapped in this process, in rank order.
    """

    local: torch.Tensor
    addresses: tuple[int, ...]


def allocate(
    nbytes: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    backend: SymmetricBackend = "cuda",
) -> SymmetricAllocation:
    """Allocates zeroed symmetric memory. Collective over the group.

    Args:
        nbytes: The same on every rank.
        group: The ranks, ``None`` for one rank (then ordinary memory does).
        device: This rank's GPU.
        backend: "cuda" (GPUs of one host) or "nvshmem".

    Raises:
        ConfigError: The backend is unknown.
        HeapError: Some rank has too little memory; says how much was asked for and is free.
    """
    if backend not in _TORCH_NAMES:
        raise ConfigError(f"symmetric memory {backend!r}: wanted one of {', '.join(_TORCH_NAMES)}")
    _check_fits(nbytes, group, device)
    if group is None or dist.get_world_size(group) == 1:
        local = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return SymmetricAllocation(local, (local.data_ptr(),))

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
    import torch.distributed._symmetric_memory as symm_mem

    name = _TORCH_NAMES[backend]
    if symm_mem.get_backend(device) != name:  # the default one cannot be set by name
        symm_mem.set_backend(name)
    local = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(local, group)
    local.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody signals into memory that is still being zeroed
    return SymmetricAllocation(local, tuple(int(address) for address in handle.buffer_ptrs))


def _check_fits(nbytes: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Fails on every rank if any lacks the memory: a failure on one alone would hang the others."""
    free = torch.cuda.mem_get_info(device)[0] + (
        torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    )
    least = torch.tensor([free], dtype=torch.int64, device=device)
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    fits = int(least.item())
    if nbytes > fits:
        raise HeapError(
            f"the symmetric heap needs {nbytes} bytes on every GPU, the fullest has {fits} free: "
            "lower the micro-batch or sequence length (max_tokens), or topk"
        )
