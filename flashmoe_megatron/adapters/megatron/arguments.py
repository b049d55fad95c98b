"""Adds the flashmoe choice and the ``--flashmoe-*`` flags to Megatron's command line."""

import argparse
from types import ModuleType
from typing import Any

from flashmoe_megatron.adapters.megatron.asked import MEGAKERNEL
from flashmoe_megatron.adapters.megatron.settings import DISPATCHER_TYPE, FLAG_PREFIX, Settings
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.config import nearest
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import add_flags


def patch_arguments(arguments: ModuleType) -> None:
    """Extends the parser that ``megatron.training.arguments`` makes."""

    def make(original: Function) -> Function:
        return lambda parser: name_nearest_flag(extend_parser(original(parser)))

    patch(arguments, "add_megatron_arguments", make)


def extend_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the dispatcher type, our megakernel and the flashmoe group to a parser.

    Args:
        parser: Has ``--moe-token-dispatcher-type``.

    Returns:
        The same parser.

    Raises:
        ConfigError: The parser has no such flag, so this is no Megatron that can be extended.
    """
    dispatcher = _action(parser, "moe_token_dispatcher_type")
    if dispatcher is None:
        raise ConfigError(
            "Megatron's parser has no --moe-token-dispatcher-type; wanted Megatron-Core 0.16.1 or "
            "newer"
        )
    # Releases up to 0.19 have no megakernels.
    for action in filter(None, (dispatcher, _action(parser, MEGAKERNEL))):
        action.choices = _with_flashmoe(action.choices)
    add_flag_group(parser)
    return parser


def add_flag_group(parser: argparse.ArgumentParser) -> None:
    """Adds the ``--flashmoe-*`` flags to a parser, under a heading of their own."""
    group = parser.add_argument_group(
        "flashmoe", f"MoE layers as one kernel, with --moe-token-dispatcher-type {DISPATCHER_TYPE}"
    )
    add_flags(group, Settings, FLAG_PREFIX)


def name_nearest_flag(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Makes a misspelt flag of ours an error that names the nearest one.

    It is an error, too, where a script ignores arguments that it does not know.

    Args:
        parser: Has the flags.

    Returns:
        The same parser.
    """
    parse, ours = parser.parse_known_args, f"--{FLAG_PREFIX}-"
    flags = [flag for flag in parser._option_string_actions if flag.startswith(ours)]
    names = [flag.removeprefix(ours) for flag in flags]

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        parsed, unknown = parse(*args, **kwargs)
        for word in unknown:
            name = word.partition("=")[0]
            if name.startswith(ours):
                like = nearest(name.removeprefix(ours), names, lambda one: f"{ours}{one}")
                parser.error(f"unrecognized argument {name}{like}")
        return parsed, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    return parser


def _action(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    return next((action for action in parser._actions if action.dest == name), None)


def _with_flashmoe(choices: Any) -> Any:
    if choices is None or DISPATCHER_TYPE in choices:
        return choices
    return [*choices, DISPATCHER_TYPE]
