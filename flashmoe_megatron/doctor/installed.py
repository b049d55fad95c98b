"""The software that is installed, and the environment; no torch is needed."""

import json
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

from flashmoe_megatron._version import __version__
from flashmoe_megatron.adapters.megatron.dispatcher import check_loaded
from flashmoe_megatron.doctor.fact import Fact
from flashmoe_megatron.driver_release import find_driver
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.releases import FRAMEWORKS, TORCH, Project

VARIABLES = {
    "FLASHMOE_LIBRARY": "the kernel's library is loaded from there",
    "FLASHMOE_AUTOLOAD": "adds flashmoe to Megatron in every process that imports torch",
    "FLASHMOE_REPLACES": "MoE layers that Megatron calls so run on flashmoe, which it adds, too",
    "FLASHMOE_HOST_ID": "names this host; ranks of one name are one host",
    "CUDA_VISIBLE_DEVICES": "hides the other GPUs",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1 makes the scheduled backend's products wait for later rows",
    "CUDA_LAUNCH_BLOCKING": "1 makes every launch wait for its end: nothing overlaps",
    "NCCL_MAX_CTAS": "multiprocessors that a collective may take beside a launch",
    "NCCL_P2P_DISABLE": "1 keeps NCCL off NVLink; the kernel does not read it",
    "PYTORCH_ALLOC_CONF": "settings of torch's allocator",
    "PYTORCH_CUDA_ALLOC_CONF": "settings of torch's allocator, under its older name",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0 keeps torch from loading plugins, such as this package",
    "NVTE_FLASH_ATTN": "0 takes FlashAttention from Transformer Engine",
    "NVTE_FUSED_ATTN": "0 takes cuDNN's attention from Transformer Engine",
    "LD_LIBRARY_PATH": "libraries of CUDA and cuDNN there are found before those of packages",
}
"""The environment variables that matter, and what each does."""


def driver() -> Fact:
    """Says which driver is here, and whether the kernel's library can run on it."""
    found = find_driver()
    if found is None:
        return Fact("driver", None, "none")
    cuda = ".".join(map(str, found.cuda))
    value = {"release": found.release, "cuda": cuda}
    text = f"{found.release or 'of an unknown release'}, CUDA {cuda}"
    return Fact("driver", value, text, found.problem)


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


def installation() -> Fact:
    """Says where this package is, and what other installation of it is found or hidden."""
    here = Path(__file__).resolve().parents[1]
    found: dict[Path, str] = {}
    for each in metadata.distributions(name="flashmoe-megatron"):
        place = _place_of(each)
        # Building leaves metadata in the checkout, which is no installation.
        if place.suffix != ".egg-info":
            found.setdefault(place, f"{each.version} of {place}")
    problem = ""
    if len(found) > 1:
        problem = (
            f"{len(found)} installations are found: {', '.join(found.values())}; pip uninstall "
            "flashmoe-megatron until none is left, then install one"
        )
    elif found and here.parent not in found:
        problem = (
            f"{here} is loaded, which hides the installation {next(iter(found.values()))}: start "
            "in another folder, or uninstall it"
        )
    return Fact("installation", str(here), str(here), problem)


def _place_of(distribution: metadata.Distribution) -> Path:
    """Returns the folder that a distribution's package is in; an editable one names it."""
    said = json.loads(distribution.read_text("direct_url.json") or "{}")
    if said.get("dir_info", {}).get("editable"):
        return Path(unquote(urlparse(said["url"]).path)).resolve()
    place = Path(str(distribution.locate_file(""))).resolve()
    if (place / "flashmoe_megatron.egg-info").is_dir():
        return place / "flashmoe_megatron.egg-info"
    return place


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
    """Names the environment variables that matter and are set, and what is wrong with them."""
    found = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    lines = [f"{name}={value}: {VARIABLES[name]}" for name, value in found.items()]
    text = "\n".join(lines) or "no variable that matters is set"
    try:
        check_loaded(is_attached=False)
    except ConfigError as error:
        return Fact("environment", found, text, str(error))
    return Fact("environment", found, text)


def version_of(project: Project) -> str | None:
    """Returns the installed release of a project, ``None`` if no package of it is installed."""
    try:
        return metadata.version(project.distribution)
    except metadata.PackageNotFoundError:
        return None
