"""Times of work as it runs: on the GPU's stream, or on the processor without a GPU."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from flashmoe_megatron.streams import Stamp

T = TypeVar("T")
HAS_GPU = torch.cuda.is_available()
"""Asked before anything else may answer in torch's place."""
SETTLE_MS = 500.0
"""Milliseconds of the same work that settle a GPU's clock; on H200s 300 were too few."""
TURNS = 8
"""Turns of each kind that tools compare, unless their command line says another number."""


def device_here() -> torch.device:
    """This process's GPU, or the processor without a GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")


def now() -> Stamp:
    """Marks the work that has been launched so far."""
    return Stamp(device_here())


def between_ms(begin: Stamp, end: Stamp) -> float:
    """Milliseconds between two marks; a GPU has to have reached both."""
    return end.ns_since(begin) / 1e6


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if HAS_GPU:
        torch.cuda.synchronize()


def turn_ms(call: Callable[[], object], times: int, settle_ms: float = 0.0) -> float:
    """Milliseconds of one of a row of calls that follow one another without a pause.

    The same calls run for ``settle_ms`` before that. A GPU at its power limit lowers its clock
    within some 0.1 s of work, and raises it while it rests: without these calls one is up to a
    tenth faster if what ran before it has left the GPU idle. After other work at the limit it
    may be up to a tenth slower, for some 0.5 s. Turns of kinds that are compared take
    :data:`SETTLE_MS`.
    """
    settled = time.monotonic() + settle_ms / 1e3
    while time.monotonic() < settled:
        for _ in range(times):
            call()
        synchronize()
    call()
    begin = now()
    for _ in range(times):
        call()
    end = now()
    synchronize()
    return between_ms(begin, end) / times


def fair(turns: int) -> int:
    """Returns a number of turns if :func:`in_turns` takes as many in one order as in the other.

    Raises:
        ValueError: The number is odd, or less than 2.
    """
    if turns < 2 or turns % 2:
        raise ValueError(
            f"got {turns}, wanted an even number, at least 2: "
            "every other turn has the opposite order"
        )
    return turns


def in_turns(
    takers: dict[str, Callable[[], T]], turns: int, settle_ms: float = 0.0
) -> dict[str, list[T]]:
    """Calls all takers alternately and returns their results, so that all have the same clocks.

    Every other turn has the opposite order. A GPU that a taker leaves idle for a while, since it
    waits for the CPU, has a higher clock for the next one, and settling takes longer than any turn
    that is affordable: in one fixed order the same taker would always have that clock.

    Args:
        takers: Take one result each.
        turns: Results of each, a :func:`fair` number. Two more turns before them warm up, unless
            turns settle.
        settle_ms: How long each turn settles by itself.

    Raises:
        ValueError: The number of turns is not fair.
    """
    fair(turns)
    taken: dict[str, list[T]] = {name: [] for name in takers}
    for turn in range(0 if settle_ms else -2, turns):
        for name in list(takers)[:: -1 if turn % 2 else 1]:
            found = takers[name]()
            if turn >= 0:
                taken[name].append(found)
    return taken
