"""Describes modules that programs import, where a user runs them as commands."""

import argparse
import sys
from collections.abc import Sequence


def describe(name: str, text: str | None, arguments: Sequence[str] | None = None) -> int:
    """Prints what a module is; returns the exit status.

    Args:
        name: The module's.
        text: Its docstring.
        arguments: The command line without the program, by default this process's.
    """
    parser = argparse.ArgumentParser(
        f"python -m {name}",
        usage=f"import {name}",
        description=text,
        epilog="A training program imports this module; as a command it does nothing else than "
        "print this. python -m flashmoe_megatron says what runs here.",
    )
    parser.parse_args(arguments)
    parser.print_help(sys.stdout)
    return 0
