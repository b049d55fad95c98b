"""The release of NVIDIA's driver, asked of its own libraries; no torch is needed."""

import ctypes
import functools
from typing import NamedTuple

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

    @property
    def problem(self) -> str:
        """Says that the kernel's library cannot run on it; empty if it can."""
        # A compatibility package brings CUDA 13 to older drivers, so the release does not decide.
        if self.cuda[0] >= CUDA:
            return ""
        return (
            f"the driver {self.release or 'of an unknown release'} runs CUDA up to "
            f"{'.'.join(map(str, self.cuda))}: the kernel needs CUDA {CUDA}, wanted a driver "
            f"{OLDEST} or newer"
        )


@functools.cache
def driver_problem() -> str:
    """Says why the kernel's library cannot run on the driver that is here; empty if it can.

    A missing driver is no problem of its release: torch says that there is no GPU.
    """
    found = find_driver()
    return found.problem if found else ""


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
