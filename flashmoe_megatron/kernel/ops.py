"""The kernel's launches as torch operators, so that profilers, fake tensors and tools see them.

If none of them looks, a launch is a plain call: the dispatcher takes as long as all else that
is done here. No other file registers operators. The caller makes the buffers, since it knows their
sizes. A forward without ``scratch`` has it in its plan's memory, where ``scratch_at`` says; without
``rows`` it has them there, too, unless ``rows_at`` is 0.
``problem`` and ``group`` are addresses of the library's structs, alive during the call.
Gradients are not registered here: the autograd function is outside, which costs half as much per
call.
Everything here runs before a launch, while the GPU may be idle, so structs are packed into memory
that is used again.
"""

from collections.abc import Callable
from typing import Any

import torch

from flashmoe_megatron.call import Given
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.router import Router

_LIBRARY = torch.library.Library("flashmoe", "DEF")  # type: ignore[no-untyped-call]
# Either probs and routing_map are given (a map of bools, or indices and their weights), or a
# router's weight and what the router writes: logits, probs and routing_map.
_INPUT = (
    "Tensor x, Tensor? probs, Tensor? routing_map, Tensor? router_weight, Tensor(g!)[]"
    " router_outputs, int score, float scaling_factor, bool is_settled,"
    " bool has_no_backward, Tensor? first_plan"
)
for _schema in (
    f"plan(Tensor(a!) plan, int problem, int group, {_INPUT}) -> ()",
    "forward(Tensor(a!) plan, Tensor weight_maps, Tensor(f!)? weight_copies, Tensor? biases,"
    " Tensor(b!)? rows, Tensor(c!)? preact, Tensor(d!)? scratch, Tensor(e!) out,"
    " int num_row_blocks, bool copies_are_current, bool is_planned, int layer, int scratch_at,"
    " int rows_at, int problem, int group,"
    f" {_INPUT}) -> ()",
    "settle(Tensor route_counts, Tensor? weight_maps, Tensor? biases, int problem, int group)"
    " -> ()",
    "gather(Tensor x, Tensor plan, Tensor(a!) rows, int num_row_blocks, int problem, int group)"
    " -> ()",
    "backward(Tensor grad_out, Tensor plan, Tensor weight_maps, Tensor(d!)? weight_copies,"
    " Tensor? biases, Tensor? rows, Tensor? x, Tensor preact, Tensor(a!) scratch,"
    " Tensor(b!) grad_x, Tensor(c!) grad_probs, Tensor grad_table, int num_row_blocks,"
    " bool copies_are_current, int grads_dtype, bool accumulate, int number, int layer,"
    " int problem, int group) -> ()",
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]


_DTYPES = {
    torch.float32: bindings.FLOAT32,
    torch.bfloat16: bindings.BFLOAT16,
    torch.float16: bindings.FLOAT16,
}


def dtype_code(dtype: torch.dtype) -> int:
    """The library's number of a dtype: float32, bfloat16 or float16."""
    return _DTYPES[dtype]


_INPUTS = bindings.Packed(bindings.FlashMoEInput)
_LAUNCHES = bindings.Packed(bindings.FlashMoELaunch)


def _call(function: str, problem: int, group: int, *arguments: object) -> None:
    status = bindings.function(function)(problem, group, *arguments)
    if status != bindings.OK:
        raise bindings.error(status)


def arguments(given: Given, router: Router | None, *, is_settled: bool) -> tuple[object, ...]:
    """The last arguments of :data:`plan` and :data:`forward`: tokens, and routing or a router.

    Without ``router`` the routing is given, or has been computed. It is settled if the last launch
    was :data:`settle`, for this forward.
    """
    calls = is_settled, not given.followed, given.first_plan
    if router is None:
        return given.x, given.probs, given.routing_map, None, [], 0, 1.0, *calls
    config = router.config
    score = bindings.SOFTMAX if config.pre_softmax else bindings.SOFTMAX_OF_CHOSEN
    if config.score == "sigmoid":
        score = bindings.SIGMOID
    written = [router.logits, router.probs, router.routing_map]
    return given.x, None, None, router.weight, written, score, config.scaling_factor, *calls


def _input(
    x: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor | None,
    router_weight: torch.Tensor | None,
    router_outputs: list[torch.Tensor],
    score: int,
    scaling_factor: float,
    is_settled: bool,
    has_no_backward: bool,
    first_plan: torch.Tensor | None,
) -> int:
    logits = None
    if router_weight is not None:
        logits, probs, routing_map = router_outputs
    assert probs is not None
    assert routing_map is not None
    is_map, routing = routing_map.dtype == torch.bool, routing_map.data_ptr()
    _INPUTS.pack(
        x.shape[0],
        _DTYPES[probs.dtype],
        score,
        0 if is_map else routing_map.element_size(),
        0 if is_map else routing_map.shape[1],
        is_settled,
        x.data_ptr(),
        probs.data_ptr(),
        routing if is_map else 0,
        0 if is_map else routing,
        0 if router_weight is None else router_weight.data_ptr(),
        0 if logits is None else logits.data_ptr(),
        scaling_factor,
        has_no_backward,
        0 if first_plan is None else first_plan.data_ptr(),
        0,  # no refusal
    )
    return _INPUTS.address


def _plan(plan: torch.Tensor, problem: int, group: int, *given: Any) -> None:
    _call("plan", problem, group, _input(*given), plan.data_ptr())


def _forward(
    plan: torch.Tensor,
    weight_maps: torch.Tensor,
    weight_copies: torch.Tensor | None,
    biases: torch.Tensor | None,
    rows: torch.Tensor | None,
    preact: torch.Tensor | None,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
    num_row_blocks: int,
    copies_are_current: bool,
    is_planned: bool,
    layer: int,
    scratch_at: int,
    rows_at: int,
    problem: int,
    group: int,
    *given: Any,
) -> None:
    of_plan = plan.data_ptr()
    of_rows = of_plan + rows_at if rows_at else 0
    _LAUNCHES.pack(
        num_row_blocks,
        out.shape[0],
        0,
        layer,
        0,
        copies_are_current,
        of_plan,
        weight_maps.data_ptr(),
        0 if weight_copies is None else weight_copies.data_ptr(),
        0 if biases is None else biases.data_ptr(),
        of_rows if rows is None else rows.data_ptr(),
        0 if preact is None else preact.data_ptr(),
        of_plan + scratch_at if scratch is None else scratch.data_ptr(),
        out.data_ptr(),
        0,
        0,
    )
    of_input = _input(*given)
    status = bindings.function("forward")(problem, group, of_input, _LAUNCHES.address, is_planned)
    if status != bindings.OK:  # not by `_call`, which takes longer
        raise bindings.error(status)


def _settle(
    route_counts: torch.Tensor,
    weight_maps: torch.Tensor | None,
    biases: torch.Tensor | None,
    problem: int,
    group: int,
) -> None:
    tables = (None if table is None else table.data_ptr() for table in (weight_maps, biases))
    _call("settle", problem, group, route_counts.data_ptr(), *tables)


def _gather(
    x: torch.Tensor,
    plan: torch.Tensor,
    rows: torch.Tensor,
    num_row_blocks: int,
    problem: int,
    group: int,
) -> None:
    of_plan, of_rows = plan.data_ptr(), rows.data_ptr()
    tensors = of_plan, 0, 0, 0, of_rows, 0, 0, 0, 0, 0
    _LAUNCHES.pack(num_row_blocks, x.shape[0], 0, 0, 0, False, *tensors)
    _call("gather", problem, group, _LAUNCHES.address, x.data_ptr())


def _backward(
    grad_out: torch.Tensor,
    plan: torch.Tensor,
    weight_maps: torch.Tensor,
    weight_copies: torch.Tensor | None,
    biases: torch.Tensor | None,
    rows: torch.Tensor | None,
    x: torch.Tensor | None,
    preact: torch.Tensor,
    scratch: torch.Tensor,
    grad_x: torch.Tensor,
    grad_probs: torch.Tensor,
    grad_table: torch.Tensor,
    num_row_blocks: int,
    copies_are_current: bool,
    grads_dtype: int,
    accumulate: bool,
    number: int,
    layer: int,
    problem: int,
    group: int,
) -> None:
    _LAUNCHES.pack(
        num_row_blocks,
        grad_out.shape[0],
        _DTYPES[grad_probs.dtype],
        layer,
        grad_probs.shape[1],
        copies_are_current,
        plan.data_ptr(),
        weight_maps.data_ptr(),
        0 if weight_copies is None else weight_copies.data_ptr(),
        0 if biases is None else biases.data_ptr(),
        0 if rows is None else rows.data_ptr(),
        preact.data_ptr(),
        scratch.data_ptr(),
        grad_x.data_ptr(),
        grad_probs.data_ptr(),
        0 if x is None else x.data_ptr(),
    )
    addresses = grad_out.data_ptr(), grad_table.data_ptr()
    _call(
        "backward",
        problem,
        group,
        _LAUNCHES.address,
        *addresses,
        grads_dtype,
        accumulate,
        number,
    )


def _writes_only(*_: object) -> None:
    """The fake of every operator: outputs are arguments, so shapes are known."""


_is_profiled = torch.autograd._profiler_enabled
_num_modes = torch._C._len_torch_dispatch_stack


def _launcher(name: str, body: Callable[..., None]) -> Callable[..., None]:
    """Registers an operator; returns its call, which is its body's alone if nothing looks."""
    _LIBRARY.impl(name, body, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"flashmoe::{name}", _writes_only, lib=_LIBRARY)
    operator = getattr(torch.ops.flashmoe, name).default

    def launch(*arguments: object) -> None:
        (operator if _is_profiled() or _num_modes() else body)(*arguments)

    return launch


plan = _launcher("plan", _plan)
forward = _launcher("forward", _forward)
settle = _launcher("settle", _settle)
gather = _launcher("gather", _gather)
backward = _launcher("backward", _backward)
