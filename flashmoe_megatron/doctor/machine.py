"""The GPUs of a machine, the ways between them, and the kernel's library."""

import os

import torch

from flashmoe_megatron.doctor.fact import Fact
from flashmoe_megatron.errors import DeviceError, HeapError
from flashmoe_megatron.kernel import bindings, symmetric
from flashmoe_megatron.measured.reach import count_gpus, peer_problem, unreachable

GIB = 2**30


def gpus(has_driver: bool) -> Fact:
    """Names the GPUs that torch can use.

    Args:
        has_driver: Whether NVIDIA's driver is here: if so, a torch without GPUs is a problem.
    """
    found = []
    for index in range(count_gpus()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / GIB, 1),
                "multiprocessors": properties.multi_processor_count,
            }
        )
    lines = [
        f"{index}: {gpu['name']}, compute capability {gpu['compute_capability']}, "
        f"{gpu['memory_gib']:g} GiB, {gpu['multiprocessors']} multiprocessors"
        for index, gpu in enumerate(found)
    ]
    problem = "" if found or not has_driver else f"torch can use no GPU: {_why_none()}"
    return Fact("gpus", found, "\n".join(lines) or "none that torch can use", problem)


def _why_none() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "the driver shows none to this process"


def library() -> Fact:
    """Loads the kernel's library. A library that is there and does not load is broken."""
    path = None
    try:
        path = bindings.library_path()
        bindings.load()
    except DeviceError as error:
        is_there = path is None or path.is_file()
        lost = {"path": str(path) if path else None, "loads": False, "abi": None}
        text = "does not load" if is_there else "not installed"
        return Fact("library", lost, text, str(error) if is_there else "", is_broken=is_there)
    value = {"path": str(path), "loads": True, "abi": bindings.ABI_VERSION}
    return Fact("library", value, f"{path}, interface {bindings.ABI_VERSION}, loads")


def peer_access() -> Fact:
    """Says whether all GPUs can read each other's memory, as the kernel does."""
    count = count_gpus()
    pairs = unreachable(count)
    if count < 2:
        return Fact("peer_access", None, "one GPU needs none" if count else "no GPUs")
    value = {"unreachable": [list(pair) for pair in pairs]}
    if not pairs:
        return Fact("peer_access", value, f"all {count} GPUs reach each other")
    text = f"{len(pairs)} of {count * (count - 1)} ways are missing"
    return Fact("peer_access", value, text, peer_problem(pairs))


def symmetric_memory() -> Fact:
    """Tries symmetric memory on this rank's GPU; a layer over ranks tries its way to the others."""
    if not count_gpus():
        return Fact("symmetric_memory", None, "no GPUs")
    index = int(os.environ.get("LOCAL_RANK", "0")) % count_gpus()
    try:
        symmetric.try_alone(torch.device("cuda", index))
    except HeapError as error:
        return Fact("symmetric_memory", {"allocates": False}, "cannot be allocated", str(error))
    return Fact("symmetric_memory", {"allocates": True}, "can be allocated")
