"""Lists settings that mean another thing under the name of a dispatcher that we replace.

Under our own name the user has asked for our meaning of them; under the other's, for its own.
"""

from typing import Any

from flashmoe_megatron.adapters.megatron.config.asked import (
    ROW_BOUND,
    graphs_part,
    is_set,
    recomputes,
)
from flashmoe_megatron.adapters.megatron.config.refusals import Refusal
from flashmoe_megatron.adapters.megatron.dispatcher import FIELD, replaced_name
from flashmoe_megatron.adapters.megatron.settings import DISPATCHER_TYPE, flag_of

OUR_NAME = f"{FIELD} {DISPATCHER_TYPE}"


def _frees_graphed_norm(config: Any) -> bool:
    """Tells whether Megatron frees what a graph of the layer's first steps hands to the experts."""
    is_graphed = graphs_part("moe_router")(config) and graphs_part("moe_preprocess")(config)
    return is_graphed and recomputes("layernorm")(config)


OTHER_MEANINGS: tuple[Refusal, ...] = (
    Refusal(
        ROW_BOUND,
        "--moe-expert-rank-capacity-factor",
        lambda config: bool(replaced_name(config)) and is_set(ROW_BOUND)(config),
        f"under {FIELD} flex it drops the rows beyond it, here it is a bound; leave it out, pass "
        f"{flag_of('row_bound')}, or ask for the bound with {OUR_NAME}",
    ),
    Refusal(
        "recompute_modules",
        "--recompute-modules layernorm beside a CUDA graph of moe_router and moe_preprocess",
        lambda config: bool(replaced_name(config)) and _frees_graphed_norm(config),
        "under another dispatcher's name Megatron frees the norm's output, which is what experts "
        f"read here; leave out layernorm or moe_preprocess, or pass {OUR_NAME}, with which "
        "Megatron keeps it",
    ),
)
"""Checked when a MoE layer is built, before the table of our own name."""
