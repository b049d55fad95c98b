"""Says of a sweep on which machine it was, and whether the kernel has run."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Machine(NamedTuple):
    """The machine of a sweep, as its records have it.

    Attributes:
        gpus: The names of all GPUs, none where the reference was measured.
        about: The driver, the versions and the commit.
    """

    gpus: tuple[str, ...]
    about: str

    @property
    def is_reference(self) -> bool:
        """Tells whether nothing here is a time of the kernel."""
        return not self.gpus

    @property
    def ours(self) -> str:
        """The implementation of this package, as columns and labels name it."""
        return "reference" if self.is_reference else "fused"

    @property
    def ranks(self) -> str:
        """The name of several ranks: a rank has a GPU, or is a process."""
        return "processes" if self.is_reference else "GPUs"

    @property
    def config(self) -> dict[str, Any]:
        """The same for wandb's configuration."""
        return {"machine": self.title, "is_reference": self.is_reference}

    @property
    def title(self) -> str:
        """One line for titles."""
        if self.is_reference:
            return f"REFERENCE on processors, no time of the kernel; {self.about}"
        return f"{len(self.gpus)} x {self.gpus[0]}; {self.about}"


def machine_of(record: Mapping[str, Any]) -> Machine:
    """Returns the machine of a record of ``tools.bench``."""
    gpus = tuple(record.get("gpus") or ())
    driver = f"driver {record.get('driver', 'unknown')}, " * bool(gpus)
    commit = str(record.get("commit", "unknown"))
    return Machine(gpus, f"{driver}torch {record.get('torch', 'unknown')}, commit {commit[:12]}")
