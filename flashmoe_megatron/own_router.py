"""Calls a layer's own router, which begins as an ``nn.Linear`` and may be replaced.

An adapter wraps it, a hook is put on it, or another module takes its place. A call of the module
lets all of them take part.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from flashmoe_megatron.checks import check_readable
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.touched import find_touched


def logits_of(router: nn.Linear, tokens: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Calls a router outside of autocast, its tokens and products in float32.

    Args:
        router: The ``nn.Linear``, or whatever module stands in its place.
        tokens: ``[num_tokens, hidden]``.
        num_experts: Experts of the whole group.

    Returns:
        ``[num_tokens, num_experts]`` float32; differentiable.

    Raises:
        ShapeError: The router gives something else.
    """
    with torch.autocast(tokens.device.type, enabled=False):
        if _what_it_adds(router) is None:
            check_readable("router weight", router.weight)
            return F.linear(tokens.float(), router.weight.float())
        with _Wide():
            logits: torch.Tensor = router(tokens.float())
    check_readable("the router's output", logits)
    wanted = (len(tokens), num_experts)
    if logits.shape != wanted or not logits.is_floating_point():
        raise ShapeError(
            f"the router, of class {type(router).__qualname__}, gives {logits.dtype} of shape "
            f"{tuple(logits.shape)} for tokens of shape {tuple(tokens.shape)}, wanted a logit of "
            f"every token for every expert: floating-point numbers of shape {wanted}"
        )
    return logits.float()


def fusable_weight(router: nn.Linear) -> torch.Tensor:
    """The weight of a router that does nothing but multiply with it, as a launch does.

    Raises:
        ConfigError: The router does more, or something else.
    """
    adds = _what_it_adds(router)
    if adds is not None:
        raise ConfigError(
            f"fuse_router=True with a router that {adds}, which a launch would leave out: wanted "
            "an nn.Linear without bias and hooks, with adapters merged into it; or a layer with "
            "fuse_router=False, which calls its router as a module"
        )
    return router.weight


def _what_it_adds(router: nn.Linear) -> str | None:
    """Names what a router does besides the product with its weight; looks at each call."""
    kind = type(router)
    if kind.forward is not nn.Linear.forward:
        return f"is of class {kind.__module__}.{kind.__qualname__}"
    if router.bias is not None:
        return "has a bias"
    if find_touched([router]):
        return "has hooks or a forward of its own"
    if _has_any_global_hook():
        return "is under hooks on all modules (torch.nn.modules.module.register_module_...)"
    return None


_WIDENED = frozenset(
    (
        F.linear,
        F.layer_norm,
        F.rms_norm,
        torch.addmm,
        torch.einsum,
        torch.matmul,
        torch.mm,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.mm,
    )
)
"""Functions that refuse tokens in float32 together with parameters in bfloat16."""


class _Wide(TorchFunctionMode):
    """Computes in float32 within, for parameters of any dtype.

    They are read where they are used and not cast before the call, since hooks and adapters may
    replace or gather them within it.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _WIDENED:
            args, kwargs = tree_map(_widened, (args, kwargs))
        return function(*args, **(kwargs or {}))


def _widened(given: Any) -> Any:
    is_number = isinstance(given, torch.Tensor) and given.is_floating_point()
    return given.float() if is_number else given
