"""Adds the flashmoe choice and the ``--flashmoe-*`` flags to Megatron's command line."""

import argparse
from types import ModuleType
from typing import Any

from flashmoe_megatron.adapters.megatron.settings import DISPATCHER_TYPE, Settings, flag_of
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.config import KEEPS
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import BACKENDS, SYMMETRIC_BACKENDS


def patch_arguments(arguments: ModuleType) -> None:
    """Extends the parser that ``megatron.training.arguments`` makes."""

    def make(original: Function) -> Function:
        return lambda parser: extend_parser(original(parser))

    patch(arguments, "add_megatron_arguments", make)


def extend_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the dispatcher type and the flashmoe group to a parser.

    Args:
        parser: Has ``--moe-token-dispatcher-type``.

    Returns:
        The same parser.

    Raises:
        ConfigError: The parser has no such flag, so this is no Megatron that can be extended.
    """
    _dispatcher_action(parser).choices = _with_flashmoe(_dispatcher_action(parser).choices)
    group = parser.add_argument_group(
        "flashmoe", f"MoE layers as one kernel, with --moe-token-dispatcher-type {DISPATCHER_TYPE}"
    )
    defaults = Settings()
    group.add_argument(
        flag_of("backend"),
        dest="flashmoe_backend",
        choices=BACKENDS,
        default=defaults.backend,
        help="kernel needs a Hopper GPU, reference is plain torch; auto takes the kernel where a "
        "Hopper GPU is present. Default: %(default)s.",
    )
    group.add_argument(
        flag_of("symmetric_memory"),
        dest="flashmoe_symmetric_memory",
        choices=SYMMETRIC_BACKENDS,
        default=defaults.symmetric_memory,
        help="What the kernel shares memory between GPUs with. Default: %(default)s.",
    )
    group.add_argument(
        flag_of("timeout_s"),
        dest="flashmoe_timeout_s",
        metavar="SECONDS",
        type=float,
        default=defaults.timeout_s,
        help="Longest wait of the kernel for a peer before an error. Default: that of "
        "--distributed-timeout-minutes.",
    )
    group.add_argument(
        flag_of("reserved_sms"),
        dest="flashmoe_reserved_sms",
        metavar="COUNT",
        type=int,
        default=defaults.reserved_sms,
        help="Multiprocessors left free for NCCL, which runs beside the kernel when gradients or "
        "parameters are exchanged. Default: %(default)s.",
    )
    group.add_argument(
        flag_of("row_bound"),
        dest="flashmoe_row_bound",
        metavar="FACTOR",
        type=float,
        default=defaults.row_bound,
        help="Rows that the buffers hold, as a multiple of the mean; more is an error, never a "
        "drop. The layer is then one launch that the host never waits for. Default: exact buffers.",
    )
    group.add_argument(
        flag_of("keep"),
        dest="flashmoe_keep",
        choices=KEEPS,
        default=defaults.keep,
        help="What a forward keeps for its backward: all that this needs; the first projection's "
        "outputs, and rows of tokens are fetched again; or the layer's inputs, from which the "
        "backward computes the rest again. Default: %(default)s.",
    )
    group.add_argument(
        flag_of("max_tokens"),
        dest="flashmoe_max_tokens",
        metavar="COUNT",
        type=int,
        default=defaults.max_tokens,
        help="Most tokens of one rank and call. Default: from the sequence length, the micro "
        "batch size and the parallel sizes, and from those of dynamic batching where that is used.",
    )
    group.add_argument(
        flag_of("metrics"),
        dest="flashmoe_metrics",
        metavar="NAMES",
        default=defaults.metrics,
        help="What wandb and TensorBoard are told of the MoE layers: default, all, none, or names "
        "with commas between them. Default: %(default)s.",
    )
    group.add_argument(
        flag_of("calibration"),
        dest="flashmoe_calibration",
        metavar="FILE",
        default=defaults.calibration,
        help="The layer's time on 2 GPUs, from python -m flashmoe_megatron.calibrate, for the "
        "overlap efficiency. Default: none, and no such metric.",
    )
    return parser


def _dispatcher_action(parser: argparse.ArgumentParser) -> Any:
    for action in parser._actions:
        if action.dest == "moe_token_dispatcher_type":
            return action
    raise ConfigError(
        "Megatron's parser has no --moe-token-dispatcher-type; wanted Megatron-Core 0.16.1 or newer"
    )


def _with_flashmoe(choices: Any) -> Any:
    if choices is None or DISPATCHER_TYPE in choices:
        return choices
    return [*choices, DISPATCHER_TYPE]
