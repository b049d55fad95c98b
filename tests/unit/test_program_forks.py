"""Programs that are forked from a process with torch do what programs that are started do."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ending.stand_in import FORKED_FROM, parse
from tests.programs import run_python

TELLS = """
import atexit, json, os, sys
told = {
    "main": __name__, "is_main": sys.modules["__main__"].__dict__ is globals(),
    "words": sys.argv[1:], "folder": os.getcwd(), "variable": os.environ["VARIABLE"],
    "has_torch": "torch" in sys.modules, "has_package": "flashmoe_megatron" in sys.modules,
    "has_beside": os.path.exists(os.path.join(sys.path[0] or ".", "beside.py")),
    "files": sorted(os.listdir("/proc/self/fd"))[:3],
}
print(json.dumps(told))
print("in error", file=sys.stderr)
atexit.register(print, "at the end")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "beside.py"
    file.write_text(TELLS)
    return file


@pytest.mark.parametrize("form", ["file", "-m", "-c"])
def test_a_fork_is_what_was_started(form: str, program: Path, with_torch: Path) -> None:
    words = {"file": ["beside.py"], "-m": ["-m", "beside"], "-c": ["-c", TELLS]}[form]
    found = {}
    for forked_from in (None, with_torch):
        where = {"folder": program.parent, "forked_from": forked_from}
        ran = run_python(*words, 3, "a b", status=3, VARIABLE="here", **where)
        assert ran.stderr == "in error\n"
        told, end = ran.stdout.splitlines()
        assert end == "at the end"
        found[forked_from] = json.loads(told)
    assert found[None].pop("has_torch") is False
    assert found[with_torch].pop("has_torch") is True
    assert found[with_torch] == found[None]
    assert found[None]["words"] == ["3", "a b"]
    assert found[None]["is_main"]


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise ValueError('told')", 1, "ValueError: told\n"),
        ("import sys; sys.exit('told')", 1, "told\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'\n"),
    ],
)
def test_ends_are_the_forks(code: str, status: int, said: str, with_torch: Path) -> None:
    ran = run_python("-c", code, status=status, forked_from=with_torch)
    assert ran.stderr.endswith(said)
    assert bool(ran.stderr) == bool(said)


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(500)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_fork_too(number: signal.Signals, with_torch: Path) -> None:
    environment = {**os.environ, FORKED_FROM: str(with_torch)}
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.send_signal(number)
        assert process.wait() == -number
        # The pipe's other end is the fork's, which ends with it.
        assert process.stdout.read() == ""


def test_what_a_fork_cannot_be_is_started(with_torch: Path) -> None:
    """The order of sets is that of a start, and a parent's pipes are in no fork."""
    code = "import sys; print('torch' in sys.modules)"
    ran = run_python("-c", code, forked_from=with_torch, PYTHONHASHSEED="1")
    assert ran.stdout == "False\n"
    ours, theirs = os.pipe()
    with os.fdopen(ours), os.fdopen(theirs, "w"):
        environment = {**os.environ, FORKED_FROM: str(with_torch)}
        said = subprocess.check_output(
            [sys.executable, "-c", code], env=environment, pass_fds=[theirs], text=True
        )
    assert said == "False\n"


def test_nothing_that_listens_is_an_error(tmp_path: Path) -> None:
    ran = run_python("-c", "print('ran')", status=1, forked_from=tmp_path)
    assert ran.stdout == ""
    assert "no fork runs this program: FileNotFoundError" in ran.stderr


def test_other_options_of_python_are_not_a_forks() -> None:
    assert parse(["-P", "-m", "module"]) is None
    assert parse(["-W", "error", "file"]) is None
    assert parse([]) is None
    found = parse(["-u", "-W", "ignore", "-m", "module", "-c"])
    assert found is not None
    assert (found["option"], found["words"]) == ("-m", ["module", "-c"])
    assert (found["ignores"], found["is_unbuffered"]) == (True, True)
