"""Layers that are timed: ours on any backend, and the baseline of separate kernels."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.bench.correctness import LayerResults
from flashmoe_megatron.bench.problem import Problem, parameters_of
from flashmoe_megatron.bench.unfused import GroupedWeights, unfused_layer
from flashmoe_megatron.call import Backend
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.weights import MATRIX, VECTOR, ExpertWeights, unstacked

T = TypeVar("T")
TIMEOUT_S = 10.0
KINDS = {"fc1": MATRIX, "fc2": MATRIX, "fc1_bias": VECTOR, "fc2_bias": VECTOR}
"""The kinds of experts' parameters, and the dimensions of one expert's."""


class FusedLayer:
    """A backend's layer as a model calls it.

    With ``main_grad`` the experts are Megatron's, with a parameter for each weight; else they are
    those of :class:`~flashmoe_megatron.layer.FlashMoELayer`, with one for all weights of a kind. A
    parameter for each would cost 256 gradients' time on the CPU where Qwen3 has 128 experts.
    """

    def __init__(self, problem: Problem, backend: Backend, *, use_main_grad: bool) -> None:
        self.problem = problem
        self.weights = problem.weights
        # Products of separate kernels take all experts at once.
        if isinstance(backend, ScheduledBackend) or not use_main_grad:
            stacks: dict[str, Any] = {
                kind: (torch.stack([one.detach() for one in each]).requires_grad_(),)
                for kind in KINDS
                if (each := getattr(problem.weights, kind))
            }
            self.weights = ExpertWeights(**stacks)
        self.backend = backend
        self.use_main_grad = use_main_grad
        if use_main_grad:
            for parameter in self.parameters:
                parameter.main_grad = torch.zeros_like(  # type: ignore[attr-defined]
                    parameter, dtype=torch.float32
                )

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """All local weights, fc1's first, and after them the biases if there are any."""
        return parameters_of(self.weights)

    def __call__(self) -> torch.Tensor:
        """One forward."""
        problem = self.problem
        return moe_apply(
            self.backend,
            problem.x,
            problem.probs,
            problem.routing_map,
            self.weights,
            accumulate_into_main_grad=self.use_main_grad,
        )

    def forward_and_backward(self) -> torch.Tensor:
        """One of each; forgets ordinary gradients of an earlier call."""
        problem = self.problem
        return problem.differentiate(self, (problem.x, problem.probs, *self.parameters))

    def results(self) -> LayerResults:
        """The results of one forward and backward."""
        out = self.forward_and_backward()
        problem = self.problem
        name = "main_grad" if self.use_main_grad else "grad"
        assert problem.x.grad is not None
        assert problem.probs.grad is not None
        grads = {
            f"grad_{kind}": list(unstacked([getattr(one, name) for one in each], num_dims))
            for kind, num_dims in KINDS.items()
            if (each := getattr(self.weights, kind))
        }
        return LayerResults(out, problem.x.grad, problem.probs.grad, **grads)


def kernel_layer(problem: Problem, *, use_main_grad: bool = True, **options: Any) -> FusedLayer:
    """The layer on this GPU's kernel, over the default group if the problem has several ranks.

    Args:
        problem: Made by :func:`~flashmoe_megatron.bench.shapes.make_problem`.
        use_main_grad: Weight gradients are added to float32 buffers.
        **options: Further ones of :func:`~flashmoe_megatron.select.select_backend`, ``kind`` where
            it is to be another backend.
    """
    group = dist.group.WORLD if problem.config.num_ranks > 1 else None
    options = {"kind": "kernel", "timeout": TIMEOUT_S, "keep": "all", **options}
    backend = select_backend(problem.config, group, problem.x.device, **options)
    return FusedLayer(problem, backend, use_main_grad=use_main_grad)


class UnfusedLayer:
    """The baseline."""

    def __init__(self, problem: Problem, *, use_main_grad: bool) -> None:
        self.problem = problem
        self.weights = GroupedWeights.of(problem)
        self.main_grads = (
            [torch.zeros_like(w, dtype=torch.float32) for w in self.weights.kinds.values()]
            if use_main_grad
            else []
        )

    def __call__(self) -> torch.Tensor:
        """One forward."""
        return unfused_layer(self.problem, self.weights)

    def forward_and_backward(self) -> torch.Tensor:
        """One of each."""
        parameters = list(self.weights.kinds.values())
        leaves = (self.problem.x, self.problem.topk_weight, *parameters)
        out = self.problem.differentiate(self, leaves)
        for main_grad, parameter in zip(self.main_grads, parameters, strict=False):
            main_grad.add_(parameter.grad)
        return out

    def results(self) -> LayerResults:
        """The results of one forward and backward, in the form of the fused layer's."""
        for main_grad in self.main_grads:
            main_grad.zero_()
        out = self.forward_and_backward()
        problem = self.problem
        assert problem.x.grad is not None
        assert problem.topk_weight.grad is not None
        grad_probs = torch.zeros_like(problem.probs)
        grad_probs.scatter_(1, problem.topk_idx, problem.topk_weight.grad)
        kinds = self.weights.kinds
        grads = self.main_grads or [weight.grad for weight in kinds.values()]
        shares = {
            f"grad_{kind}": list(grad if KINDS[kind] == VECTOR else grad.transpose(1, 2))
            for kind, grad in zip(kinds, grads, strict=True)
        }
        return LayerResults(out, problem.x.grad, grad_probs, **shares)


def without_grad(call: Callable[[], T]) -> Callable[[], T]:
    """The call in evaluation mode."""

    def run() -> T:
        with torch.no_grad():
            return call()

    return run


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, which takes nothing of the host."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
