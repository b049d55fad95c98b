"""Keeps checkpoints readable by tools that do not know flashmoe.

Megatron saves its arguments in every checkpoint, and tools that convert or serve one build a model
from them. A model trained with flashmoe has the parameters of one trained with the alltoall
dispatcher, so that is the dispatcher that the saved arguments name. Whoever resumes with flashmoe
says so again: ``--use-checkpoint-args`` never changes the dispatcher of a command line.
"""

import copy
from types import ModuleType
from typing import Any

from flashmoe_megatron.adapters.megatron.settings import DISPATCHER_TYPE, STOCK_DISPATCHER_TYPE
from flashmoe_megatron.adapters.patch import Function, patch


def patch_checkpointing(checkpointing: ModuleType) -> None:
    """Changes the dispatcher in the arguments that ``megatron.training.checkpointing`` saves."""
    patch(checkpointing, "generate_state_dict", _with_stock_dispatcher)


def _with_stock_dispatcher(original: Function) -> Function:
    def generate_state_dict(*args: Any, **kwargs: Any) -> Any:
        state = original(*args, **kwargs)
        saved = state.get("args")
        if getattr(saved, "moe_token_dispatcher_type", None) == DISPATCHER_TYPE:
            state["args"] = copy.copy(saved)
            state["args"].moe_token_dispatcher_type = STOCK_DISPATCHER_TYPE
        return state

    return generate_state_dict
