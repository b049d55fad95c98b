"""Calls the hooks of Megatron's DDP once for all experts of a layer, where it has one for each.

DDP hooks every parameter's gradient and, with ``--overlap-param-gather``, waits in every module's
forward for each of its parameters. With 128 experts these are 256 nodes of autograd and twice as
many calls of Python, in every micro-batch, beside one launch. In all micro-batches but the last a
hook has nothing to do once a launch has added the gradient; and one wait for each bucket is enough.
"""

import weakref
from collections.abc import Sequence
from operator import attrgetter, is_
from types import ModuleType
from typing import Any

import torch

from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.autograd import dummy_grads

_HOOK = "flashmoe_ddp_hook"
"""Attribute of a parameter: the hook that DDP has registered for its gradient."""
_FEW = 8
"""Parameters of a module that are not worth a list of its buckets."""
_wants_grad = attrgetter("requires_grad")
_hooks_of = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))


def patch_ddp(module: ModuleType) -> None:
    """Notes the hooks that DDP makes, and waits once for each bucket of a module's parameters.

    Args:
        module: ``megatron.core.distributed.distributed_data_parallel``.
    """
    ddp = module.DistributedDataParallel
    patch(ddp, "_make_backward_post_hook", _make_backward_post_hook)
    patch(ddp, "_make_forward_pre_hook", _make_forward_pre_hook)


class _Hook:
    """A hook of DDP's, which is no part of what a parameter is saved with.

    It holds neither. DDP keeps each parameter's node of autograd, and the node keeps the parameter
    where Python's garbage collector does not see it: both would live forever.
    """

    def __init__(self, ddp: Any, call: Function) -> None:
        self.ddp = weakref.ref(ddp)
        self.call = weakref.ref(call)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def _make_backward_post_hook(original: Function) -> Function:
    def make(ddp: Any, param: torch.nn.Parameter) -> Function:
        hook: Function = original(ddp, param)
        setattr(param, _HOOK, _Hook(ddp, hook))
        return hook

    return make


class _Representatives:
    """Stands for a module in a hook that asks for its parameters: one of each bucket."""

    def __init__(self, ddp: Any, module: torch.nn.Module) -> None:
        self.held = tuple(module._parameters.values())
        groups = ddp.param_to_bucket_group
        known = {
            id(groups[param]): param
            for param in reversed(self.held)
            if param is not None and param in groups
        }
        self._params = [*known.values()][::-1]

    def parameters(self, recurse: bool) -> list[torch.nn.Parameter]:
        """The first parameter of each bucket."""
        return self._params


def _make_forward_pre_hook(original: Function) -> Function:
    def make(ddp: Any) -> Function:
        hook: Function = original(ddp)
        known: weakref.WeakKeyDictionary[torch.nn.Module, _Representatives]
        known = weakref.WeakKeyDictionary()

        def call(module: torch.nn.Module, *given: Any) -> Any:
            held = module._parameters
            if len(held) < _FEW:
                return hook(module, *given)
            stand_in = known.get(module)
            if stand_in is None or not _same(held.values(), stand_in.held):
                stand_in = known[module] = _Representatives(ddp, module)
            return hook(stand_in, *given)

        return call

    return make


def _same(values: Any, others: Sequence[object]) -> bool:
    return len(values) == len(others) and all(map(is_, values, others))


class ExpertHooks:
    """What DDP does with the gradients of all of a layer's experts.

    Args:
        params: The experts' parameters, of which each has its hook.
    """

    def __init__(self, params: tuple[torch.Tensor, ...]) -> None:
        self.params = params
        hooks = [getattr(param, _HOOK) for param in params]
        groups = [
            hook.ddp().param_to_bucket_group[param]
            for hook, param in zip(hooks, params, strict=True)
        ]
        self._first = hooks[0]
        self._calls = [hook.call() for hook in hooks]
        self._groups = list({id(group): group for group in groups}.values())

    @classmethod
    def of(cls, params: tuple[torch.Tensor, ...]) -> "ExpertHooks | None":
        """Makes them for parameters whose hooks a layer may call itself; ``None`` where it may not.

        It may not where a parameter has no ``main_grad`` or no hook, or one that waits for
        something else, or has zeros added to its gradient.
        """
        for param in params:
            hook = getattr(param, _HOOK, None)
            ddp = hook and hook.ddp()
            if (
                ddp is None
                or not hasattr(param, "main_grad")
                or getattr(param, "skip_backward_post_hook", False)
                or getattr(param, "zero_out_wgrad", False)
                or param not in ddp.param_to_bucket_group
            ):
                return None
        return cls(params)

    def serve(self, params: tuple[torch.Tensor, ...]) -> bool:
        """Whether these are still the hooks of these parameters, all trained and hooked no more."""
        return (
            _same(params, self.params)
            and getattr(params[0], _HOOK, None) is self._first
            and all(map(_wants_grad, params))
            and not any(any(map(hooks_of, params)) for hooks_of in _hooks_of)
        )

    def are_due(self) -> bool:
        """Whether DDP may reduce what has been added, as it does in the last micro-batch."""
        return any(group.is_last_microbatch for group in self._groups)

    def __call__(self) -> None:
        """Does what autograd would: gives each parameter a gradient and calls its hook."""
        for param, call, dummy in zip(
            self.params, self._calls, dummy_grads(self.params), strict=True
        ):
            param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            param.grad = dummy
            call()
