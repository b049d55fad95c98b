"""GPUs of this machine that reach each other's memory, as the kernel's ranks have to."""

import itertools

import torch

from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.select import Kind


def count_gpus() -> int:
    """Returns how many GPUs torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def unreachable(count: int) -> list[tuple[int, int]]:
    """Returns the pairs of the first GPUs where one cannot read the other's memory."""
    pairs = itertools.permutations(range(count), 2)
    return [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]


def peer_problem(pairs: list[tuple[int, int]]) -> str:
    """Returns a sentence about GPUs that do not reach each other."""
    first, second = pairs[0]
    more = f", and {len(pairs) - 1} more pairs likewise" if len(pairs) > 1 else ""
    return (
        f"GPU {first} cannot reach the memory of GPU {second}{more}: layers over both cannot run "
        "on the kernel; choose the backend 'scheduled' there, or hide GPUs with "
        "CUDA_VISIBLE_DEVICES"
    )


def check_peers(kind: Kind, num_ranks: int) -> None:
    """Refuses ranks on GPUs that do not reach each other, which the kernel would wait for.

    Args:
        kind: The ranks' backend; others than the kernel need no peers.
        num_ranks: The ranks of this machine, which have its first GPUs.

    Raises:
        DeviceError: Names the GPUs and the ways out.
    """
    pairs = unreachable(min(num_ranks, count_gpus())) if kind == "kernel" else []
    if pairs:
        raise DeviceError(peer_problem(pairs))
