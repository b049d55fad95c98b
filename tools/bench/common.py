"""Serves all measurements: how they are timed, and what is recorded with a number.

``python -m tools.bench.common`` prints the machine as JSON.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.machine import machine_here
from flashmoe_megatron.bench.timer import Timer
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.measured.start import join

Made = TypeVar("Made")

ROOT = Path(__file__).parents[2]
CUBLAS_SIZE = 8192
PROCESSOR_SIZE = 256  # without a GPU, where the larger product takes minutes
LINK_BYTES = 256 * 2**20
MEMORY_BYTES = 2**30  # more than a GPU's caches hold


def commit_of_checkout() -> str:
    """The commit that is checked out, with ``+`` if files differ from it; "unknown" without git."""
    try:
        commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
        changes = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changes else "")


def has_gpu() -> bool:
    """Tells whether anything can be measured here; prints a line if not."""
    if torch.cuda.is_available():
        return True
    print("no CUDA GPU is usable here: nothing can be measured", file=sys.stderr)
    return False


def can_train(script: Path) -> bool:
    """Tells whether Megatron-LM's script can train here; prints a line if not."""
    if script.is_file():
        return has_gpu()
    print(f"error: {script} is no file, wanted Megatron-LM's script", file=sys.stderr)
    return False


def machine(commit: str | None = None) -> dict[str, Any]:
    """Everything about the machine and the software that a figure depends on.

    Args:
        commit: What is measured, where the checkout does not know.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or commit_of_checkout(),
        **machine_here(),
    }


ROW_BOUND = 1.25
"""The rows of one launch, plan and all, as a multiple of the mean; uniform routing needs less."""


def cublas_tflops(timer: Timer) -> float:
    """TFLOP/s of a large bfloat16 matrix product of random numbers: the ceiling of compute."""
    size = CUBLAS_SIZE if stopwatch.HAS_GPU else PROCESSOR_SIZE
    a = torch.randn(size, size, device=stopwatch.device_here(), dtype=torch.bfloat16)
    b = torch.randn_like(a)
    out = torch.empty_like(a)
    timing = timer(lambda: torch.mm(a, b, out=out))
    return 2 * size**3 / timing.median_ms / 1e9


def link_gbps(timer: Timer, symmetric_memory: str) -> float:
    """GB/s of a copy to the next rank while all ranks copy: the ceiling of the links.

    Collective over the default group, which has at least 2 ranks.
    """
    import torch.distributed._symmetric_memory as symm_mem

    from flashmoe_megatron.kernel import symmetric

    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    target = symmetric.allocate(LINK_BYTES, group, device, symmetric_memory)  # type: ignore[arg-type]
    handle = symm_mem.rendezvous(target.local, group)
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    theirs = handle.get_buffer(peer, (LINK_BYTES,), torch.uint8)
    ours = torch.randint(256, (LINK_BYTES,), dtype=torch.uint8, device=device)
    timing = timer(lambda: theirs.copy_(ours))
    return LINK_BYTES / timing.median_ms / 1e6


def memory_gbps(timer: Timer) -> float:
    """GB/s that a copy within this GPU reads and writes, in sum: the ceiling of its memory."""
    num_bytes = MEMORY_BYTES if stopwatch.HAS_GPU else 2**20
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=stopwatch.device_here())
    target = torch.empty_like(source)
    timing = timer(lambda: target.copy_(source))
    return 2 * num_bytes / timing.median_ms / 1e6


def add_record_flags(parser: argparse.ArgumentParser, *, a_line: str) -> None:
    """Adds ``--commit`` and ``--out``, the file of a :class:`Record`.

    Args:
        parser: The parser.
        a_line: What the file has a line for.
    """
    parser.add_argument("--commit", help="what is measured, where the checkout has no git")
    parser.add_argument("--out", type=_file, help=f"file that takes one JSON object per {a_line}")


def _file(text: str) -> Path:
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, wanted a file")
    return Path(text)


def called(tool: str, arguments: Sequence[str]) -> str:
    """A command for a record, without ``--out``, which is a place of this machine."""
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument("--out")
    return " ".join([tool, *out.parse_known_args(arguments)[1]])


class Record:
    """A file of measurements, one JSON object per line, written by rank 0 alone.

    Args:
        path: Appended to; ``None`` writes nothing.
        **common: What every line says, the machine above all.
    """

    def __init__(self, path: Path | None, **common: Any) -> None:
        self._path = path
        self._common = common

    def write(self, **measurement: Any) -> None:
        """Appends one line."""
        if self._path is None or (dist.is_initialized() and dist.get_rank() != 0):
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({**measurement, **self._common}) + "\n")


def read_record(path: Path) -> list[dict[str, Any]]:
    """The lines of a :class:`Record`.

    Raises:
        SystemExit: The file cannot be read, or a line of it is no JSON object.
    """
    rows = []
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is {line[:40]}, wanted a JSON object")
            rows.append(row)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} is no record: {error}") from error
    return rows


def log(*values: object) -> None:
    """Prints on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*values, flush=True)


def made_if_installed(name: str, names: list[str], make: Callable[[], Made]) -> Made | None:
    """Makes a layer, or removes its name from ``names`` with a line if its packages are absent."""
    try:
        return make()
    except ImportError as error:
        names.remove(name)
        log(f"{name} is left out: {error}")
        return None


def join_group() -> int:
    """Joins the ranks that torchrun started, if it did, and takes this rank's GPU if it has one.

    Returns:
        The number of ranks; 1 without torchrun, and then there is no process group.
    """
    group, _, _ = join(datetime.timedelta(seconds=120))
    return 1 if group is None else dist.get_world_size()


def need_torchrun() -> None:
    """Ends a tool whose ranks torchrun has to start.

    Raises:
        SystemExit: It did not.
    """
    if "RANK" not in os.environ:
        raise SystemExit("no ranks are here: wanted torchrun --nproc-per-node N -m ...")


def use_library(path: Path) -> None:
    """Makes the package use another build of its library; a loaded build stays loaded."""
    os.environ[bindings.LIBRARY_VARIABLE] = str(path)
    bindings.load.cache_clear()
    bindings.function.cache_clear()


def _output(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()


if __name__ == "__main__":
    json.dump(machine(), sys.stdout)
