"""Says once what was asked for and does nothing with the flashmoe dispatcher.

The user learns of settings of a TransformerConfig that change nothing when the first MoE layer is
built: the result is what was asked for all the same, for the layer does it in any case or has no
use for it. The user learns of arguments of Megatron's script when it has set them.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from flashmoe_megatron.adapters import collectives
from flashmoe_megatron.adapters.megatron.config.asked import (
    Asks,
    has_logger,
    is_megakernel,
    is_served,
    is_set,
    recomputes,
    recomputes_layers,
)
from flashmoe_megatron.adapters.megatron.config.communicators import most_ctas
from flashmoe_megatron.adapters.megatron.dispatcher import (
    has_our_name,
    is_ours,
    name_of,
    replaced,
    setting,
)
from flashmoe_megatron.adapters.megatron.settings import (
    DISPATCHER_TYPE,
    FLAG_PREFIX,
    Settings,
    flag_of,
)
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.config import DEFAULT_RESERVED_SMS
from flashmoe_megatron.options import read_flags

logger = logging.getLogger("flashmoe_megatron")


@dataclass(frozen=True)
class Ignored:
    """One setting that is accepted and chooses nothing.

    Attributes:
        why: A sentence without a full stop.
    """

    name: str
    flag: str
    is_asked: Asks
    why: str


IGNORED: tuple[Ignored, ...] = (
    Ignored(
        "recompute_modules",
        "--recompute-modules moe_act",
        recomputes("moe_act"),
        "no forward keeps the activation, every backward computes it again",
    ),
    *(
        Ignored(
            name,
            "--" + name.replace("_", "-"),
            is_set(name),
            "an expert's rows begin at a multiple of 128 in any case",
        )
        # Megatron sets the first one where it is given the second.
        for name in ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
    ),
)
"""The user learns of each when the first MoE layer is built."""


def ignored_settings(config: Any, settings: Settings) -> Iterator[str]:
    """Yields a sentence for each setting of a model that is accepted and changes nothing."""
    for ignored in IGNORED:
        if ignored.is_asked(config):
            yield (
                f"{ignored.flag} changes nothing with --moe-token-dispatcher-type "
                f"{DISPATCHER_TYPE}: {ignored.why}"
            )
    if settings.keep not in ("auto", "all") and recomputes_layers(config):
        yield (
            f"{flag_of('keep')} {settings.keep} costs time in every layer and saves memory in one "
            "at a time, since Megatron computes the whole layer again right before its backward: "
            f"leave out {flag_of('keep')} or the recomputation"
        )


def patch_start(global_vars: ModuleType) -> None:
    """Speaks on rank 0 when the script has set its arguments."""

    def make(original: Function) -> Function:
        def set_global_variables(args: Any, *others: Any, **options: Any) -> Any:
            result = original(args, *others, **options)
            if getattr(args, "rank", 0) == 0:
                for notice in find_notices(args):
                    logger.warning("%s", notice)
            return result

        return set_global_variables

    patch(global_vars, "set_global_variables", make)


def find_notices(args: Any) -> Iterator[str]:
    """Yields a sentence for each argument of the script that has no effect or a risk."""
    defaults = Settings()
    flags = read_flags(args, Settings, FLAG_PREFIX)
    given = [name for name, value in flags.items() if value != getattr(defaults, name)]
    if replaced() and not getattr(args, "num_experts", None):
        yield f"{setting()} is without effect: the model has no experts"
    if not is_ours(args):
        if given and not is_megakernel(args):
            yield (
                f"{_listed(given)} without effect: --moe-token-dispatcher-type is {name_of(args)}, "
                f"wanted {DISPATCHER_TYPE}"
            )
        return
    if not is_served(args):
        if not has_our_name(args):
            return
        yield (
            f"--moe-token-dispatcher-type {DISPATCHER_TYPE} is without effect: the model has no "
            "experts, wanted --num-experts"
        )
        return
    if flags.get("multipath") == "auto":
        if not getattr(args, "use_distributed_optimizer", False):
            yield (
                f"{flag_of('multipath')} is without effect: each rank has all parameters, wanted "
                "--use-distributed-optimizer"
            )
        elif (getattr(args, "num_distributed_optimizer_instances", None) or 1) > 1:
            yield (
                f"{flag_of('multipath')} is without effect: there are several instances of the "
                "distributed optimizer, wanted --num-distributed-optimizer-instances 1"
            )
        elif getattr(args, "ddp_reduce_scatter_with_fp32_accumulation", False):
            yield (
                f"{flag_of('multipath')} is without effect: Megatron reduces in float32 itself, "
                "wanted no --ddp-reduce-scatter-with-fp32-accumulation"
            )
    elif "multipath_watch" in given:
        yield (
            f"{flag_of('multipath_watch')} is without effect: nothing goes over several links, "
            f"wanted {flag_of('multipath')} auto"
        )
    yield from _circle(args, flags)
    if not has_logger(args):
        idle = [
            name for name in given if name in ("metrics", "calibration") and flags[name] != "none"
        ]
        if idle:
            yield (
                f"{_listed(idle)} without effect: no logger is on, wanted --tensorboard-dir or "
                "--wandb-project"
            )
    elif not getattr(args, "tensorboard_dir", None):
        yield (
            "wandb gets flashmoe's metrics and none of Megatron's own, which Megatron logs there "
            "only beside TensorBoard: pass --tensorboard-dir besides --wandb-project"
        )


def _circle(args: Any, flags: Mapping[str, Any]) -> Iterator[str]:
    """Says how much collectives of gradients get, or that one may not fit."""
    most = most_ctas(args)
    allowed = collectives.allowed_ctas()
    if most is None or (most > 0 and collectives.is_small(most)):
        return
    reserved = flags.get("reserved_sms", DEFAULT_RESERVED_SMS)
    if most > 0 and allowed is None:
        yield (
            f"--overlap-grad-reduce: reductions of gradients and gathers of parameters get {most} "
            f"CTAs of NCCL, so that they fit into the {reserved} multiprocessors "
            f"that launches leave; more with a larger {flag_of('reserved_sms')}"
        )
        return
    has = f"NCCL_MAX_CTAS={allowed} allows it more CTAs" if most else "it has no room"
    yield (
        f"--overlap-grad-reduce while launches leave {reserved} multiprocessors: {has}, so "
        f"a reduction and {collectives.circle(flag_of('timeout'))}; wanted "
        f"NCCL_MAX_CTAS unset or at most {most or 1}, and {flag_of('reserved_sms')} 2 or more, or "
        "CUDA_DEVICE_MAX_CONNECTIONS=1"
    )


def _listed(names: list[str]) -> str:
    return f"{', '.join(map(flag_of, names))} {'is' if len(names) == 1 else 'are'}"
