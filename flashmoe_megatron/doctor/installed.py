"""The software that is installed, and the environment; no torch is needed."""

import os
import platform
from collections.abc import Iterator
from importlib import metadata

from flashmoe_megatron._version import __version__
from flashmoe_megatron.doctor.fact import Fact
from flashmoe_megatron.releases import FRAMEWORKS, TORCH, Project

VARIABLES = {
    "FLASHMOE_LIBRARY": "the kernel's library is loaded from there",
    "FLASHMOE_AUTOLOAD": "adds flashmoe to Megatron in every process that imports torch",
    "FLASHMOE_HOST_ID": "names this host; ranks of one name are one host",
    "CUDA_VISIBLE_DEVICES": "hides the other GPUs",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1 makes the scheduled backend's products wait for later rows",
    "CUDA_LAUNCH_BLOCKING": "1 makes every launch wait for its end: nothing overlaps",
    "NCCL_MAX_CTAS": "multiprocessors that a collective may take beside a launch",
    "NCCL_P2P_DISABLE": "1 keeps NCCL off NVLink; the kernel does not read it",
    "PYTORCH_ALLOC_CONF": "settings of torch's allocator",
    "PYTORCH_CUDA_ALLOC_CONF": "settings of torch's allocator, under its older name",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0 keeps torch from reading FLASHMOE_AUTOLOAD",
    "NVTE_FLASH_ATTN": "0 takes FlashAttention from Transformer Engine",
    "NVTE_FUSED_ATTN": "0 takes cuDNN's attention from Transformer Engine",
    "LD_LIBRARY_PATH": "libraries of CUDA and cuDNN there are found before those of packages",
}
"""The environment variables that matter, and what each does."""


def software() -> Fact:
    """Names this package, Python and torch, by their metadata.

    A torch that is missing or too old is a broken installation.
    """
    torch = version_of(TORCH)
    texts = [f"flashmoe-megatron {__version__}", f"Python {platform.python_version()}"]
    texts.append(f"torch {torch}" if torch else "no torch")
    problem = TORCH.problem(torch) if torch else f"torch is not installed: wanted {TORCH.wanted}"
    value = {
        "flashmoe_megatron": __version__,
        "python": platform.python_version(),
        "torch": torch,
    }
    return Fact("software", value, ", ".join(texts), problem or "", is_broken=bool(problem))


def frameworks() -> Iterator[Fact]:
    """Yields each framework's release, and whether it lies within the tried range."""
    for project in FRAMEWORKS:
        version = version_of(project)
        problem = (project.problem(version) or "") if version else ""
        is_tried = version is not None and not problem
        value = {"version": version, "tried": project.wanted, "is_tried": is_tried}
        text = f"{version} (tried: {project.wanted})"
        if version is None:
            text = f"not installed; {project.install}"
        yield Fact(project.distribution.replace("-", "_"), value, text, problem)


def environment() -> Fact:
    """Names the environment variables that matter and are set."""
    found = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    lines = [f"{name}={value}: {VARIABLES[name]}" for name, value in found.items()]
    return Fact("environment", found, "\n".join(lines) or "no variable that matters is set")


def version_of(project: Project) -> str | None:
    """Returns the installed release of a project, ``None`` if no package of it is installed."""
    try:
        return metadata.version(project.distribution)
    except metadata.PackageNotFoundError:
        return None
