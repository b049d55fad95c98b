"""Symmetric memory: one allocation on every rank of a group, mapped into every other rank.

The only user of torch's symmetric-memory interface. NVLink multicast is never used and is switched
off before the first allocation.
"""

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from flashmoe_megatron import driver
from flashmoe_megatron.errors import ConfigError, HeapError
from flashmoe_megatron.options import SymmetricMemory
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.streams import Stamp

LINK_TRIAL_BYTES = 32 * 2**20
"""Bytes copied to measure a link: so many that the begin of the first copy counts for little."""
MOST_LINK_COPIES = 32
"""In how many copies at most. A heap that would take more tells nothing, since copies that small
last as long as their begins."""
TRIAL_BYTES = 2 * 2**20

_TORCH_NAMES: dict[SymmetricMemory, Literal["CUDA", "NVSHMEM"]] = {
    "cuda": "CUDA",
    "nvshmem": "NVSHMEM",
}


@dataclass(frozen=True)
class SymmetricAllocation:
    """One rank's view of a symmetric allocation.

    Attributes:
        local: This rank's bytes, ``[nbytes]`` uint8.
        addresses: Where each rank's bytes are mapped in this process, in rank order.
        link_bytes_per_s: How fast another rank's bytes come while all ranks fetch some, at the
            slowest rank; 0 where there is no other rank, or too small a heap or, on some rank, too
            little memory to tell.
    """

    local: torch.Tensor
    addresses: tuple[int, ...]
    link_bytes_per_s: float = 0.0


def allocate(
    nbytes: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    kind: SymmetricMemory = "cuda",
    obstacle: Exception | None = None,
) -> SymmetricAllocation:
    """Allocates zeroed symmetric memory. Collective over the group.

    Args:
        nbytes: The same on every rank.
        group: The ranks, ``None`` for one rank (then ordinary memory does).
        device: This rank's GPU.
        kind: "cuda" (GPUs of one host) or "nvshmem".
        obstacle: Why this rank has no use for the memory: then no rank gets any.

    Raises:
        ConfigError: The kind is unknown.
        HeapError: Some rank has too little memory, or an obstacle; says how much was asked for and
            is free.
    """
    if kind not in _TORCH_NAMES:
        raise ConfigError(f"symmetric memory {kind!r}: wanted one of {', '.join(_TORCH_NAMES)}")
    ranks = Ranks(group)
    torch.cuda.empty_cache()  # what torch has cached is not there for symmetric memory
    free = torch.cuda.mem_get_info(device)[0] if obstacle is None else 0
    least = _least(free, ranks, device)
    if nbytes > least:
        raise _too_little(nbytes, least) from obstacle
    if ranks.num_ranks == 1:
        local = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return SymmetricAllocation(local, (local.data_ptr(),))

    symm_mem = _interface(kind, device)
    problem = None
    try:
        local = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        problem = error
    # A rank that fails alone would leave the others waiting for it.
    if not _least(int(problem is None), ranks, device):
        raise _too_little(nbytes, least) from problem
    assert ranks.group is not None
    handle = symm_mem.rendezvous(local, ranks.group)
    local.zero_()
    torch.cuda.synchronize(device)
    ranks.meet()  # no rank signals into memory that is still being zeroed
    # Ranks that plan replicas by it have to agree.
    rate = float(_least(int(_link_rate(handle, nbytes, device)), ranks, device))
    return SymmetricAllocation(local, tuple(int(at) for at in handle.buffer_ptrs), rate)


def try_alone(device: torch.device, kind: SymmetricMemory = "cuda") -> None:
    """Allocates a little on one GPU, which shows whether there can be any. Not collective.

    Raises:
        HeapError: There is none; says what torch says.
    """
    try:
        _interface(kind, device).empty(TRIAL_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise HeapError(f"symmetric memory ({kind}) cannot be allocated: {reason}") from error


def _interface(kind: SymmetricMemory, device: torch.device) -> Any:
    """Returns torch's interface, set to a kind of memory, with multicast switched off."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
    import torch.distributed._symmetric_memory as symm_mem

    name = _TORCH_NAMES[kind]
    if symm_mem.get_backend(device) != name:  # the default one cannot be set by name
        symm_mem.set_backend(name)
    return symm_mem


def _link_rate(handle: Any, nbytes: int, device: torch.device) -> float:
    """Bytes a second that come from the next rank, the faster of two trials; 0 if none can tell."""
    size = min(nbytes, LINK_TRIAL_BYTES)
    copies = LINK_TRIAL_BYTES // size
    if copies > MOST_LINK_COPIES:
        return 0.0
    # The address, since the handle may be that of smaller memory that was freed: torch keeps
    # NVSHMEM's handles by their addresses, at which new memory may lie.
    source = int(handle.buffer_ptrs[(handle.rank + 1) % handle.world_size])
    try:
        here = torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:  # the others wait for its rate all the same
        return 0.0
    stream = int(torch.cuda.current_stream(device).cuda_stream)
    seconds = []
    for _ in range(3):
        begin = Stamp(device)
        for _ in range(copies):
            driver.copy(here.data_ptr(), source, size, stream)
        end = Stamp(device)
        end.wait()
        seconds.append(end.ns_since(begin) / 1e9)
    return float(copies * size / min(seconds[1:]))


def _least(value: int, ranks: Ranks, device: torch.device) -> int:
    """Returns the least of all ranks' values. Collective over the group."""
    if ranks.num_ranks == 1:
        return value
    return int(ranks.least(torch.tensor([value], dtype=torch.int64, device=device)).item())


def _too_little(nbytes: int, free: int) -> HeapError:
    return HeapError(
        f"the symmetric heap needs {nbytes} bytes on every GPU, the fullest has {free} free: "
        "start again with a smaller micro-batch or sequence length (max_tokens), or topk"
    )
