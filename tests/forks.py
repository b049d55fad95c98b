"""Forks processes from one that has imported what they need, which costs them nothing then.

An import of torch takes two seconds of a processor, one of Megatron three times as long.
"""

import contextlib
import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

ANSWER_BYTES = 64
FORK = b"fork"


class Forked:
    """A process that a server has forked, with the methods of multiprocessing's."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid = pid
        self.exitcode: int | None = None
        self._server = server
        self._end = os.pidfd_open(pid)

    def is_alive(self) -> bool:
        self.join(0.0)
        return self.exitcode is None

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the end, after which ``exitcode`` is known."""
        if self.exitcode is None and select.select([self._end], [], [], timeout_s)[0]:
            self.exitcode = self._server._ask(str(self.pid).encode())
            os.close(self._end)

    def kill(self) -> None:
        if self.exitcode is None:  # the number stays the process's until the server is asked
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A process that imports ``modules`` at its start, with the first fork, and forks others."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._has_imported = False

    def fork(self, target: Callable[..., None], *args: Any) -> tuple[Forked, Connection]:
        """Calls ``target(pipe, *args)`` in a new process.

        It has this process's environment, folder, module path, stdout and stderr of now.

        Args:
            target: Defined at the top level of a module.
            *args: Anything picklable.

        Returns:
            The process, and the other end of its pipe.
        """
        self.start()
        assert self._socket is not None
        if not self._has_imported:
            self._answer()
            self._has_imported = True
        ours, theirs = Pipe()
        with theirs:
            socket.send_fds(self._socket, [FORK], [theirs.fileno(), 1, 2])
            process = Forked(self, self._answer())
        ours.send((dict(os.environ), os.getcwd(), sys.path, pickle.dumps((target, args))))
        return process, ours

    def close(self) -> None:
        """Ends the server; the next fork starts it anew."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()
        self._socket = self._process = None

    def start(self) -> None:
        """Begins the imports, unless it has; servers that are started together import at once."""
        if self._socket is not None:
            return
        self._has_imported = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), json.dumps(sys.path)]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *self._modules],
                pass_fds=[theirs.fileno()],
                # Threads would be lost in a fork. Each server has an order of sets of its own.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "random"},
            )

    def _ask(self, question: bytes) -> int:
        assert self._socket is not None, "the server is gone"
        self._socket.send(question)
        return self._answer()

    def _answer(self) -> int:
        assert self._socket is not None
        answer = self._socket.recv(ANSWER_BYTES)
        if not answer:
            raise RuntimeError(f"the server of {self._modules} has ended; stderr says why")
        return int(answer)


def _serve(control: socket.socket, imposed: dict[str, str]) -> None:
    """Forks on demand, and tells how processes have ended, until the other end is closed.

    Processes have their parent's environment with what imports have ``imposed`` on it.
    """
    control.send(b"0")
    while True:
        asked, fds, _, _ = socket.recv_fds(control, ANSWER_BYTES, 3)
        if not asked:
            return
        if asked == FORK:
            answer = os.fork()
            if answer == 0:
                control.close()
                _live(imposed, *fds)
            for fd in fds:
                os.close(fd)
        else:
            _, status = os.waitpid(int(asked), 0)
            answer = os.waitstatus_to_exitcode(status)
        control.send(str(answer).encode())


def _live(imposed: dict[str, str], pipe_fd: int, stdout: int, stderr: int) -> None:
    """Is the life of a process: makes it what its parent is, calls the target, and ends."""
    code = 1
    try:
        for fd, standard in ((stdout, 1), (stderr, 2)):
            os.dup2(fd, standard)
            os.close(fd)
        with contextlib.suppress(EOFError), Connection(pipe_fd) as pipe:
            environment, folder, sys.path[:], call = pipe.recv()
            os.environ.clear()
            os.environ.update(environment | imposed)
            os.chdir(folder)
            target, args = pickle.loads(call)
            target(pipe, *args)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may come back into the server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def import_for_forks(modules: Sequence[str]) -> dict[str, str]:
    """Imports what forks of this process will have, and returns what that put into the environment.

    Imported modules stay. A collection of garbage that looks at them takes each fork a third of a
    second, and copies their memory; so none does.
    """
    before = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


if __name__ == "__main__":
    own = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = json.loads(sys.argv[2])
    _serve(own, import_for_forks(sys.argv[3:]))
