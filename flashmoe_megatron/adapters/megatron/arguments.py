"""Adds the flashmoe choice and the ``--flashmoe-*`` flags to Megatron's command line.

Megatron saves its arguments in every checkpoint, and tools that convert or serve one build a model
from them. A model trained with flashmoe has the parameters of one trained with the alltoall
dispatcher, so that is the dispatcher that the saved arguments name. A user who resumes with
flashmoe says so again: ``--use-checkpoint-args`` never changes the dispatcher of a command line.
"""

import argparse
import copy
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NoReturn

from flashmoe_megatron.adapters.megatron.config.asked import MEGAKERNEL
from flashmoe_megatron.adapters.megatron.dispatcher import FIELD, has_our_name
from flashmoe_megatron.adapters.megatron.settings import (
    DISPATCHER_TYPE,
    FLAG_PREFIX,
    STOCK_DISPATCHER_TYPE,
    Settings,
    flag_of,
    nearest_flag,
    unread_flags,
)
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import add_flags

OURS = flag_of("")
"""Begins every flag of this package."""


def patch_arguments(arguments: ModuleType) -> None:
    """Extends the parser that ``megatron.training.arguments`` makes."""

    def make(original: Function) -> Function:
        return lambda parser: refuse_briefly(extend_parser(original(parser)))

    patch(arguments, "add_megatron_arguments", make)


def extend_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the dispatcher type, our megakernel and the flashmoe group to a parser; returns it.

    Raises:
        ConfigError: There is no ``--moe-token-dispatcher-type``: this is no Megatron that can be
            extended.
    """
    dispatcher = _action(parser, FIELD)
    if dispatcher is None:
        raise ConfigError(
            "Megatron's parser has no --moe-token-dispatcher-type; wanted Megatron-Core 0.16.1 or "
            "newer"
        )
    # Releases up to 0.19 have no megakernels.
    for action in filter(None, (dispatcher, _action(parser, MEGAKERNEL))):
        if action.choices is not None and DISPATCHER_TYPE not in action.choices:
            action.choices = [*action.choices, DISPATCHER_TYPE]
    add_flag_group(parser)
    return parser


def add_flag_group(parser: argparse.ArgumentParser) -> None:
    """Adds the ``--flashmoe-*`` flags to a parser, under a heading of their own."""
    group = parser.add_argument_group(
        "flashmoe", f"MoE layers as one kernel, with --moe-token-dispatcher-type {DISPATCHER_TYPE}"
    )
    add_flags(group, Settings, FLAG_PREFIX)


def refuse_briefly(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Makes what is wrong with a flag of ours a ``ConfigError``, without the parser's usage.

    A misspelt flag is one, too, where a script ignores arguments that it does not know; the nearest
    flag is named. Errors of other flags stay the parser's.

    Returns:
        The same parser.
    """
    parse, refuse = parser.parse_known_args, parser.error

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        parsed, unknown = parse(*args, **kwargs)
        for flag in flags_among(unknown):
            raise ConfigError(f"unrecognized argument {flag}{nearest_flag(flag)}")
        return parsed, unknown

    def error(message: str) -> NoReturn:
        if message.startswith(f"argument {OURS}"):
            raise ConfigError(message.removeprefix("argument "))
        refuse(message)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    parser.error = error  # type: ignore[method-assign]
    return parser


def flags_among(words: Iterable[str]) -> list[str]:
    """Returns the flags of ours among the words of a command line, without their values."""
    return [word.partition("=")[0] for word in words if word.startswith(OURS)]


def expect_flags(arguments: Iterable[str]) -> None:
    """Notes flags until a parser of this process takes them, so that none is ignored in silence.

    Args:
        arguments: The command line of the script.
    """
    unread_flags.update(flags_among(arguments))
    patch(argparse.ArgumentParser, "parse_known_args", _noting_flags)


def _noting_flags(original: Function) -> Function:
    def parse_known_args(
        self: argparse.ArgumentParser, args: Any = None, namespace: Any = None, **more: Any
    ) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        parsed, unknown = original(self, given, namespace, **more)
        unread_flags.difference_update(set(flags_among(given)).difference(flags_among(unknown)))
        return parsed, unknown

    return parse_known_args


def _action(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    return next((action for action in parser._actions if action.dest == name), None)


def patch_checkpointing(checkpointing: ModuleType) -> None:
    """Changes the dispatcher in the arguments that ``megatron.training.checkpointing`` saves."""
    patch(checkpointing, "generate_state_dict", _with_stock_dispatcher)


def _with_stock_dispatcher(original: Function) -> Function:
    def generate_state_dict(*args: Any, **kwargs: Any) -> Any:
        state = original(*args, **kwargs)
        saved = state.get("args")
        if has_our_name(saved):
            state["args"] = copy.copy(saved)
            setattr(state["args"], FIELD, STOCK_DISPATCHER_TYPE)
        return state

    return generate_state_dict
