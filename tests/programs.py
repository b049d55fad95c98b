"""Starts Python programs as a user without a GPU does, and returns what they print."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.ending.stand_in import FORKED_FROM

ROOT = Path(__file__).parents[1]
PATIENCE_S = 500
"""How long a program may take; it ends what hangs before pytest does, and says nothing of speed."""


def run_python(
    *arguments: object,
    ranks: int | None = None,
    status: int = 0,
    before: Sequence[Path] = (),
    folder: Path = ROOT,
    forked_from: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs ``python ARGUMENTS``, and fails with its output if it ends in another way.

    Args:
        *arguments: What follows the interpreter, such as ``"-m", "package.module", "--out", path``.
        ranks: How many processes torchrun starts; ``None`` starts the program itself.
        status: The exit status that is wanted.
        before: Folders of the module path before the checkout.
        folder: Where the program runs.
        forked_from: Where processes listen that have imported what the program imports first; a
            fixture's value. Without it the program and its ranks import everything.
        **environment: Variables besides those of this process.
    """
    path = [*map(str, (*before, ROOT)), *filter(None, [os.environ.get("PYTHONPATH")])]
    launcher: list[str] = []
    if ranks is not None:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    if forked_from is not None:
        environment = {FORKED_FROM: str(forked_from), **environment}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, *map(str, arguments)],
        cwd=folder,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path),
            **environment,
        },
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout[-6000:] + done.stderr[-20_000:]
    return done
