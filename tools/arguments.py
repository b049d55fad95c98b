"""The arguments that tools share, besides those of the examples."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence

from examples.arguments import count
from flashmoe_megatron.bench.shapes import ALL_SHAPES, SHAPES, shape_of
from flashmoe_megatron.bench.stopwatch import SETTLE_MS, TURNS, fair
from flashmoe_megatron.config import got
from flashmoe_megatron.options import ROW_FACTOR


def parser_of(text: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help has a docstring as it is.

    Args:
        text: The docstring of the tool.
        prog: How the tool is called; unless given, by the module that Python runs.
    """
    if prog is None and (spec := sys.modules["__main__"].__spec__) is not None:
        prog = f"python -m {spec.name.removesuffix('.__main__')}"  # argparse names its file
    return argparse.ArgumentParser(
        prog, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def run_command(run: Callable[[], int], *errors: type[Exception]) -> int:
    """Runs a command; prints an error of the given kinds and returns 2 for it."""
    try:
        return run()
    except errors as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def add_gated(parser: argparse.ArgumentParser) -> None:
    """Adds ``--gated``, which holds for shapes that are given by their sizes."""
    parser.add_argument(
        "--gated",
        action="store_true",
        help="shapes that are given by their sizes have SwiGLU, else GELU",
    )


def add_shapes(parser: argparse.ArgumentParser, default: Sequence[str] = tuple(SHAPES)) -> None:
    """Adds ``--shapes`` and ``--gated``; :func:`parse_with_shapes` reads them."""
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=list(default),
        metavar="SHAPE",
        help=f"from {', '.join(ALL_SHAPES)}, or TOKENSxHIDDENxINTERMEDIATExEXPERTSxTOPK, tokens of "
        f"a rank; {', '.join(default)} unless given",
    )
    add_gated(parser)


def add_one_of(parser: argparse.ArgumentParser) -> None:
    """Adds ``--one-of``."""
    parser.add_argument("--one-of", type=count, default=4, help="1/N of the experts")


def add_turns(parser: argparse.ArgumentParser, each: str) -> None:
    """Adds ``--turns`` for :func:`~flashmoe_megatron.bench.stopwatch.in_turns`."""
    parser.add_argument("--turns", type=fair_turns, default=TURNS, help=f"of each {each}, even")


def add_settling(parser: argparse.ArgumentParser) -> None:
    """Adds ``--settle-ms`` for :func:`~flashmoe_megatron.bench.stopwatch.turn_ms`."""
    parser.add_argument(
        "--settle-ms",
        type=float,
        default=SETTLE_MS,
        help="as long run a turn's calls before it is timed",
    )


def parse_with_shapes(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> argparse.Namespace:
    """Reads a command line with shapes, by name; a name of none ends the program."""
    options = parser.parse_args(arguments)
    try:
        options.shapes = {name: shape_of(name, gated=options.gated) for name in options.shapes}
    except ValueError as error:
        parser.error(str(error))
    return options


def fair_turns(text: str) -> int:
    """A number of turns that kinds which are compared may take."""
    turns = int(text)
    try:
        return fair(turns)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> float:
    """An argument that has to be a positive number."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"got {text}, wanted more than 0")
    return value


def not_negative(text: str) -> int:
    """An argument that has to be a whole number, 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"got {text}, wanted at least 0")
    return value


def exponent(text: str) -> float:
    """The exponent of a skewed routing; 0 is none."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number, 0 or more")
    return value


def share(text: str) -> float:
    """A number above 0 and below 1."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted more than 0 and less than 1")
    return value


def row_bound(text: str) -> float:
    """A factor that a backend accepts as its ``row_bound``; tools have no training to measure."""
    value = float(text)
    wanted = ROW_FACTOR.wanted(value)
    if wanted is not None:
        raise argparse.ArgumentTypeError(f"{got('row_bound', value)}: {wanted}")
    return value
