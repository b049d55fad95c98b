"""Experts whose frozen matrices have low-rank additions (LoRA), as a call of a layer takes them.

A backend computes with the sums, which are made for the length of a call, in forward and again in
backward: nothing but the parameters is kept between the two. Gradients of the sums live as long as
the backward of their layer, where the additions' own gradients are taken from them.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from flashmoe_megatron.errors import ShapeError
from flashmoe_megatron.weights import MATRIX, ExpertWeights, set_tuples, unstacked


@dataclass(frozen=True)
class AdaptedWeights(ExpertWeights):
    """Experts' weights, and what is added to their matrices: ``scale * up @ down`` for each expert.

    ``down`` is ``[rank, inputs]`` and ``up`` ``[outputs, rank]``, each as one matrix that all local
    experts share, as one stack, or as one matrix for each. A projection without additions has none.

    Attributes:
        fc1_down: The first factors of additions to fc1.
        fc1_up: The second ones.
        fc2_down: Likewise for fc2.
        fc2_up: Likewise.
        fc1_scale: Multiplies the products of fc1's factors.
        fc2_scale: Likewise for fc2.
    """

    fc1_down: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)
    fc1_up: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)
    fc2_down: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)
    fc2_up: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)
    fc1_scale: float = field(default=1.0, kw_only=True)
    fc2_scale: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        set_tuples(self, ("fc1_down", "fc1_up", "fc2_down", "fc2_up"))
        if self.transposed or self.split:
            raise ShapeError(
                f"additions to experts' matrices with transposed={self.transposed}, "
                f"split={self.split}: wanted [outputs, inputs] matrices, gate and up rows in one"
            )

    @property
    def additions(self) -> "tuple[Addition, Addition]":
        """The addition to fc1 and that to fc2."""
        return (
            Addition("fc1", self.fc1, self.fc1_down, self.fc1_up, self.fc1_scale),
            Addition("fc2", self.fc2, self.fc2_down, self.fc2_up, self.fc2_scale),
        )

    def join(self) -> ExpertWeights:
        """Adds everything up, in memory of its own.

        Raises:
            ShapeError: A factor's shape, dtype or device does not fit its matrices.
        """
        with torch.no_grad():
            fc1, fc2 = (addition.sums() for addition in self.additions)
        return ExpertWeights(fc1, fc2, fc1_bias=self.fc1_bias, fc2_bias=self.fc2_bias)

    def trained(self, wanted: Sequence[bool]) -> list[bool]:
        """Tells which of the backend's tensors get a gradient, in their order.

        Args:
            wanted: Says for each of all tensors, in the order of the fields, whether its gradient
                is wanted. A matrix needs one, too, for factors of its addition.
        """
        left = iter(wanted)
        fc1, fc2, fc1_bias, fc2_bias = (
            [next(left) for _ in kind]
            for kind in (self.fc1, self.fc2, self.fc1_bias, self.fc2_bias)
        )
        for kind, factors in (
            (fc1, (*self.fc1_down, *self.fc1_up)),
            (fc2, (*self.fc2_down, *self.fc2_up)),
        ):
            of_factors = [next(left) for _ in factors]  # all of them, before the next kind's
            if any(of_factors):
                kind[:] = [True] * len(kind)
        return [*fc1, *fc2, *fc1_bias, *fc2_bias]


@dataclass(frozen=True)
class Addition:
    """Adds ``scale * up @ down`` to every expert's matrix of one projection."""

    name: str
    matrices: tuple[torch.Tensor, ...]
    down: tuple[torch.Tensor, ...]
    up: tuple[torch.Tensor, ...]
    scale: float

    def sums(self) -> tuple[torch.Tensor, ...]:
        """Returns a tensor for each of the matrices', with the addition; themselves without one."""
        if not self.down and not self.up:
            return self.matrices
        self._check()
        experts = unstacked(self.matrices, MATRIX)
        room = experts[0].new_empty(len(experts), *experts[0].shape)
        downs, ups = (_each(factor, len(experts)) for factor in (self.down, self.up))
        for out, one, down, up in zip(room, experts, downs, ups, strict=True):
            torch.addmm(one, up, down, alpha=self.scale, out=out)
        return tuple(_as_the_matrices(room, self.matrices))

    def grads(self, of_sums: torch.Tensor, wants: Sequence[bool]) -> Iterator[torch.Tensor | None]:
        """Yields the gradients of ``down`` and then of ``up``, as far as they are wanted.

        Args:
            of_sums: ``[num_experts, outputs, inputs]``, the gradients of :meth:`sums`.
            wants: Says for each factor whether its gradient is wanted.
        """
        downs, ups = (torch.stack(_each(each, len(of_sums))) for each in (self.down, self.up))
        left = iter(wants)
        for is_down, factors in ((True, self.down), (False, self.up)):
            is_wanted = [next(left) for _ in factors]
            if not any(is_wanted):
                yield from itertools.repeat(None, len(factors))
                continue
            grad = torch.bmm(ups.mT, of_sums) if is_down else torch.bmm(of_sums, downs.mT)
            grad *= self.scale
            if len(factors) > 1:
                parts: Sequence[torch.Tensor] = grad.unbind()
            elif factors[0].dim() > MATRIX:
                parts = (grad,)
            else:
                parts = (grad.sum(0, dtype=torch.float32).to(grad.dtype),)
            yield from (one if want else None for one, want in zip(parts, is_wanted, strict=True))

    def _check(self) -> None:
        experts = unstacked(self.matrices, MATRIX)
        outputs, inputs = experts[0].shape
        for kind, factors in (("down", self.down), ("up", self.up)):
            found = unstacked(factors, MATRIX)
            if len(found) not in (1, len(experts)):
                raise ShapeError(
                    f"{self.name}_{kind} has {len(found)} matrices, wanted one for all or one for "
                    f"each of {len(experts)} experts"
                )
            for one in found:
                wanted = (one.shape[0], inputs) if kind == "down" else (outputs, one.shape[-1])
                if tuple(one.shape) != wanted:
                    raise ShapeError(
                        f"{self.name}_{kind} is {tuple(one.shape)}, wanted "
                        + (f"(rank, {inputs})" if kind == "down" else f"({outputs}, rank)")
                    )
                look, matrix = (one.dtype, one.device), experts[0]
                if look != (matrix.dtype, matrix.device):
                    raise ShapeError(
                        f"{self.name}_{kind} is {one.dtype} on {one.device}, wanted "
                        f"{matrix.dtype} on {matrix.device}, as the experts' matrices"
                    )
        ranks = unstacked(self.down, MATRIX)[0].shape[0], unstacked(self.up, MATRIX)[0].shape[1]
        if ranks[0] != ranks[1]:
            raise ShapeError(f"{self.name}'s factors have ranks {ranks[0]} and {ranks[1]}")


class AdaptedGrads:
    """Buffers for the gradients of :meth:`AdaptedWeights.join`, not initialized.

    Attributes:
        buffers: One for each tensor that the backend gets, kind by kind; ``None`` for one whose
            gradient is not wanted.
    """

    def __init__(self, weights: AdaptedWeights, wanted: Sequence[bool]) -> None:
        """Makes buffers; ``wanted`` is of all tensors, in the order of the fields."""
        self._weights, self._wanted = weights, wanted
        left = iter(weights.trained(wanted))
        self._stacks: list[torch.Tensor | None] = []
        self.buffers: list[list[torch.Tensor | None]] = []
        for addition in weights.additions:
            trained = [next(left) for _ in addition.matrices]
            if addition.down and all(trained):
                experts = unstacked(addition.matrices, MATRIX)
                stack = experts[0].new_empty(len(experts), *experts[0].shape)
                self._stacks.append(stack)
                self.buffers.append([*_as_the_matrices(stack, addition.matrices)])
            else:
                self._stacks.append(None)
                self.buffers.append(_buffers(addition.matrices, trained))
        for biases in (weights.fc1_bias, weights.fc2_bias):
            self.buffers.append(_buffers(biases, [next(left) for _ in biases]))

    def grads(self) -> list[torch.Tensor | None]:
        """Returns the gradients of all tensors, in the order of the fields."""
        weights = self._weights
        own = list(itertools.chain(*self.buffers))
        found = [grad if want else None for grad, want in zip(own, self._wanted, strict=False)]
        wants = list(self._wanted[len(own) :])
        for addition, stack in zip(weights.additions, self._stacks, strict=True):
            num = len(addition.down) + len(addition.up)
            mine, wants = wants[:num], wants[num:]
            if stack is None or not any(mine):
                found += [None] * num
            else:
                found += addition.grads(stack, mine)
        return found


def _each(factors: tuple[torch.Tensor, ...], num_experts: int) -> tuple[torch.Tensor, ...]:
    """Returns every expert's matrix of a factor."""
    found = unstacked(factors, MATRIX)
    return found * num_experts if len(found) == 1 else found


def _as_the_matrices(
    stack: torch.Tensor, matrices: tuple[torch.Tensor, ...]
) -> Iterator[torch.Tensor]:
    """Yields views of a stack of all experts that have the matrices' shapes."""
    sizes = [len(one) if one.dim() > MATRIX else 1 for one in matrices]
    for part, one in zip(stack.split_with_sizes(sizes), matrices, strict=True):
        yield part if one.dim() > MATRIX else part[0]


def _buffers(tensors: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
    return [
        torch.empty(one.shape, dtype=one.dtype, device=one.device) if want else None
        for one, want in zip(tensors, wanted, strict=True)
    ]
