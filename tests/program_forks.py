"""Forks whole programs from processes that have imported what the programs import first.

An import of torch takes a program two seconds of a processor, one of PyTorch's compiler as long
again, and torchrun imports torch, too. ``run_python(..., forked_from=FOLDER)`` starts a program as
ever; its Python then has a process that listens in the folder fork another one, which runs the
program, while the first stands for it (``ending/stand_in.py``), and so do the ranks of a torchrun.

All processes of a pytest-xdist run share what listens, which lives as long as the run.
"""

import atexit
import contextlib
import fcntl
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

RUN = "FLASHMOE_TESTS_RUN"
"""Environment variable with the number of pytest's first process and a folder of its run."""
NUM_SERVERS = 2
"""Each has an order of sets of its own, as processes that are started have."""
MOST_BYTES = 2**18
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # threads would be lost in a fork
    "PYTHONHASHSEED": "random",
    "HF_HUB_OFFLINE": "1",  # transformers reads it at its import
}
_processes: list[subprocess.Popen[bytes]] = []  # a process that is forgotten is warned of


def begin_run() -> None:
    """Is called by the first process of pytest, with whose end those end that fork programs."""
    folder = tempfile.mkdtemp(prefix="flashmoe-forks-")
    os.environ[RUN] = f"{os.getpid()} {folder}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def listening(name: str, *modules: str) -> Path:
    """Returns the folder in which processes listen that have imported ``modules``, or soon will.

    Args:
        name: A name of the modules.
        *modules: None of this project stays imported, since programs import that themselves.
    """
    first, run = os.environ[RUN].split(" ", 1)
    folder = Path(run) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number in range(NUM_SERVERS):
            if not (folder / str(number)).exists():
                _start(folder / str(number), first, modules)
    return folder


def _start(path: Path, until: str, modules: tuple[str, ...]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(64)
        command = [sys.executable, __file__, str(listener.fileno()), until, json.dumps(sys.path)]
        process = subprocess.Popen(
            [*command, *modules],
            pass_fds=[listener.fileno()],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    _processes.append(process)


class _Server:
    """Forks what connections ask for, and tells them how it ended."""

    def __init__(self, listener: socket.socket, until: int, imposed: dict[str, str]) -> None:
        self._listener = listener
        self._until = until
        self._imposed = imposed
        self._pids: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Returns when the process ``until`` has ended."""
        try:
            end = os.pidfd_open(self._until)
        except ProcessLookupError:
            return
        self._selector.register(end, selectors.EVENT_READ, "end")
        self._selector.register(self._listener, selectors.EVENT_READ, "connect")
        while True:
            for key, _ in self._selector.select():
                if key.data == "end":
                    return
                if key.data == "connect":
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ, "ask")
                elif key.data == "ask":
                    assert isinstance(key.fileobj, socket.socket)
                    self._answer(key.fileobj)
                else:
                    self._tell(key.fd, *key.data)

    def _answer(self, connection: socket.socket) -> None:
        """Forks, passes a signal on, or ends what nothing stands for any more."""
        try:
            asked, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
        except ConnectionError:
            asked, fds = b"", []
        pid = self._pids.get(connection)
        if not asked:
            self._selector.unregister(connection)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so that the number is the fork's
            else:
                connection.close()
        elif pid is not None:
            os.kill(pid, int(asked))
        else:
            pid = os.fork()
            if pid == 0:
                _live(json.loads(asked), fds, self._imposed)
            for fd in fds:
                os.close(fd)
            self._pids[connection] = pid
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (connection, pid))

    def _tell(self, end: int, connection: socket.socket, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(end)
        os.close(end)
        del self._pids[connection]
        with contextlib.suppress(KeyError):  # its stand-in was killed
            self._selector.unregister(connection)
        with contextlib.suppress(ConnectionError, OSError):
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        connection.close()


def _live(call: dict[str, Any], fds: list[int], imposed: dict[str, str]) -> None:
    """Is the life of a fork: becomes what was started, runs it, and ends as Python does."""
    status = 1
    try:
        for standard, fd in enumerate(fds):
            os.dup2(fd, standard)
        # The listener, the connections and what tells of ends are the server's.
        os.closerange(3, max(int(name) for name in os.listdir("/proc/self/fd")) + 1)
        os.environ.clear()
        os.environ.update(call["environment"] | imposed)
        os.chdir(call["folder"])
        for stream in (sys.stdout, sys.stderr):
            assert hasattr(stream, "reconfigure")
            stream.reconfigure(write_through=call["is_unbuffered"])
        if call["ignores"]:
            sys.warnoptions[:] = ["ignore"]
            warnings.simplefilter("ignore")
        _run(call)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - nothing may come back into the server
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def _run(call: dict[str, Any]) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    name, *_ = sys.argv[:] = call["words"]
    first = {"-m": call["folder"], "-c": "", "": os.path.dirname(os.path.realpath(name))}
    sys.path[:] = [first[call["option"]], *call["path"]]
    importlib.invalidate_caches()
    if call["option"] == "-m":
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    elif call["option"] == "-c":
        sys.argv[0] = "-c"
        exec(compile(name, "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = name
        exec(compile(Path(name).read_bytes(), name, "exec"), main.__dict__)


def _main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    until, path, modules = int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:]
    began_with = sys.path[:]
    sys.path[:] = path
    imposed = importlib.import_module("tests.forks").import_for_forks(modules)
    sys.path[:] = began_with
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tests", "flashmoe_megatron", "tools", "examples"):
            del sys.modules[name]
    _Server(listener, until, imposed).serve()
    os._exit(0)


if __name__ == "__main__":
    _main()
