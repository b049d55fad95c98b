"""What becomes of a float16 forward that has overflown."""

import math
from collections.abc import Callable

import torch


def apply_despite_overflow(
    apply: Callable[[torch.Tensor], torch.Tensor], probs: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Calls a layer's routed experts; tokens whose probabilities are NaN get NaN for an output.

    That is how a loss scaler hears of an overflow: the loss is NaN, the step is skipped, training
    goes on. The backends take NaN for the error that it is where nobody scales the loss.

    Args:
        apply: From probabilities to outputs, ``[tokens, hidden]``.
        probs: ``[tokens, ...]``, of all experts or of the chosen ones.
        dtype: Of the tokens; of others than float16 nothing is looked at.

    Returns:
        What ``apply`` does.
    """
    if dtype != torch.float16:
        return apply(probs)
    has_overflown = probs.isnan().any(1, keepdim=True)
    return apply(probs.masked_fill(has_overflown, 0)).masked_fill(has_overflown, math.nan)
