"""Keeps compilers out of a layer, and refuses what would have to see into it.

A layer is a launch of a kernel, or exchanges between ranks that depend on the routing's values.
torch.compile leaves it as it is, and dispatch modes see none of its operators. Transforms of
torch.func, vmap, export and fake tensors cannot do with it what they are for, and would fail
somewhere inside.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _disable_current_modes

from flashmoe_megatron.errors import FlashMoEError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_transform = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state
_mode = torch._C._get_dispatch_mode
_num_modes = torch._C._len_torch_dispatch_stack
_NOTHING = nullcontext()
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


def eager(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Makes a function that compilers leave out: a graph ends before it, another begins after it.

    Neither is compiled again for another number of tokens on the function's account.

    Raises:
        FlashMoEError: In the function, if a transform, a tracer or a mode without values is on.
    """

    @functools.wraps(function)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if _is_seen_into():
            _refuse()
        return function(*args, **kwargs)

    # It imports the compiler, which a program that compiles nothing does not need.
    uncompiled = _disable_dynamo(checked)

    @functools.wraps(function)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(*args, **kwargs)
        # This runs before every launch, in which mostly nothing is on.
        if _transform() is not None or _num_modes() or _tracing_state() is not None:
            return checked(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def unseen() -> AbstractContextManager[object]:
    """Hides operators from the caller's dispatch modes, whichever backend runs them.

    Selective activation checkpointing is such a mode. In a recomputation it gives the tensor that
    an operator returned in the forward, and does not run the operator again. A backend writes into
    buffers and views of them, so that rows would go into buffers of the forward and leave those of
    the recomputation empty. What is made in a first call alone would be missed in its
    recomputation.
    """
    return _disable_current_modes() if _num_modes() else _NOTHING


def hidden(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Returns a function whose operators are :func:`unseen`; itself where there are no modes."""
    if not _num_modes():
        return function

    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with unseen():
            return function(*args, **kwargs)

    return run


def _is_seen_into() -> bool:
    if _transform() is not None or _tracing_state() is not None:
        return True
    return _num_modes() > 0 and (_mode(_FAKE) is not None or _mode(_PROXY) is not None)


def _refuse() -> NoReturn:
    transform = _transform()
    if torch.compiler.is_exporting() or _mode(_PROXY) is not None or _tracing_state() is not None:
        raise FlashMoEError(
            "an MoE layer cannot be exported or traced, since its launches depend on other ranks: "
            "export the parts of the model before it and after it"
        )
    if transform is None:
        raise FlashMoEError(
            "an MoE layer cannot run on fake tensors, whose tokens have no values to be routed by: "
            "call it outside of FakeTensorMode, and ask flashmoe_megatron.plan_buffer_rows for "
            "sizes"
        )
    name = transform.key().name.lower()
    if name == "vmap":
        raise FlashMoEError(
            "an MoE layer cannot run under torch.vmap: call it once, with the mapped dimension "
            "among those of x [..., hidden]"
        )
    raise FlashMoEError(
        f"an MoE layer cannot run under torch.func's transforms ({name}): use .backward() or "
        "torch.autograd.grad, which give its gradients"
    )
