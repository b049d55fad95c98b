"""Experts whose frozen matrices have low-rank additions (LoRA), as a call of a layer takes them.

A backend computes with the sums, which are made for the length of a call, in forward and again in
backward: nothing but the parameters is kept between the two. The sums get no gradients: those of
the additions' factors are made from the rows of a backward.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from flashmoe_megatron.errors import ShapeError
from flashmoe_megatron.low_rank import FactorGrads, Factors
from flashmoe_megatron.weights import MATRIX, ExpertWeights, set_tuples, unstacked


@dataclass(frozen=True)
class AdaptedWeights(ExpertWeights):
    """Experts' weights, and what is added to their matrices: ``scale * up @ down`` for each expert.

    ``down`` is ``[rank, inputs]`` and ``up`` ``[outputs, rank]``, each as one matrix that all local
    experts share, as one stack, or as one matrix for each. A projection without additions has none.

    Attributes:
        fc1_down: The factors of additions to fc1 that multiply its inputs.
        fc1_up: The factors that make fc1's outputs of these products.
        fc2_down: The factors of additions to fc2 that multiply its inputs.
        fc2_up: The factors that make fc2's outputs of these products.
        fc1_scale: Multiplies the products of fc1's factors.
        fc2_scale: Multiplies the products of fc2's factors.
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

    def trains_fc1(self, wanted: Sequence[bool]) -> bool:
        """Tells whether fc1's matrices or factors of their addition get a gradient.

        ``wanted`` says so for each of all tensors, in the order of the fields.
        """
        return any(wanted[: len(self.fc1)]) or self.trains_factors_of_fc1(wanted)

    def trains_factors_of_fc1(self, wanted: Sequence[bool]) -> bool:
        """Tells whether factors of fc1's addition get a gradient; ``wanted`` is as above."""
        num_own = sum(map(len, (self.fc1, self.fc2, self.fc1_bias, self.fc2_bias)))
        num_factors = len(self.fc1_down) + len(self.fc1_up)
        return any(wanted[num_own : num_own + num_factors])


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

    def factor_grads(self, wanted: Sequence[bool]) -> FactorGrads:
        """Begins the gradients of ``down`` and then of ``up``, as far as they are wanted."""
        return FactorGrads(self.down, self.up, self.scale, wanted)

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
    """The parts that compute the gradients of one backward of :class:`AdaptedWeights`.

    Attributes:
        buffers: Not initialized, one for each tensor that is no factor, kind by kind; ``None`` for
            one whose gradient is not wanted.
        factors: One for each projection whose addition has a factor that is trained.
    """

    def __init__(self, weights: AdaptedWeights, wanted: Sequence[bool]) -> None:
        """Makes buffers; ``wanted`` is of all tensors, in the order of the fields."""
        left = iter(wanted)
        kinds = (weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
        self.buffers = [_buffers(kind, [next(left) for _ in kind]) for kind in kinds]
        self._nums: list[int] = []
        made: list[FactorGrads | None] = []
        for addition in weights.additions:
            of_factors = [next(left) for _ in (*addition.down, *addition.up)]
            self._nums.append(len(of_factors))
            is_any = any(of_factors)
            made.append(addition.factor_grads(of_factors) if is_any else None)
        self.factors = Factors(*made)

    def grads(self) -> list[torch.Tensor | None]:
        """Returns the gradients of all tensors, in the order of the fields."""
        found = list(itertools.chain(*self.buffers))
        for num, factors in zip(self._nums, self.factors, strict=True):
            found += [None] * num if factors is None else factors.grads()
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
