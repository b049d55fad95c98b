"""Experts' weights as the backends take them, where their gradients go, and other forms of both."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import repeat
from typing import NamedTuple

import torch

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.promise import Making, Promise


class Tensors:
    """Has tensors in tuples, which are its fields."""

    @functools.cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, in the order of the fields."""
        # Not by dataclasses.fields: this may run before every launch.
        kinds = (value for value in vars(self).values() if isinstance(value, tuple))
        return tuple(itertools.chain.from_iterable(kinds))


@dataclass(frozen=True)
class ExpertWeights(Tensors):
    """The local experts' weights, wherever they live; read again at each call.

    Each tensor is one expert's or, with one more dimension in front, a stack of several experts'.
    The tensors of a kind hold all local experts in order. Lists of them become tuples.

    Attributes:
        fc1: ``[fc1_rows, hidden]`` or ``[num_experts, fc1_rows, hidden]`` tensors, if gated with
            the gate rows where :attr:`MoEConfig.glu_interleave` says.
        fc2: ``[hidden, intermediate]`` or ``[num_experts, hidden, intermediate]`` tensors.
        transposed: The matrices are ``[hidden, fc1_rows]`` and ``[intermediate, hidden]`` instead
            (the legacy GroupedMLP of Megatron-Core 0.16).
        fc1_bias: ``[fc1_rows]`` or ``[num_experts, fc1_rows]`` tensors, added before the
            activation; empty where the experts have none.
        fc2_bias: ``[hidden]`` or ``[num_experts, hidden]`` tensors, added times the routing weight;
            empty where the experts have none. The kernel wants both kinds or none.
        split: Gate and up rows are matrices of their own, ``[intermediate, hidden]`` or stacks of
            them: ``fc1`` has all local experts' gates and after them all their ups. Only for
            backends that take it (:attr:`~flashmoe_megatron.call.Backend.takes_split`).
        promise: Says when the weights stay as they are, ``None`` if their owner promises nothing.
            Only for tensors whose memory is the layer's own, not made for a call.
    """

    fc1: tuple[torch.Tensor, ...]
    fc2: tuple[torch.Tensor, ...]
    _: KW_ONLY
    transposed: bool = False
    fc1_bias: tuple[torch.Tensor, ...] = ()
    fc2_bias: tuple[torch.Tensor, ...] = ()
    split: bool = False
    promise: Promise | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        set_tuples(self, ("fc1", "fc2", "fc1_bias", "fc2_bias"))

    def making(self, maker: str) -> Making | None:
        """Returns what :meth:`~flashmoe_megatron.promise.Promise.making` does of the matrices."""
        return None if self.promise is None else self.promise.making(maker, (*self.fc1, *self.fc2))

    def per_expert(self) -> "ExpertWeights":
        """The same weights with one tensor for each expert: the own tensors and views of stacks."""
        return ExpertWeights(
            fc1=unstacked(self.fc1, MATRIX),
            fc2=unstacked(self.fc2, MATRIX),
            transposed=self.transposed,
            fc1_bias=unstacked(self.fc1_bias, VECTOR),
            fc2_bias=unstacked(self.fc2_bias, VECTOR),
            split=self.split,
        )


def set_tuples(weights: object, kinds: tuple[str, ...]) -> None:
    """Makes tuples of the lists of tensors that a frozen object got, as autograd looks for tuples.

    Raises:
        ShapeError: An attribute is a tensor, or nothing that has tensors.
    """
    for name in kinds:
        tensors = getattr(weights, name)
        if type(tensors) is tuple:  # nothing else costs anything in a call
            continue
        if isinstance(tensors, torch.Tensor):
            raise ShapeError(
                f"{name} is one tensor of shape {tuple(tensors.shape)}, wanted a tuple of tensors; "
                "a stack of all experts is (stack,)"
            )
        if not isinstance(tensors, Iterable):
            raise ShapeError(f"{name} is a {type(tensors).__name__}, wanted a tuple of tensors")
        object.__setattr__(weights, name, tuple(tensors))


MATRIX, VECTOR = 2, 1
"""Dimensions of one expert's weight and of its bias."""


def unstacked(tensors: Sequence[torch.Tensor], num_dims: int) -> tuple[torch.Tensor, ...]:
    """One tensor for each expert; more dimensions than ``num_dims`` make a stack."""
    found: list[torch.Tensor] = []
    for tensor in tensors:  # runs in every call
        found += tensor.unbind() if tensor.dim() > num_dims else (tensor,)
    return tuple(found)


class WeightGrad(NamedTuple):  # cheap to make: a backward makes one for each weight
    """The target of the gradient of one weight, or of one stack of weights.

    Attributes:
        buffer: Same shape and layout as the weight; float32 or the weight's dtype.
        accumulate: Add to the buffer (Megatron's ``main_grad``) or overwrite it.
    """

    buffer: torch.Tensor
    accumulate: bool

    @classmethod
    def added(cls, buffers: Iterable[torch.Tensor]) -> "list[WeightGrad]":
        """Makes one for each buffer, all of them added, by a loop in C."""
        return list(map(tuple.__new__, repeat(cls), zip(buffers, repeat(True), strict=False)))

    def store(self, value: torch.Tensor) -> None:
        """Adds or writes a gradient, in the buffer's dtype."""
        if self.accumulate:
            self.buffer.add_(value)
        else:
            self.buffer.copy_(value)


def spread(
    targets: Sequence[WeightGrad | None], tensors: Sequence[torch.Tensor], num_dims: int
) -> list[WeightGrad | None]:
    """Gives each expert a target of its own; a stack without one has none for all its experts.

    ``tensors`` are what the gradients are of, one for each target.
    """
    found: list[WeightGrad | None] = []
    for target, tensor in zip(targets, tensors, strict=True):
        if target is None:
            found += [None] * (len(tensor) if tensor.dim() > num_dims else 1)
        else:
            parts = unstacked((target.buffer,), num_dims)
            found += (WeightGrad(part, target.accumulate) for part in parts)
    return found


@dataclass(frozen=True)
class SplitWeights(Tensors):
    """Gated experts with parameters for gate, up and down projection.

    Each tensor is one expert's or, with one more dimension in front, that of several. The kernel
    reads gate and up where they are, and writes their gradients apart. For a backend that wants one
    matrix (without ``takes_split``) they are joined for the length of a call, in forward and again
    in backward. Nothing but the parameters is kept between the two.

    Attributes:
        gate: ``[intermediate, hidden]`` or ``[num_experts, intermediate, hidden]`` tensors, all
            local experts in order.
        up: ``[intermediate, hidden]`` or ``[num_experts, intermediate, hidden]`` tensors, each as
            its gate is.
        down: ``[hidden, intermediate]`` or ``[num_experts, hidden, intermediate]`` tensors.
    """

    gate: tuple[torch.Tensor, ...]
    up: tuple[torch.Tensor, ...]
    down: tuple[torch.Tensor, ...]
    fc1_bias: tuple[torch.Tensor, ...] = ()
    fc2_bias: tuple[torch.Tensor, ...] = ()
    promise: Promise | None = field(default=None, compare=False, kw_only=True)
    """As with :class:`ExpertWeights`; what :meth:`join` copies has none."""

    def __post_init__(self) -> None:
        set_tuples(self, ("gate", "up", "down", "fc1_bias", "fc2_bias"))

    def check(self, config: MoEConfig) -> None:
        """Refuses a layer with rows in blocks, which reads joined rows in another order."""
        if config.glu_interleave:
            raise ConfigError(
                f"glu_interleave={config.glu_interleave} with gate and up projections that are "
                "parameters of their own, which are read gate rows first: wanted 0"
            )

    def apart(self) -> ExpertWeights:
        """The same tensors; for errors see :meth:`join`."""
        self._check_pairs()
        return ExpertWeights(
            fc1=(*self.gate, *self.up),
            fc2=self.down,
            fc1_bias=self.fc1_bias,
            fc2_bias=self.fc2_bias,
            split=True,
            promise=self.promise,
        )

    def join(self) -> ExpertWeights:
        """Copies each gate and its up projection into one tensor.

        Raises:
            ShapeError: A gate and its up projection differ in shape, dtype or device, or a tensor
                is neither one expert's nor those of several.
        """
        self._check_pairs()
        pairs = zip(self.gate, self.up, strict=True)
        return ExpertWeights(
            fc1=tuple(torch.cat(pair, dim=-2) for pair in pairs),
            fc2=self.down,
            fc1_bias=self.fc1_bias,
            fc2_bias=self.fc2_bias,
        )

    def _check_pairs(self) -> None:
        got = [tuple(tensor.shape) for tensor in self.up]
        wanted = [tuple(tensor.shape) for tensor in self.gate]
        if got != wanted:
            raise ShapeError(f"the up projections have shapes {got}, wanted {wanted}, as the gates")
        for name, tensors in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            for tensor in tensors:
                if tensor.dim() not in (MATRIX, MATRIX + 1) or tensor.layout != torch.strided:
                    raise ShapeError(
                        f"a {name} projection is {tensor.layout} of shape {tuple(tensor.shape)}, "
                        "wanted a matrix or a stack of matrices"
                    )
        for gate, up in zip(self.gate, self.up, strict=True):
            if (gate.dtype, gate.device) != (up.dtype, up.device):
                raise ShapeError(
                    f"an up projection is {up.dtype} on {up.device}, wanted {gate.dtype} on "
                    f"{gate.device}, as its gate"
                )


@dataclass(frozen=True)
class WrappedWeights(ExpertWeights):
    """Stacks of experts whose parameters are tensors of a class that wraps others.

    Gradients have the parameters' shapes, and are plain tensors.

    Attributes:
        data_of: Gives a parameter's memory, as the stack that it is.
    """

    data_of: Callable[[torch.Tensor], torch.Tensor] = field(kw_only=True)

    def join(self) -> ExpertWeights:
        """The same weights as plain tensors, in the parameters' memory."""
        return ExpertWeights(
            fc1=tuple(map(self.data_of, self.fc1)),
            fc2=tuple(map(self.data_of, self.fc2)),
            transposed=self.transposed,
            fc1_bias=tuple(map(self.data_of, self.fc1_bias)),
            fc2_bias=tuple(map(self.data_of, self.fc2_bias)),
            promise=self.promise,
        )


class SplitGrads:
    """Buffers for the gradients of :class:`SplitWeights`, not initialized.

    A backend gets them by :meth:`SplitWeights.apart` if they are apart, else by ``join``. A gate
    and its up projection are one product, so that either both have a buffer or none has.

    Attributes:
        buffers: One for each weight that the backend gets, kind by kind and in the same order;
            ``None`` for one whose gradient is not wanted.
    """

    def __init__(self, weights: SplitWeights, wanted: Sequence[bool], *, are_apart: bool) -> None:
        """Makes buffers for the wanted ones of all tensors, which have the order of the fields."""
        self._are_apart = are_apart
        left = iter(wanted)
        gates, ups, *others = (
            list(zip(kind, left, strict=False))
            for kind in (
                weights.gate,
                weights.up,
                weights.down,
                weights.fc1_bias,
                weights.fc2_bias,
            )
        )
        pairs = [
            (gate, of_gate or of_up) for (gate, of_gate), (_, of_up) in zip(gates, ups, strict=True)
        ]
        if are_apart:
            fc1 = [_empty(gate) if is_wanted else None for gate, is_wanted in pairs * 2]
        else:
            fc1 = [
                gate.new_empty(*gate.shape[:-2], 2 * gate.shape[-2], gate.shape[-1])
                if is_wanted
                else None
                for gate, is_wanted in pairs
            ]
        self.buffers = [fc1]
        for kind in others:
            self.buffers.append([_empty(one) if is_wanted else None for one, is_wanted in kind])

    def grads(self) -> list[torch.Tensor | None]:
        """Returns the gradients as the parameters are, contiguous, in the order of the fields."""
        fc1, *others = self.buffers
        if not self._are_apart:
            halves = [(None, None) if buffer is None else buffer.chunk(2, dim=-2) for buffer in fc1]
            fc1 = [
                half if half is None else half.contiguous()
                for each in zip(*halves, strict=True)
                for half in each
            ]
        return [*fc1, *itertools.chain(*others)]


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
