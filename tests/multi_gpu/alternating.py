"""Runs a Megatron script whose buckets go by torch.distributed and over links in turns.

A machine's processor makes two runs differ by more than links do, and one block of iterations from
the next one by less. ``FLASHMOE_TURNS`` has what blocks go by, one after the other, separated by
commas: "off", "auto" or one link's name. An iteration that takes too long has all stacks written.
"""

import faulthandler
import itertools
import os
import sys
from typing import Any

from flashmoe_megatron.adapters.megatron import install
from flashmoe_megatron.adapters.megatron.buckets import links as adapter
from flashmoe_megatron.multipath import Multipath
from flashmoe_megatron.run import main
from flashmoe_megatron.telemetry.totals import LINKS

VARIABLE = "FLASHMOE_TURNS"
BLOCK = 4
"""Iterations of a block."""
_LONG_S = 20.0
"""What no iteration takes, and less than the time limit that ends one that stands still."""


def turn_of(turns: list[str], iteration: int) -> str:
    """What an iteration goes by; they are counted from 1."""
    return turns[(iteration - 1) // BLOCK % len(turns)]


def alternate(turns: list[str]) -> None:
    """Lets the adapter look at the iteration whenever a bucket begins."""
    from megatron.training import training

    iterations = itertools.count(1)
    turn, is_on, made = turns[0], adapter._is_on, vars(adapter)["Multipath"]
    by_turn: dict[str, dict[Any, Multipath]] = {one: {} for one in turns}
    train_step = training.train_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal turn
        turn = turn_of(turns, next(iterations))
        adapter._made = by_turn[turn]
        faulthandler.dump_traceback_later(_LONG_S, repeat=True)
        try:
            return train_step(*args, **kwargs)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def make(*args: Any, **kwargs: Any) -> Multipath:
        links = (turn,) if turn in LINKS else "auto"
        return made(*args, links=links, **kwargs)

    training.train_step = counted
    adapter._is_on = lambda config: turn != "off" and is_on(config)
    vars(adapter)["Multipath"] = make  # a name that the module imports


if __name__ == "__main__":
    install()
    alternate(os.environ[VARIABLE].split(","))
    main(sys.argv[1:])
