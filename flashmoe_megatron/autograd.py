"""Makes a backend differentiable: one autograd node per layer and call."""

import dataclasses
from typing import Any

import torch

from flashmoe_megatron.backend import Backend, ExpertWeights, WeightGrad
from flashmoe_megatron.checks import check_tokens
from flashmoe_megatron.errors import FlashMoEError


def moe_apply(
    backend: Backend,
    x: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    weights: ExpertWeights,
    *,
    accumulate_into_main_grad: bool = False,
) -> torch.Tensor:
    """Applies a layer's routed experts, with gradients for tokens, probabilities and weights.

    Collective over the backend's group, forward and backward: every rank makes the same calls in
    the same order. Without grad mode, or if no input requires a gradient, nothing is saved.
    Several calls may be pending at once. What a backend saves lives as long as autograd keeps the
    node's tensors: until backward without ``retain_graph``, or, under activation checkpointing or
    saved-tensor hooks, as these decide.

    Args:
        backend: Computes the layer.
        x: ``[num_tokens, hidden]``, contiguous and 16-byte aligned.
        probs: ``[num_tokens, num_experts]`` float32 or ``x.dtype``.
        routing_map: ``[num_tokens, num_experts]`` bool.
        weights: The local experts, parameters or views of parameters. To take experts out of one
            stacked parameter use ``unbind``, whose gradient is a single stack.
        accumulate_into_main_grad: Add the gradient of each weight that has a ``main_grad`` to it,
            set the weight's ``grad_added_to_main_grad`` and return a dummy to autograd, so that
            hooks on the parameter fire (Megatron's fused gradient accumulation). The dummy is
            uninitialised for all that autograd may assume, zero if the weight's
            ``zero_out_wgrad`` is set. Weights without ``main_grad`` get ordinary gradients.

    Returns:
        ``[num_tokens, hidden]`` in ``x.dtype``, the sum over each token's experts.

    Raises:
        ShapeError: A tensor is not what the layer was built for.
        RoutingError: The routing is not usable.
        FlashMoEError: In backward, if it is asked for a graph of itself (``create_graph=True``).
    """
    check_tokens(backend.config, x, probs, routing_map)
    tensors = (x, probs, *weights.fc1, *weights.fc2)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return backend.forward(x, probs, routing_map, weights, training=False)[0]
    out = _RoutedExperts.apply(  # type: ignore[no-untyped-call]
        backend,
        weights,
        accumulate_into_main_grad,
        routing_map,
        *tensors,
    )
    assert isinstance(out, torch.Tensor)
    return out


class _RoutedExperts(torch.autograd.Function):
    """The node. Weights are inputs, so that autograd sees them; the tokens are not saved here."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        weights: ExpertWeights,
        accumulate_into_main_grad: bool,
        routing_map: torch.Tensor,
        x: torch.Tensor,
        probs: torch.Tensor,
        *weight_inputs: torch.Tensor,
    ) -> torch.Tensor:
        out, saved = backend.forward(x, probs, routing_map, weights, training=True)
        tensors: list[torch.Tensor] = []
        ctx.skeleton = _take_tensors(saved, tensors)
        ctx.save_for_backward(*weight_inputs, *tensors)
        ctx.backend = backend
        # The objects themselves: a hook on saved tensors may return copies without main_grad.
        ctx.owners = weight_inputs
        ctx.transposed = weights.transposed
        ctx.accumulate_into_main_grad = accumulate_into_main_grad
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise FlashMoEError(
                "the gradient of the MoE layer was asked for with create_graph=True, but the layer "
                "can be differentiated only once"
            )
        num_weights = len(ctx.owners)
        num_experts = num_weights // 2
        values = ctx.saved_tensors
        weights = ExpertWeights(
            fc1=values[:num_experts],
            fc2=values[num_experts:num_weights],
            transposed=ctx.transposed,
        )
        saved = _give_tensors(ctx.skeleton, values[num_weights:])
        is_fused = [
            ctx.accumulate_into_main_grad and getattr(owner, "main_grad", None) is not None
            for owner in ctx.owners
        ]
        destinations = [
            WeightGrad(owner.main_grad, accumulate=True)
            if fused
            else WeightGrad(torch.empty(owner.shape, dtype=owner.dtype, device=owner.device), False)
            for owner, fused in zip(ctx.owners, is_fused, strict=True)
        ]
        grad_x, grad_probs = ctx.backend.backward(
            grad_outputs[0].contiguous(),
            saved,
            weights,
            destinations[:num_experts],
            destinations[num_experts:],
        )
        grads: list[torch.Tensor | None] = [grad_x, grad_probs]
        for owner, fused, destination in zip(ctx.owners, is_fused, destinations, strict=True):
            if fused:
                owner.grad_added_to_main_grad = True
                grads.append(_dummy_grad(owner))
            else:
                grads.append(destination.buffer)
        # Autograd drops the gradients of inputs that need none.
        return None, None, None, None, *grads


_dummies: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}


def _dummy_grad(weight: torch.Tensor) -> torch.Tensor:
    """A gradient that only makes hooks fire; one buffer for all weights of one kind.

    Detached, so that autograd takes it as the parameter's ``grad`` without a copy.
    """
    key = (weight.shape, weight.dtype, weight.device)
    if key not in _dummies:
        _dummies[key] = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    dummy = _dummies[key]
    if getattr(weight, "zero_out_wgrad", False):
        dummy.zero_()
    return dummy.detach()


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
    if type(value) in (tuple, list):
        return type(value)(_take_tensors(item, tensors) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _Rebuild(
            type(value),
            {
                field.name: _take_tensors(getattr(value, field.name), tensors)
                for field in dataclasses.fields(value)
            },
        )
    return value


@dataclasses.dataclass(frozen=True)
class _Rebuild:
    kind: type
    fields: dict[str, Any]


def _give_tensors(skeleton: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Undoes :func:`_take_tensors`."""
    if isinstance(skeleton, _Taken):
        return tensors[skeleton.index]
    if type(skeleton) in (tuple, list):
        return type(skeleton)(_give_tensors(item, tensors) for item in skeleton)
    if isinstance(skeleton, _Rebuild):
        fields = {name: _give_tensors(item, tensors) for name, item in skeleton.fields.items()}
        return skeleton.kind(**fields)
    return skeleton
