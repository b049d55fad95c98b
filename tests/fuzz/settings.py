"""Parses configurations made of bytes: whatever they say, the answer is settings or a ConfigError.

Covers the section of a DeepSpeed configuration, Megatron's command line and settings from code, a
layer's shape, the kernel's options, and the planner.
"""

import argparse
import contextlib
import dataclasses
import io
import json
from collections.abc import Callable
from typing import Any

from flashmoe_megatron import planner
from flashmoe_megatron.adapters.deepspeed import settings as deepspeed
from flashmoe_megatron.adapters.megatron import arguments
from flashmoe_megatron.adapters.megatron import settings as megatron
from flashmoe_megatron.config import Activation, MoEConfig, align_capacity
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import BackendOptions, read_flags
from tests.fuzz.choices import Choices

MISSPELT = ("Flash_MoE", "flash-moe", "enable", "")
WORDS = (
    *("flashmoe", "enabled", "auto", "kernel", "reference", "cuda", "nvshmem", "error", "warn"),
    *("expert_parallel", "comm_backend", "silu", "gelu_tanh", *MISSPELT),
    *(field.name for field in dataclasses.fields(deepspeed.Settings)),
)
NUMBERS = (0.0, 0.5, 1.0, 1.5, -1.0, 1e-9, 1e9, 1e18, 1e308, float("inf"), float("nan"))


def exercise(data: bytes) -> str:
    """Parses one configuration.

    Returns:
        What was parsed, and the refusal if it was refused.
    """
    choices = Choices(data)
    name = choices.pick(list(_TARGETS))
    try:
        _TARGETS[name](choices)
    except ConfigError as error:
        sentence = str(error)
        if len(sentence) < 8 or "\n" in sentence:
            raise AssertionError(f"{name} was refused with {sentence!r}") from error
        return f"{name}: {sentence}"
    return name


def value_of(choices: Choices, depth: int = 0) -> Any:
    """Anything that JSON can say, also the numbers that only Python's reader takes."""
    kind = choices.integer(1) % (10 if depth < 2 else 8)
    if kind == 0:
        return choices.flag()
    if kind == 1:
        return None
    if kind in (2, 3):
        return choices.number()
    if kind == 4:
        return choices.pick(NUMBERS)
    if kind in (5, 6):
        return choices.pick(WORDS)
    if kind == 7:
        return choices.text()
    if kind == 8:
        return [value_of(choices, depth + 1) for _ in range(choices.integer(1) % 4)]
    return _table(choices, depth)


def _table(choices: Choices, depth: int) -> dict[str, Any]:
    return {
        choices.pick(WORDS) if choices.integer(1) % 4 else choices.text(): value_of(
            choices, depth + 1
        )
        for _ in range(choices.integer(1) % 5)
    }


def _changed(choices: Choices, good: dict[str, Any]) -> dict[str, Any]:
    """Good settings with some of them changed."""
    found = dict(good)
    for _ in range(choices.integer(1) % 4):
        found[choices.pick(list(good))] = value_of(choices)
    return found


def _deepspeed(choices: Choices) -> None:
    if choices.flag():
        config = _table(choices, 0)
    else:
        good = dataclasses.asdict(deepspeed.Settings(enabled=True))
        config = {"flashmoe": _changed(choices, good)}
        if choices.flag():
            config["expert_parallel"] = {"comm_backend": choices.pick(WORDS)}
    # As it comes from a file.
    config = json.loads(json.dumps(config))
    config = deepspeed.resolve_alias(config) or config
    _check_options(deepspeed.read_settings(config).backend_options())


def _megatron_code(choices: Choices) -> None:
    try:
        settings = megatron.configure(
            **_changed(choices, dataclasses.asdict(megatron.Settings()) | {"unknown": 1})
            if choices.flag()
            else _changed(choices, dataclasses.asdict(megatron.Settings()))
        )
    finally:
        megatron._chosen = None
    _check_options(settings.backend_options())


_PARSER = argparse.ArgumentParser(prog="pretrain_gpt.py", exit_on_error=False)
_PARSER.add_argument("--moe-token-dispatcher-type", choices=["allgather", "alltoall"])
arguments.extend_parser(_PARSER)
_FLAGS = [flag for action in _PARSER._actions for flag in action.option_strings]


def _megatron_command_line(choices: Choices) -> None:
    words = []
    for _ in range(choices.integer(1) % 5):
        flag = choices.pick([flag for flag in _FLAGS if "help" not in flag and flag != "-h"])
        value = value_of(choices, depth=2)
        words += [flag, value if isinstance(value, str) else str(value)]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            args = _PARSER.parse_args(words)
    except (argparse.ArgumentError, SystemExit):  # how argparse refuses
        return
    given = read_flags(args, megatron.Settings, megatron.FLAG_PREFIX)
    _check_options(megatron.Settings(**given).backend_options())


def _shape(choices: Choices) -> None:
    good = {
        "hidden": 128,
        "intermediate": 64,
        "num_experts": 8,
        "topk": 2,
        "activation": Activation.SILU,
        "gated": True,
        "num_ranks": 2,
        "max_tokens": 64,
        "skip_zero_probs": False,
        "clamp_value": 7.0,
        "linear_offset": 1.0,
        "glu_interleave": 32,
    }
    config = MoEConfig(**_changed(choices, good))
    hash(config)
    capacity = value_of(choices) if choices.flag() else None
    rows = planner.plan_buffer_rows(config, capacity=capacity)
    if rows.worst_case % 128 or not 0 <= rows.expected <= rows.worst_case + 64 * 2**16:
        raise AssertionError(f"{config} with a capacity of {capacity} gives {rows}")


def _check_options(options: dict[str, Any]) -> None:
    """The kernel's backend has to be able to use whatever an adapter accepted."""
    accepted = BackendOptions(**options)
    if not 1 <= int(accepted.timeout * 1e9) <= 2**62:
        raise AssertionError(f"a timeout of {accepted.timeout} s is no number of nanoseconds")
    if accepted.row_bound not in (None, "auto") and not accepted.row_bound * 2**28 < 2**63:
        raise AssertionError(f"{accepted.row_bound} times the mean is no number of rows")


def _kernel_options(choices: Choices) -> None:
    good = dataclasses.asdict(BackendOptions())
    _check_options({**_changed(choices, good), "symmetric_memory": "cuda"})


def _plan_capacity(choices: Choices) -> None:
    good = {
        "num_tokens": 4096,
        "topk": 2,
        "num_experts": 64,
        "capacity_factor": 1.25,
        "num_ranks": 4,
        "min_capacity": 0,
        "tile": 128,
    }
    given = _changed(choices, good)
    plan = planner.plan_capacity(**given)
    if not 0 <= plan.pad_rows < plan.tile:
        raise AssertionError(f"{given} gives {plan}")


def _dispatch_volume(choices: Choices) -> None:
    good = {"num_routes": 100, "num_experts": 8, "capacity": 64, "hidden": 128, "element_bytes": 2}
    given = _changed(choices, good)
    volume = planner.dispatch_volume(**given)
    if not 0 <= volume.saved_ratio <= 1:
        raise AssertionError(f"{given} saves {volume.saved_ratio}")


def _align(choices: Choices) -> None:
    align_capacity(value_of(choices), value_of(choices))


_TARGETS: dict[str, Callable[[Choices], None]] = {
    "deepspeed": _deepspeed,
    "megatron from code": _megatron_code,
    "megatron's command line": _megatron_command_line,
    "shape": _shape,
    "kernel options": _kernel_options,
    "plan_capacity": _plan_capacity,
    "dispatch_volume": _dispatch_volume,
    "align_capacity": _align,
}
