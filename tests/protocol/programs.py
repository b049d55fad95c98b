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

from tests.protocol.mutants import FEW_STATES, FORWARD, ORDER, Mutant

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = Path(__file__).resolve().parent / "cc"
FLAGS = {
    "circle": ["-O2"],
    "explore": ["-O2"],
    "order": ["-O2"],
    "replicas": ["-O1"],
    "stress": ["-O1", "-g", "-fsanitize=thread", "-pthread"],
}
AGENTS = {"explore": "explored_agent", "stress": "stressed_agent"}
"""Sources with the steps of a launch, all that is compiled again for a mutant of them."""
AGENT = "class Agent {"
"""Begins these steps in their header. What comes before it is in the rest of the programs, too."""

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
def unchanged(source: str, *flags: str) -> Path:
    """Compiles a source as it is, once for all programs of this process, mutants included."""
    directory = Path(tempfile.mkdtemp(prefix=f"flashmoe-{source}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    target = directory / f"{source}.o"
    _compile([*flags, f"-I{CSRC}", f"-I{SOURCES}", "-c", str(SOURCES / f"{source}.cc")], target)
    return target


def without_agents(program: str) -> Path:
    """Compiles the rest of a program, in which little time is spent."""
    return unchanged(program, *FLAGS[program], "-O0")


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
    are_agents_all = True
    for file, text, replacement in mutant.edits if mutant else ():
        path = directory / file
        old = path.read_text()
        if old.count(text) != 1:
            raise ValueError(f"{file}: found {old.count(text)} times, wanted once:\n{text}")
        are_agents_all &= is_of_agents(file, old, text)
        path.write_text(old.replace(text, replacement))
    target = directory / program
    flags = list(FLAGS[program])
    if mutant is not None and mutant.states <= FEW_STATES:  # to optimize takes longer than to run
        flags += ["-O0", "-g0"]
    sources = [program]
    objects = [str(unchanged("engine", *ENGINE_FLAGS))] if program in EXPLORED else []
    if program in AGENTS:
        sources = [AGENTS[program]]
        if are_agents_all:
            objects.append(str(without_agents(program)))
        else:
            sources.append(program)
    texts = [str(directory / f"{source}.cc") for source in sources]
    _compile([*flags, f"-I{directory}", *texts, *objects], target)
    return target


def is_of_agents(file: str, content: str, text: str) -> bool:
    """Tells whether nothing but agents has ``text``, which is once in a file of the protocol."""
    if file == FORWARD:
        return content.index(AGENT) < content.index(text)
    return file != ORDER  # sizes of memory depend on a number there


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
