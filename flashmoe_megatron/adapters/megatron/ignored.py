"""What a TransformerConfig may ask for that changes nothing with the flashmoe dispatcher.

The result is what was asked for all the same: the layer does it in any case, or has no use for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashmoe_megatron.adapters.megatron.asked import (
    Asks,
    is_set,
    recomputes,
    recomputes_layers,
)
from flashmoe_megatron.adapters.megatron.settings import DISPATCHER_TYPE, Settings, flag_of


@dataclass(frozen=True)
class Ignored:
    """One setting that is accepted and chooses nothing.

    Attributes:
        name: Field of TransformerConfig.
        flag: The flag as the user writes it.
        is_asked: Whether a configuration asks for it.
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
"""The user hears of each when the first MoE layer is built."""


def ignored_settings(config: Any, settings: Settings) -> Iterator[str]:
    """What a configuration and the user's settings ask for and changes nothing, a sentence each."""
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
