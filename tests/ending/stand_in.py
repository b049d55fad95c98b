"""Lets a program run in a fork of a process that has imported torch already.

``tests/program_forks.py`` says where that process listens. This one passes signals on, and ends as
the fork does; if it is killed, so is the fork.
"""

import json
import os
import signal
import socket
import sys
from typing import NoReturn

FORKED_FROM = "FLASHMOE_TESTS_FORKED_FROM"
"""Environment variable that names the folder where the processes listen that fork programs."""
MOST_BYTES = 64
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def parse(arguments: list[str]) -> dict[str, object] | None:
    """Returns what Python was called with, or nothing where a fork could not do the same."""
    ignores = is_unbuffered = False
    while arguments and arguments[0] in ("-u", "-W"):
        if arguments[0] == "-u":
            is_unbuffered, arguments = True, arguments[1:]
        elif arguments[1:2] == ["ignore"]:
            ignores, arguments = True, arguments[2:]
        else:
            return None
    option = arguments[0] if arguments[:1] in (["-m"], ["-c"]) else ""
    words = arguments[bool(option) :]
    if not words or (not option and words[0].startswith("-")):
        return None
    return {
        "option": option,
        "words": words,
        "ignores": ignores,
        "is_unbuffered": is_unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")),
    }


def _fail(sentence: str) -> NoReturn:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
    os._exit(1)


def hand_over_or_fail(folder: str) -> None:
    """Does not return where a fork can do what this process was started for, nor after an error.

    Python goes on after an error of a module that it imports at its start.
    """
    try:
        _hand_over(folder)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the program may not start
        _fail(f"no fork runs this program: {type(error).__name__}: {error}")


def _hand_over(folder: str) -> None:
    call = parse(sys.orig_argv[1:])
    inherited = {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2}
    # One of them was the list's own; a fork has no others. A seed is read at a start alone.
    if call is None or len(inherited) > 1 or os.environ.get("PYTHONHASHSEED", "random") != "random":
        return
    # Ranks differ in the order of their sets, as those that are started do.
    number = int(os.environ.get("LOCAL_RANK", "0")) % 2
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(f"{folder}/{number}")
        call.update(environment=dict(os.environ), folder=os.getcwd(), path=sys.path)
        for one in PASSED_ON:
            signal.signal(one, lambda number, _: server.send(str(number).encode()))
        socket.send_fds(server, [json.dumps(call).encode()], [0, 1, 2])
        answer = server.recv(MOST_BYTES)
    if not answer:
        _fail(f"the process has ended that forked this program for {folder}")
    status = int(answer)
    if status < 0:
        if -status in PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
