"""The machine and the software that a time depends on."""

import platform
import subprocess
from typing import Any

import torch

from flashmoe_megatron.bench import stopwatch


def machine_here() -> dict[str, Any]:
    """Returns what a time of this machine depends on; a GPU's driver is asked by nvidia-smi."""
    count = torch.cuda.device_count() if stopwatch.HAS_GPU else 0  # something may stand in for one
    gpus = [torch.cuda.get_device_properties(gpu) for gpu in range(count)]
    try:
        query = ("--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader")
        said = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, check=True, timeout=20
        ).stdout
        driver, clock, power = said.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        driver, clock, power = "unknown", "unknown", "unknown"
    return {
        "gpus": [gpu.name for gpu in gpus],
        "compute_capabilities": [f"{gpu.major}.{gpu.minor}" for gpu in gpus],
        "driver": driver,
        "max_sm_clock": clock,
        "power_limit": power,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
