"""Makes a backend differentiable: one autograd node per layer and call."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch._C._functorch import unwrap_if_dead

from flashmoe_megatron.adapted import AdaptedGrads, AdaptedWeights
from flashmoe_megatron.call import Backend, NaNResult, Together, unmatched_backward
from flashmoe_megatron.checks import check_choices_dtype, check_kinds, check_number, check_readable
from flashmoe_megatron.config import check_class, check_switch
from flashmoe_megatron.eager import eager, hidden
from flashmoe_megatron.errors import ConfigError, FlashMoEError, ShapeError, reason_of, told_error
from flashmoe_megatron.low_rank import NO_FACTORS
from flashmoe_megatron.router import Router, refuse_forward_mode, refuse_second_derivative
from flashmoe_megatron.telemetry.record import MOST_NUMBERS
from flashmoe_megatron.weights import (
    MATRIX,
    VECTOR,
    ExpertWeights,
    SplitGrads,
    SplitWeights,
    WeightGrad,
    WrappedWeights,
    spread,
)

AfterBackward = Callable[[Sequence[torch.Tensor]], None]
"""Takes the fc2 weights whose gradients a backward adds to main_grad."""


class MainGrads(Protocol):
    """Has backwards add weights' gradients to ``main_grad``, and learns of each weight by a hook.

    The hook is on the weight's gradient accumulator, which autograd runs once in a backward pass,
    after every contribution. A gradient that was added elsewhere reaches it as none, or as a dummy.
    """

    gives_dummies: bool

    def begin(self, accumulators: Sequence[Any] | None) -> list[bool] | None:
        """Begins a backward of a layer, given the weights' nodes that accumulate their gradients.

        These are in the weights' order, ``None`` for frozen ones, or ``None`` where this pass runs
        them all. Returns which weights' gradients are added to ``main_grad``, ``None`` where all
        are; autograd gets the others.
        """
        ...

    def is_due(self) -> bool:
        """Returns whether the sums of this pass will be reduced as soon as they are complete."""
        ...


OnSaved = Callable[[Any], None]
"""Takes what a forward has saved, which keeps rows of tokens as ``rows`` and the first projection's
outputs as ``preact``, if it keeps them."""


class Gradients(NamedTuple):
    """Says where a backward puts the gradients of weights; see :func:`moe_apply`."""

    accumulate_into_main_grad: bool = False
    after_backward: AfterBackward | None = None
    main_grads: MainGrads | None = None

    @property
    def may_add(self) -> bool:
        """Tells whether some may be added to a ``main_grad``, as far as a pass accumulates them."""
        return self.accumulate_into_main_grad or self.main_grads is not None


ORDINARY, FUSED = Gradients(), Gradients(accumulate_into_main_grad=True)


class LayerCall(NamedTuple):
    """A call of a layer, but for the tensors that autograd gives gradients.

    Attributes:
        backend: Computes the layer.
        weights: The local experts, whose tensors are inputs of autograd's as well.
        routing_map: The routing as a backend takes it, ``None`` in place of a call that is refused.
        gradients: What becomes of the weights' gradients.
        void: The output is NaN, and a backward needs this.
    """

    backend: Backend
    weights: ExpertWeights | SplitWeights
    routing_map: torch.Tensor | None
    gradients: Gradients = ORDINARY
    layer: int = 0
    router: Router | None = None
    on_saved: OnSaved | None = None
    void: NaNResult | None = None


@eager
def moe_apply(
    backend: Backend,
    x: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor | None,
    weights: ExpertWeights | SplitWeights,
    *,
    topk_idx: torch.Tensor | None = None,
    topk_weight: torch.Tensor | None = None,
    accumulate_into_main_grad: bool = False,
    ordered_grads: bool = False,
    layer: int = 0,
    router: Router | None = None,
    after_backward: AfterBackward | None = None,
    on_saved: OnSaved | None = None,
    main_grads: MainGrads | None = None,
) -> torch.Tensor:
    """Applies a layer's routed experts, with gradients for tokens, probabilities and weights.

    Collective over the backend's group, forward and backward: every rank makes the same calls in
    the same order. Without grad mode, or if no input requires a gradient, nothing is saved.
    Several calls may be pending at once. What a backend saves lives as long as autograd keeps the
    node's tensors: until backward without ``retain_graph``, or, under activation checkpointing or
    saved-tensor hooks, as these decide. A backend whose ``keep`` is "preactivations" fetches the
    rows of tokens again in backward; one whose ``keep`` is "inputs" saves the inputs alone, and a
    backward runs the forward again: the same bits for less memory and more time.

    Args:
        backend: Computes the layer.
        x: ``[num_tokens, hidden]``, contiguous and 16-byte aligned.
        probs: ``[num_tokens, num_experts]`` float32 or ``x.dtype``, contiguous; ``None`` if the
            routing is given by indices.
        routing_map: ``[num_tokens, num_experts]`` bool, contiguous; ``None`` with ``probs``.
        weights: The local experts, parameters or views of parameters, of one expert or of a stack,
            whose gradient is one stack. As :class:`~flashmoe_megatron.weights.SplitWeights`, gate
            and up projections that are parameters of their own; as
            :class:`~flashmoe_megatron.weights.WrappedWeights`, stacks of another class; as
            :class:`~flashmoe_megatron.adapted.AdaptedWeights`, with low-rank additions.
        topk_idx: In place of ``routing_map``: ``[num_tokens, choices]`` int32 or int64, contiguous,
            the experts of each token in any order, at most ``topk`` and each at most once; -1 is
            none. Results have the same bits as with the map of the same choices.
        topk_weight: In place of ``probs``: ``[num_tokens, choices]`` float32 or ``x.dtype``,
            contiguous; its gradient has its order.
        accumulate_into_main_grad: Add the gradient of each weight that has a ``main_grad`` to it,
            set the weight's ``grad_added_to_main_grad`` and return a dummy to autograd, so that
            hooks on the parameter fire (Megatron's fused gradient accumulation). The dummy is
            uninitialised for all that autograd may assume, zero if the weight's
            ``zero_out_wgrad`` is set. Biases, which that fusion leaves out, and weights without
            ``main_grad`` get ordinary gradients, and so do all ``SplitWeights`` and
            ``AdaptedWeights``.
        ordered_grads: Give the parameters their gradients in reverse order of ``weights``. Else
            their order depends on what else is in a rank's graph, since autograd runs the nodes
            that accumulate them as they lie in a heap; ZeRO pairs the ranks' gradients by order.
        layer: A number from 0 to 65,535 that comes back in the records of this forward and of its
            backward. What :func:`~flashmoe_megatron.telemetry.record.launch_number` makes of it
            says more: a negative number is evaluation's.
        router: Fills ``probs`` and ``routing_map`` in, which
            :func:`~flashmoe_megatron.router.open_router` has made, in the same launch.
        after_backward: Called in backward when the backend's has been issued, before hooks on the
            parameters; in it and in these hooks the backend's ``early_fc2_grads`` may be used.
        on_saved: Called in a forward that saves something, before hooks on saved tensors.
        main_grads: In place of ``accumulate_into_main_grad``: adds gradients that no other
            code has to see, whatever else autograd brings for a weight, and leaves no mark on it.
            ``after_backward`` is called where it is due. None with ``SplitWeights`` and
            ``AdaptedWeights``.

    Returns:
        ``[num_tokens, hidden]`` in ``x.dtype``, the sum over each token's experts.

    Raises:
        ConfigError: Both forms of routing are given, or none as a whole; or gate and up
            projections are given apart where rows of fc1 are in blocks or experts not gated; or an
            argument that is no tensor is of another class.
        ShapeError: A tensor is not what the layer was built for.
        RoutingError: The routing is not usable: a token selects too many experts or one twice, an
            index is out of range, or a weight is NaN.
        FlashMoEError: In backward, if it is asked for a graph of itself (``create_graph=True``).
        ConfigError: In backward, if some rank has no backward of this call; that rank raises an
            error in its next call.
    """
    gradients = ORDINARY
    num_calls: int | None = None
    try:
        num_calls = backend.num_calls
        if (  # no function of this package runs where classes are right
            accumulate_into_main_grad.__class__ is not bool
            or ordered_grads.__class__ is not bool
            or layer.__class__ is not int
            or not -MOST_NUMBERS <= layer < MOST_NUMBERS
            or (after_backward is not None and not callable(after_backward))
            or (on_saved is not None and not callable(on_saved))
            or (main_grads is not None and not hasattr(main_grads, "begin"))
        ):
            check_switch("accumulate_into_main_grad", accumulate_into_main_grad)
            check_switch("ordered_grads", ordered_grads)
            check_number(layer)
            _check_called(after_backward=after_backward, on_saved=on_saved)
            _check_main_grads(main_grads)
        if after_backward is not None or main_grads is not None:
            gradients = Gradients(accumulate_into_main_grad, after_backward, main_grads)
        elif accumulate_into_main_grad:
            gradients = FUSED
        given, routing = _one_routing(probs, routing_map, topk_idx, topk_weight)
        if not torch.is_grad_enabled():
            return _evaluate(backend, x, given, routing, weights, layer=layer, router=router)
        call = LayerCall(backend, weights, routing, gradients, layer, router, on_saved)
        return apply(call, x, given, ordered_grads=ordered_grads)
    except Exception as error:
        routes = zip(_ROUTING, (probs, routing_map, topk_idx, topk_weight), strict=True)
        tensors = {"x": x, **{name: one for name, one in routes if one is not None}}
        check = functools.partial(_check_classes, weights, tensors, router)
        together = Together(backend, may_be_void=True, num_calls=num_calls)
        if not together.ends(error, check):
            if not isinstance(error, FlashMoEError):
                check()
            raise
    if router is not None:
        router.spoil()  # no forward fills its tensors in
    of_routes = topk_weight if probs is None else probs
    return void_call(together, backend, x, of_routes, weights, gradients)


def _check_called(**functions: object) -> None:
    for name, one in functions.items():
        if one is not None and not callable(one):
            raise ConfigError(f"{name}={one!r}: wanted a function, or None")


def _check_main_grads(main_grads: object) -> None:
    if main_grads is not None and not hasattr(main_grads, "begin"):
        kind = type(main_grads).__name__
        raise ConfigError(f"main_grads is of class {kind}: wanted a MainGrads, or None")


def _check_classes(weights: object, tensors: Mapping[str, object], router: object) -> None:
    """Refuses arguments of a call of :func:`moe_apply` that are of another class."""
    check_kinds(weights, **tensors)
    check_class("router", router, (Router, type(None)), "what open_router gives, or None")


def _check_special(weights: ExpertWeights | SplitWeights, backend: Backend) -> None:
    """Checks what plain weights need no check of."""
    if isinstance(weights, SplitWeights):
        weights.check(backend.config)
    if isinstance(weights, AdaptedWeights):
        _check_additions(backend)


def _evaluate(
    backend: Backend,
    x: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    weights: ExpertWeights | SplitWeights,
    *,
    layer: int,
    router: Router | None,
) -> torch.Tensor:
    """Returns the output of a forward that no backward follows."""
    taken: Any = weights
    if type(weights) is not ExpertWeights or weights.split:
        _check_special(weights, backend)
        taken = _as_taken(weights, backend)
    forward = hidden(backend.forward)
    return forward(x, probs, routing_map, taken, training=False, layer=layer, router=router)[0]


def apply(
    call: LayerCall, x: torch.Tensor, probs: torch.Tensor, *, ordered_grads: bool = False
) -> torch.Tensor:
    """Does what :func:`moe_apply` does, for a caller whose errors end the call on every rank."""
    weights, backend = call.weights, call.backend
    parameters: Sequence[torch.Tensor] = weights.tensors if torch.is_grad_enabled() else ()
    if not parameters or not any(map(_requires_grad, (x, probs, *parameters))):
        assert call.routing_map is not None
        return _evaluate(
            backend, x, probs, call.routing_map, weights, layer=call.layer, router=call.router
        )
    _check_special(weights, backend)
    if ordered_grads:
        # Each view is a node with a place of its own in the order of backward.
        parameters = [parameter.view_as(parameter) for parameter in parameters]
    return _node(call, x, probs, parameters)


def _node(
    call: LayerCall, x: torch.Tensor, probs: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    anchors = (_anchor().leaf,) if call.gradients.may_add else ()
    # Function.apply would look at every parameter for a wrapper that stays when a transform of
    # torch.func ends: 11 us for 128 of them. No layer runs within a transform.
    return _apply_node(call, unwrap_if_dead(x), unwrap_if_dead(probs), *parameters, *anchors)


_requires_grad = attrgetter("requires_grad")


def void_call(
    together: Together,
    backend: Backend,
    x: torch.Tensor,
    probs: torch.Tensor | None,
    weights: ExpertWeights | SplitWeights,
    gradients: Gradients = ORDINARY,
) -> torch.Tensor:
    """Returns NaN for a call that this rank rejects when the others learn of it only later.

    Its backward takes part in theirs, and its gradients are NaN. Tokens and ``probs``, which is
    what else gets a gradient, may have any shape.

    Raises:
        FlashMoEError: The call's own, if ``x`` is no plain tensor: NaN can be made for no other. Or
            if the weights are of another class, which get no gradients.
    """
    assert together.void is not None
    assert together.error is not None
    try:
        check_readable("x", x)
        check_kinds(weights)
    except (ConfigError, ShapeError):
        raise told_error(backend.rank, reason_of(together.error)) from together.error
    if not x.is_floating_point():
        x = x.to(torch.float32)
    if type(probs) not in (torch.Tensor, torch.nn.Parameter):
        probs = x.new_empty(0)
    assert probs is not None
    _as_taken(weights, backend)  # as the backward does, or this rank cannot take part in it
    call = LayerCall(backend, weights, None, gradients, void=together.void.of(probs))
    return _node(call, x, probs, weights.tensors)


_ROUTING = ("probs", "routing_map", "topk_idx", "topk_weight")
"""Arguments that give the routing, two of them in each call."""


def _one_routing(
    probs: torch.Tensor | None,
    routing_map: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    topk_weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The form of routing that is given, as a backend takes it."""
    if probs is not None and routing_map is not None and topk_idx is topk_weight is None:
        if routing_map.dtype != torch.bool:
            raise ShapeError(f"routing_map is {routing_map.dtype}, wanted {torch.bool}")
        return probs, routing_map
    if topk_idx is not None and topk_weight is not None and probs is routing_map is None:
        check_choices_dtype(topk_idx)
        return topk_weight, topk_idx
    given = zip(_ROUTING, (probs, routing_map, topk_idx, topk_weight), strict=True)
    listed = ", ".join(name for name, tensor in given if tensor is not None) or "none"
    raise ConfigError(
        f"the routing is given by {listed}: wanted probs and routing_map, or topk_idx and "
        "topk_weight"
    )


def in_backward() -> bool:
    """Returns whether autograd runs a backward pass on this thread, as in recomputation."""
    return torch._C._current_graph_task_id() != -1


class _RoutedExperts(torch.autograd.Function):
    """The node. Weights are inputs, so that autograd sees them; the tokens are not saved here."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode("layer")

    @staticmethod
    def forward(
        ctx: Any, call: LayerCall, x: torch.Tensor, probs: torch.Tensor, *_: torch.Tensor
    ) -> torch.Tensor:
        backend, weights, routing_map = call.backend, call.weights, call.routing_map
        saved: Any = call.void
        if saved is not None:
            out = torch.full_like(x, torch.nan)
        else:
            assert routing_map is not None
            keeps_inputs = backend.keep == "inputs"
            out, saved = hidden(backend.forward)(
                x,
                probs,
                routing_map,
                _as_taken(weights, backend),
                training=not keeps_inputs,
                followed=True,
                layer=call.layer,
                router=call.router,
                trains_fc1=_trains_fc1(ctx, weights),
                gives_rows=_gives_rows(ctx, weights),
            )
            if not isinstance(saved, NaNResult):
                rows = getattr(saved, "rows", None)
                if isinstance(rows, torch.Tensor):
                    backend.weight_grads.row_bytes += rows.nbytes
                if keeps_inputs:
                    saved = _Inputs(x, probs, routing_map, call.layer, saved)
                if call.on_saved is not None:
                    call.on_saved(saved)
        tensors: list[torch.Tensor] = []
        ctx.skeleton = _take_tensors(saved, tensors)
        # The parameters and not views of them: ZeRO-3 frees and gathers them in between.
        main_grads = call.gradients.main_grads
        inputs = weights.tensors if main_grads is None else ()
        ctx.save_for_backward(*inputs, *tensors)
        ctx.versions = 0 if main_grads is None else _versions_of(weights)
        ctx.backend = backend
        ctx.unfollowed = backend.unfollowed if call.void is None else ()
        # The objects themselves: a hook on saved tensors may return copies without main_grad.
        ctx.owners = weights
        ctx.gradients = call.gradients
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kind = grad_outputs[0].device.type
        if torch.is_autocast_enabled(kind):  # which would narrow what the forward has not
            with torch.autocast(kind, enabled=False):
                return _RoutedExperts.backward(ctx, *grad_outputs)
        refuse_second_derivative("layer")
        if ctx.unfollowed:  # before anything that would wait for these ranks
            error = unmatched_backward(ctx.unfollowed)
            ctx.backend.put_off(error)
            raise told_error(ctx.backend.rank, reason_of(error))
        gradients: Gradients = ctx.gradients
        main_grads = gradients.main_grads
        values, num_saved = ctx.saved_tensors, 0
        weights = ctx.owners
        if main_grads is None:
            num_saved = len(weights.tensors)
            weights = _with_tensors(weights, values[:num_saved])
        else:
            _check_not_changed(weights, ctx.versions)
        saved = _give_tensors(ctx.skeleton, values[num_saved:])
        if isinstance(saved, _Inputs):
            saved = ctx.backend.forward(
                saved.x,
                saved.probs,
                saved.routing_map,
                _as_taken(weights, ctx.backend),
                training=True,
                first_plan=saved.first_plan,
                layer=saved.layer,
                trains_fc1=_trains_fc1(ctx, weights),
                gives_rows=_gives_rows(ctx, weights),
            )[1]  # the output, which the backward does not need, is freed here
        elif isinstance(saved, NaNResult) and not saved.is_put_off and ctx.backend.keep == "inputs":
            saved = _refused_again(ctx.backend, saved)
        wanted = _wanted(ctx, ctx.owners)
        destinations = _destinations_of(ctx, weights, wanted)
        taken = _as_taken(weights, ctx.backend)
        targets = destinations.targets
        grad_x, grad_probs = ctx.backend.backward(
            grad_outputs[0].contiguous(),
            saved,
            taken,
            *(targets.values() if all(wanted) else _spread(targets, taken)),
            factors=destinations.factors,
        )
        _count(ctx.backend, destinations, wanted)
        after_backward = gradients.after_backward
        if after_backward is not None and (main_grads is None or main_grads.is_due()):
            after_backward(destinations.fc2_in_main_grad())
        # Autograd drops the gradients of inputs that need none.
        anchors = (None,) if gradients.may_add else ()
        return None, grad_x, grad_probs, *destinations.grads(), *anchors


_apply_node: Callable[..., torch.Tensor] = super(torch.autograd.Function, _RoutedExperts).apply


def _refused_again(backend: Backend, void: NaNResult) -> NaNResult:
    """Takes part in the forward that a backward of the other ranks runs again."""
    again = backend.refuse(void.reason)
    if again is None:
        raise told_error(backend.rank, void.reason)
    return dataclasses.replace(again, probs_shape=void.probs_shape, probs_dtype=void.probs_dtype)


@dataclasses.dataclass
class _Inputs:
    """The tensors that a forward keeps if ``keep`` is "inputs"."""

    x: torch.Tensor
    probs: torch.Tensor
    routing_map: torch.Tensor
    layer: int
    first_plan: torch.Tensor | None


_KINDS = ("fc1", "fc2", "fc1_bias", "fc2_bias")
_Targets = Mapping[str, Sequence[WeightGrad | None]]


def _wanted(ctx: Any, weights: ExpertWeights | SplitWeights) -> tuple[bool, ...]:
    """Tells which weights' gradients are wanted, in their order: not those of frozen ones."""
    return tuple(ctx.needs_input_grad[_NUM_BEFORE : _NUM_BEFORE + len(weights.tensors)])


def _trains_fc1(ctx: Any, weights: ExpertWeights | SplitWeights) -> bool:
    num = len(weights.fc1 if isinstance(weights, ExpertWeights) else weights.gate + weights.up)
    if isinstance(weights, AdaptedWeights):
        return weights.trains_fc1(_wanted(ctx, weights))
    return any(ctx.needs_input_grad[_NUM_BEFORE : _NUM_BEFORE + num])


def _check_additions(backend: Backend) -> None:
    """Refuses additions to experts' matrices where others compute these experts.

    Raises:
        ConfigError: There are slots, or an expert of the user's own.
    """
    problem = None
    if slots := backend.within.spare_slots:
        problem = f"spare_slots={slots}, which compute other ranks' experts: wanted 0"
    elif slots := backend.host_slots:
        problem = f"host_slots={slots}, which compute other hosts' experts: wanted 0"
    elif (expert := backend.hooks.expert) is not None:
        problem = f"an expert of your own, {type(expert).__name__}: wanted hooks.expert=None"
    if problem is not None:
        raise ConfigError(f"additions to experts' matrices with {problem}")


def _gives_rows(ctx: Any, weights: ExpertWeights | SplitWeights) -> bool:
    if not isinstance(weights, AdaptedWeights):
        return False
    return weights.trains_factors_of_fc1(_wanted(ctx, weights))


_NUM_BEFORE = 3
"""Inputs of the node ahead of the weights."""


def _count(
    backend: Backend, destinations: "_Destinations | _OwnBuffers", wanted: Sequence[bool]
) -> None:
    """Counts the gradients of a backward, which has been launched: nothing waits for this."""
    counters = backend.weight_grads
    counters.buffer_bytes += sum(each.num_bytes for each in destinations.factors.wanted)
    counters.computed += wanted.count(True)
    counters.left_out += wanted.count(False)
    every = list(filter(None, itertools.chain(*destinations.targets.values())))
    if not all(map(itemgetter(1), every)):  # by a loop in C: mostly all are added
        counters.buffer_bytes += sum(one.buffer.nbytes for one in every if not one.accumulate)


def _spread(targets: _Targets, weights: ExpertWeights) -> Iterator[list[WeightGrad | None]]:
    """Gives each expert a target of its own, kind by kind."""
    for kind, num_dims in zip(_KINDS, (MATRIX, MATRIX, VECTOR, VECTOR), strict=True):
        yield spread(targets[kind], getattr(weights, kind), num_dims)


class _Destinations:
    """The targets of the gradients of :class:`ExpertWeights`: buffers of their own, or main_grad.

    ``main_grads`` has learned which gradients are added; without it the parameters are marked.
    """

    factors = NO_FACTORS

    def __init__(
        self, owners: ExpertWeights, targets: _Targets, main_grads: MainGrads | None = None
    ) -> None:
        self._owners, self.targets, self._main_grads = owners, targets, main_grads

    def grads(self) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients for autograd, in the order of the node's inputs."""
        main_grads = self._main_grads
        grads: list[torch.Tensor | None] = []
        for kind in _KINDS:
            targets, owners = self.targets[kind], getattr(self._owners, kind)
            are_added = _all_add(targets)
            if main_grads is not None and not main_grads.gives_dummies:
                grads += (None if _adds(one) else _buffer(one) for one in targets)
                continue
            added = owners
            if not are_added:
                added = [one for one, to in zip(owners, targets, strict=True) if _adds(to)]
            if not added:
                grads += map(_buffer, targets)
                continue
            if main_grads is None:
                for owner in added:
                    owner.grad_added_to_main_grad = True
            dummies = dummy_grads(added)
            if are_added:
                grads += dummies
            else:
                left = iter(dummies)
                grads += (next(left) if _adds(one) else _buffer(one) for one in targets)
        return tuple(grads)

    def fc2_in_main_grad(self) -> list[torch.Tensor]:
        """The fc2 weights whose gradients are added to main_grad."""
        pairs = zip(self._owners.fc2, self.targets["fc2"], strict=True)
        return [owner for owner, target in pairs if _adds(target)]


def _adds(target: WeightGrad | None) -> bool:
    return target is not None and target.accumulate


def _all_add(targets: Sequence[WeightGrad | None]) -> bool:
    given: Any = targets
    return None not in given and all(map(itemgetter(1), given))  # by loops in C


def _buffer(target: WeightGrad | None) -> torch.Tensor | None:
    return None if target is None else target.buffer


def _target(owner: Any, adds: bool, is_wanted: bool) -> WeightGrad | None:
    if not is_wanted:
        return None
    main_grad = getattr(owner, "main_grad", None) if adds else None
    if main_grad is not None:
        return WeightGrad(main_grad, True)
    return WeightGrad(
        torch.empty(owner.shape, dtype=owner.dtype, device=owner.device), accumulate=False
    )


def _targets(owners: ExpertWeights, adds: Sequence[bool], wanted: Sequence[bool]) -> _Targets:
    """Chooses the targets of parameters' gradients; ``adds`` tells which go to main_grad."""
    found: dict[str, Sequence[WeightGrad | None]] = dict.fromkeys(_KINDS, ())
    begin = 0
    for kind in _KINDS:
        tensors = getattr(owners, kind)
        if not tensors:
            continue
        end = begin + len(tensors)
        adding, wanting = adds[begin:end], wanted[begin:end]
        main_grads = _main_grads_of(tensors) if all(adding) and all(wanting) else None
        found[kind] = main_grads or list(map(_target, tensors, adding, wanting))
        begin = end
    return found


def _main_grads_of(owners: Sequence[Any]) -> list[WeightGrad | None] | None:
    """The targets of parameters that all have a main_grad; else ``None``."""
    buffers: list[Any] = [getattr(owner, "main_grad", None) for owner in owners]
    has_all = all(map(operator.is_not, buffers, itertools.repeat(None)))
    return [*WeightGrad.added(buffers)] if has_all else None


def _destinations_of(
    ctx: Any, weights: ExpertWeights | SplitWeights, wanted: Sequence[bool]
) -> "_Destinations | _OwnBuffers":
    """Chooses where a backward writes the gradients of its weights, as far as they are wanted."""
    if isinstance(weights, SplitWeights):
        return _OwnBuffers(SplitGrads(weights, wanted, are_apart=ctx.backend.takes_split))
    if isinstance(weights, AdaptedWeights):
        return _OwnBuffers(AdaptedGrads(weights, wanted))
    owners = ctx.owners
    num_weights = len(owners.tensors)
    gradients: Gradients = ctx.gradients
    main_grads = gradients.main_grads
    if main_grads is None:
        adds = [False] * num_weights
        if gradients.accumulate_into_main_grad:
            # The fusion is of weights, which come before biases.
            num_fused = len(owners.fc1) + len(owners.fc2)
            adds[:num_fused] = (
                itertools.repeat(True, num_fused)
                if _is_whole_pass()
                else map(accumulates, _nodes_of(ctx, num_weights)[:num_fused])
            )
        return _Destinations(owners, _targets(owners, adds, wanted))
    chosen = main_grads.begin(None if _is_whole_pass() else _nodes_of(ctx, num_weights))
    adds = [True] * num_weights if chosen is None else chosen
    return _Destinations(owners, _targets(owners, adds, wanted), main_grads)


def _is_whole_pass() -> bool:
    """Returns whether this backward pass runs all accumulators.

    No caller can ask for the anchor's gradient, so a pass that runs its accumulator runs all.
    """
    return accumulates(_anchor().accumulator)


def _nodes_of(ctx: Any, num_weights: int) -> list[Any]:
    """Returns the nodes that get the weights' gradients, ``None`` for frozen ones.

    The anchor's, which comes last, is not among them. Autograd makes an object for each node.
    """
    return [node for node, _ in ctx.next_functions[-num_weights - 1 : -1]]


def accumulates(node: Any) -> bool:
    """Returns whether this backward accumulates the gradient of a leaf.

    It does not for a frozen leaf, nor where only other leaves' gradients are asked for, as
    ``torch.autograd.grad`` does: their main_grad is none of this backward's business.
    """
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what torch.autograd.grad is asked for
        return False


class _OwnBuffers:
    """The buffers for gradients that a backend writes in other forms than the parameters have."""

    def __init__(self, grads: SplitGrads | AdaptedGrads) -> None:
        self._grads = grads
        self.factors = grads.factors if isinstance(grads, AdaptedGrads) else NO_FACTORS
        self.targets: _Targets = {
            kind: [None if buffer is None else WeightGrad(buffer, False) for buffer in buffers]
            for kind, buffers in zip(_KINDS, grads.buffers, strict=True)
        }

    def fc2_in_main_grad(self) -> list[torch.Tensor]:
        """None: these weights get ordinary gradients."""
        return []

    def grads(self) -> Sequence[torch.Tensor | None]:
        return self._grads.grads()


_JOINED = (SplitWeights, WrappedWeights, AdaptedWeights)


def _as_taken(weights: ExpertWeights | SplitWeights, backend: Backend) -> ExpertWeights:
    if type(weights) is ExpertWeights and not weights.split:
        return weights
    if isinstance(weights, SplitWeights) and backend.takes_split:
        return weights.apart()
    if isinstance(weights, ExpertWeights) and weights.split and not backend.takes_split:
        raise ConfigError(
            f"{type(backend).__name__} wants gate and up projections as one matrix: give them as "
            "SplitWeights, which it joins"
        )
    if isinstance(weights, _JOINED):
        return weights.join()
    return weights


_Weights = TypeVar("_Weights", ExpertWeights, SplitWeights)


def _with_tensors(weights: _Weights, tensors: tuple[torch.Tensor, ...]) -> _Weights:
    """The same weights with these tensors, which may be others, in their order."""
    if all(map(operator.is_, tensors, weights.tensors)):  # hooks on saved tensors give others
        return weights
    left = iter(tensors)
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, tuple):
            changes[field.name] = tuple(next(left) for _ in value)
    return dataclasses.replace(weights, **changes)


class _Anchor(NamedTuple):
    """A leaf that belongs to this module alone, and its accumulator."""

    leaf: torch.Tensor
    accumulator: Any


@functools.cache
def _anchor() -> _Anchor:
    """Makes an input that shows a node which kind of backward pass runs it.

    It is on the CPU: there its accumulator has no stream. On a GPU it would have the stream of the
    first forward; the end of every backward waits for it, and a capture of a graph refuses to wait.
    """
    leaf = torch.zeros((), requires_grad=True)
    return _Anchor(leaf, accumulator_of(leaf))


def accumulator_of(leaf: torch.Tensor) -> Any:
    """The node of autograd that accumulates a leaf's gradient; it lives while somebody has it."""
    with torch.enable_grad():
        node = leaf.expand_as(leaf).grad_fn
    assert node is not None
    return node.next_functions[0][0]


_version_of = attrgetter("_version")


def _versions_of(weights: ExpertWeights | SplitWeights) -> int:
    """Counts how often weights were written in place; all that autograd does not keep itself."""
    return sum(map(_version_of, weights.tensors))


def _check_not_changed(weights: ExpertWeights | SplitWeights, versions: int) -> None:
    """Refuses weights that were written in place since the forward, as autograd does."""
    since = _versions_of(weights) - versions
    if since:
        raise FlashMoEError(
            f"the experts' weights were changed in place {since} times between a forward and its "
            "backward: wanted those of the forward; step the optimizer after the last backward"
        )


_dummies: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}


def dummy_grads(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients that only make hooks fire, of weights of one kind: one buffer for each shape.

    Tensors of their own, so that autograd takes each as the parameter's ``grad`` without a copy,
    and all of a shape made by a loop in C. Only stacks of several sizes differ in shape.
    """
    found: list[torch.Tensor] = []
    for shape, group in itertools.groupby(weights, key=attrgetter("shape")):
        alike = list(group)
        key = (shape, alike[0].dtype, alike[0].device)
        if key not in _dummies:
            _dummies[key] = torch.zeros(shape, dtype=alike[0].dtype, device=alike[0].device)
        dummy = _dummies[key]
        zeroed = [getattr(weight, "zero_out_wgrad", False) for weight in alike]
        if any(zeroed):
            dummy.zero_()
        found += map(torch.Tensor.detach, itertools.repeat(dummy, len(alike)))
    return found


@dataclasses.dataclass(frozen=True)
class _Taken:
    """Stands for a tensor that was given to autograd."""

    index: int


def _take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Moves the tensors of nested dataclasses, tuples and lists to a list, leaving their indices.

    Autograd can then free, offload or recompute them as it does with every other layer's. Other
    objects stay where they are.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Taken(len(tensors) - 1)
    kind: Any = type(value)
    is_sequence = kind in (tuple, list)
    if not is_sequence and (isinstance(value, type) or not dataclasses.is_dataclass(value)):
        return value
    items = list(value) if is_sequence else [getattr(value, name) for name in _names_of(kind)]
    places: list[int] = []
    for at, item in enumerate(items):  # recurses only into items that may hold tensors
        if type(item) in _HOLD_NONE:
            continue
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            items[at] = len(tensors) - 1
            places.append(at)
        elif type(item) in (tuple, list) or dataclasses.is_dataclass(item):
            items[at] = _take_tensors(item, tensors)
    return _Rebuild(kind, items, places)


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


_HOLD_NONE = frozenset((int, bool, float, str, torch.dtype, type(None)))
"""Types of most items that hold no tensors."""


class _Rebuild(NamedTuple):
    """Makes a dataclass, a tuple or a list again.

    Its items are tensors' indices at ``places``, perhaps others to be made again, and values.
    """

    kind: type
    items: list[Any]
    places: list[int]


def _give_tensors(skeleton: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if type(skeleton) is _Taken:
        return tensors[skeleton.index]
    if type(skeleton) is not _Rebuild:
        return skeleton
    kind = skeleton.kind
    items = [
        _give_tensors(one, tensors) if type(one) is _Rebuild else one for one in skeleton.items
    ]
    for at in skeleton.places:
        items[at] = tensors[items[at]]
    if kind in (tuple, list):
        return kind(items)
    return kind(**dict(zip(_names_of(kind), items, strict=True)))
