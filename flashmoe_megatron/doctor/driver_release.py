"""The release of NVIDIA's driver, asked of its own libraries; no torch is needed."""

import ctypes
from typing import NamedTuple

from flashmoe_megatron.doctor.fact import Fact

OLDEST = "580"
"""The first release of the driver for CUDA 13."""
CUDA = 13
"""The major release of CUDA that the kernel's library is built with."""


class Driver(NamedTuple):
    """A driver.

    Attributes:
        release: As "580.65.06"; ``None`` where NVML does not tell it.
        cuda: The newest CUDA that it runs, as ``(13, 0)``.
    """

    release: str | None
    cuda: tuple[int, int]


def driver() -> Fact:
    """Says which driver is here, and whether the kernel's library can run on it."""
    found = find_driver()
    if found is None:
        return Fact("driver", None, "none")
    cuda = ".".join(map(str, found.cuda))
    name = found.release or "of an unknown release"
    problem = ""
    # A compatibility package brings CUDA 13 to older drivers, so the release does not decide.
    if found.cuda[0] < CUDA:
        problem = (
            f"the driver {name} runs CUDA up to {cuda}: the kernel needs CUDA {CUDA}, wanted a "
            f"driver {OLDEST} or newer"
        )
    value = {"release": found.release, "cuda": cuda}
    return Fact("driver", value, f"{name}, CUDA {cuda}", problem)


def find_driver() -> Driver | None:
    """Asks the driver's libraries; ``None`` where there is none."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    if status:
        return None
    return Driver(_release(), (version.value // 1000, version.value % 1000 // 10))


def _release() -> str | None:
    name = ctypes.create_string_buffer(96)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return None
        status = nvml.nvmlSystemGetDriverVersion(name, ctypes.c_uint(len(name)))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if status else name.value.decode()
