"""Compiles the programs of ``cc/`` over the protocol's headers, as they are or with a mutant."""

import atexit
import functools
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.protocol.mutants import FEW_STATES, Mutant

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = Path(__file__).resolve().parent / "cc"
FLAGS = {
    "circle": ["-O2"],
    "explore": ["-O2"],
    "replicas": ["-O1"],
    "stress": ["-O1", "-g", "-fsanitize=thread", "-pthread"],
}


ENGINE_FLAGS = ["-O3", "-march=native"]
"""The engine's, since its time goes into loops over arrays."""
EXPLORED = {"explore", "replicas"}
"""Programs that the explorer's engine runs."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        code: Its exit status.
        record: Its line of JSON, empty where it did not come to that.
        text: All that it wrote to stderr.
    """

    code: int
    record: dict[str, object]
    text: str


def compiler() -> str:
    """The C++ compiler, $CXX or what is called g++ or c++."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and shutil.which(name):
            return name
    raise RuntimeError("no C++ compiler: set CXX, or install g++")


@functools.cache
def engine() -> Path:
    """Compiles the explorer's engine, once for all programs of this process, mutants included."""
    directory = Path(tempfile.mkdtemp(prefix="flashmoe-engine-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    target = directory / "engine.o"
    includes = [f"-I{CSRC}", f"-I{SOURCES}"]
    _compile([*ENGINE_FLAGS, *includes, "-c", str(SOURCES / "engine.cc")], target)
    return target


def _compile(arguments: list[str], target: Path) -> None:
    command = [compiler(), "-std=c++17", "-Wall", *arguments, "-o", str(target)]
    subprocess.run(command, check=True, timeout=300)


def build(program: str, directory: Path, mutant: Mutant | None = None) -> Path:
    """Compiles ``program``, a key of ``FLAGS``, to ``directory``.

    Raises:
        ValueError: A text that the mutant replaces is not exactly once in its file.
        subprocess.CalledProcessError: It does not compile.
    """
    shutil.copytree(CSRC / "flashmoe" / "protocol", directory / "flashmoe" / "protocol")
    for source in SOURCES.iterdir():
        shutil.copy(source, directory)
    for file, text, replacement in mutant.edits if mutant else ():
        path = directory / file
        old = path.read_text()
        if old.count(text) != 1:
            raise ValueError(f"{file}: found {old.count(text)} times, wanted once:\n{text}")
        path.write_text(old.replace(text, replacement))
    target = directory / program
    arguments = [*FLAGS[program], f"-I{directory}"]
    if mutant is not None and mutant.states <= FEW_STATES:  # to optimize takes longer than to run
        arguments.append("-O0")
    objects = [str(engine())] if program in EXPLORED else []
    _compile([*arguments, str(directory / f"{program}.cc"), *objects], target)
    return target


def run(program: Path, *arguments: object, timeout: float = 500) -> Outcome:
    """Runs a program of ``build``; a race that ThreadSanitizer finds ends it at once."""
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"},
    )
    line = done.stdout.strip().splitlines()[-1:] or ["{}"]
    return Outcome(done.returncode, json.loads(line[0]), done.stderr)


def summary(outcome: Outcome) -> str:
    """The figures of a program's record on one line."""
    return ", ".join(f"{name} {value}" for name, value in outcome.record.items() if value != "")
