"""The kernel's launches as torch operators, so that profilers, fake tensors and tools see them.

The only file that registers operators. Buffers are made by the caller, who knows their sizes;
``problem`` and ``group`` are addresses of the library's structs, alive during the call. Gradients
are not registered here: the autograd function is outside, which costs half as much per call.
"""

import torch

from flashmoe_megatron import _native
from flashmoe_megatron.config import TILE_M

_LIBRARY = torch.library.Library("flashmoe", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    "plan(Tensor x, Tensor probs, Tensor routing_map, Tensor(a!) plan, int problem, int group)"
    " -> ()",
    "forward(Tensor x, Tensor probs, Tensor routing_map, Tensor(f!) plan, Tensor weight_maps,"
    " Tensor? biases, Tensor(a!) rows, Tensor(b!) act, Tensor(c!) result, Tensor(d!)? preact,"
    " Tensor(e!) out, bool is_planned, int layer, int problem, int group) -> ()",
    "backward(Tensor grad_out, Tensor plan, Tensor weight_maps, Tensor? biases, Tensor preact,"
    " Tensor(a!) rows, Tensor(b!) act, Tensor(c!) dpre, Tensor(d!) result,"
    " Tensor(e!) dprob_partial, Tensor(f!) grad_x, Tensor(g!) grad_probs, int layer, int problem,"
    " int group) -> ()",
    "wgrad(Tensor plan, Tensor x_rows, Tensor rows, Tensor act, Tensor dpre, Tensor grads,"
    " int grads_dtype, bool accumulate, int problem, int group) -> ()",
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]


_DTYPES = {
    torch.float32: _native.FLOAT32,
    torch.bfloat16: _native.BFLOAT16,
    torch.float16: _native.FLOAT16,
}


def dtype_code(dtype: torch.dtype) -> int:
    """The library's number of a dtype: float32, bfloat16 or float16."""
    return _DTYPES[dtype]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _call(function: str, problem: int, group: int, *arguments: object) -> None:
    _native.call(
        function, problem, group, *arguments, group=_native.FlashMoEGroup.from_address(group)
    )


def _input(
    x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
) -> _native.FlashMoEInput:
    return _native.FlashMoEInput(
        num_tokens=x.shape[0],
        probs_dtype=dtype_code(probs.dtype),
        x=x.data_ptr(),
        probs=probs.data_ptr(),
        routing_map=routing_map.data_ptr(),
    )


def _plan(
    x: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    plan: torch.Tensor,
    problem: int,
    group: int,
) -> None:
    _call("plan", problem, group, _input(x, probs, routing_map), plan.data_ptr())


def _forward(
    x: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    plan: torch.Tensor,
    weight_maps: torch.Tensor,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    act: torch.Tensor,
    result: torch.Tensor,
    preact: torch.Tensor | None,
    out: torch.Tensor,
    is_planned: bool,
    layer: int,
    problem: int,
    group: int,
) -> None:
    launch = _native.FlashMoELaunch(
        num_row_blocks=rows.shape[0] // TILE_M,
        num_tokens=out.shape[0],
        layer=layer,
        plan=plan.data_ptr(),
        weight_maps=weight_maps.data_ptr(),
        biases=_address(biases),
        rows=rows.data_ptr(),
        act=act.data_ptr(),
        result=result.data_ptr(),
        preact=_address(preact),
        out=out.data_ptr(),
    )
    _call("forward", problem, group, _input(x, probs, routing_map), launch, int(is_planned))


def _backward(
    grad_out: torch.Tensor,
    plan: torch.Tensor,
    weight_maps: torch.Tensor,
    biases: torch.Tensor | None,
    preact: torch.Tensor,
    rows: torch.Tensor,
    act: torch.Tensor,
    dpre: torch.Tensor,
    result: torch.Tensor,
    dprob_partial: torch.Tensor,
    grad_x: torch.Tensor,
    grad_probs: torch.Tensor,
    layer: int,
    problem: int,
    group: int,
) -> None:
    launch = _native.FlashMoELaunch(
        num_row_blocks=rows.shape[0] // TILE_M,
        num_tokens=grad_out.shape[0],
        grad_probs_dtype=dtype_code(grad_probs.dtype),
        layer=layer,
        plan=plan.data_ptr(),
        weight_maps=weight_maps.data_ptr(),
        biases=_address(biases),
        rows=rows.data_ptr(),
        act=act.data_ptr(),
        dpre=dpre.data_ptr(),
        result=result.data_ptr(),
        preact=preact.data_ptr(),
        dprob_partial=dprob_partial.data_ptr(),
        out=grad_x.data_ptr(),
        grad_probs=grad_probs.data_ptr(),
    )
    _call("backward", problem, group, launch, grad_out.data_ptr())


def _wgrad(
    plan: torch.Tensor,
    x_rows: torch.Tensor,
    rows: torch.Tensor,
    act: torch.Tensor,
    dpre: torch.Tensor,
    grads: torch.Tensor,
    grads_dtype: int,
    accumulate: bool,
    problem: int,
    group: int,
) -> None:
    launch = _native.FlashMoELaunch(
        num_row_blocks=rows.shape[0] // TILE_M,
        plan=plan.data_ptr(),
        rows=rows.data_ptr(),
        act=act.data_ptr(),
        dpre=dpre.data_ptr(),
    )
    _call(
        "wgrad",
        problem,
        group,
        launch,
        x_rows.data_ptr(),
        grads.data_ptr(),
        grads_dtype,
        int(accumulate),
    )


def _writes_only(*_: object) -> None:
    """The fake of every operator: outputs are arguments, so shapes are known."""


for _name, _body in (
    ("plan", _plan),
    ("forward", _forward),
    ("backward", _backward),
    ("wgrad", _wgrad),
):
    _LIBRARY.impl(_name, _body, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"flashmoe::{_name}", _writes_only, lib=_LIBRARY)

plan = torch.ops.flashmoe.plan.default
forward = torch.ops.flashmoe.forward.default
backward = torch.ops.flashmoe.backward.default
wgrad = torch.ops.flashmoe.wgrad.default
