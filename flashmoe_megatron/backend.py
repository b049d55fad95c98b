"""What every backend offers: the routed experts of one layer, forward and backward.

The CUDA kernel and the reference in plain torch both implement :class:`Backend`; the autograd
function, the adapters and the tests know nothing else of them.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from flashmoe_megatron.config import Keep, MoEConfig
from flashmoe_megatron.errors import (
    ConfigError,
    FlashMoEError,
    ShapeError,
    reason_of,
    told_error,
)
from flashmoe_megatron.router import Router
from flashmoe_megatron.telemetry.record import LaunchRecord


@dataclass(frozen=True)
class ExpertWeights:
    """The local experts' weights, wherever they live; read anew at each call.

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
            them: ``fc1`` has all local experts' gates and behind them all their ups. Only for
            backends that take it (:attr:`Backend.takes_split`).
    """

    fc1: tuple[torch.Tensor, ...]
    fc2: tuple[torch.Tensor, ...]
    _: KW_ONLY
    transposed: bool = False
    fc1_bias: tuple[torch.Tensor, ...] = ()
    fc2_bias: tuple[torch.Tensor, ...] = ()
    split: bool = False

    def __post_init__(self) -> None:
        set_tuples(self, ("fc1", "fc2", "fc1_bias", "fc2_bias"))

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

    Args:
        weights: The object.
        kinds: Its attributes.

    Raises:
        ShapeError: One is a tensor, or nothing that has tensors.
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
    """One tensor for each expert.

    Args:
        tensors: Tensors of one expert or of a stack.
        num_dims: The dimensions of one expert's.
    """
    return tuple(
        one
        for tensor in tensors
        for one in (tensor.unbind() if tensor.dim() > num_dims else (tensor,))
    )


class WeightGrad(NamedTuple):  # cheap to make: a backward makes one for each weight
    """Where the gradient of one weight goes, or of one stack of weights.

    Attributes:
        buffer: Same shape and layout as the weight; float32 or the weight's dtype.
        accumulate: Add to what the buffer holds (Megatron's ``main_grad``) or overwrite it.
    """

    buffer: torch.Tensor
    accumulate: bool

    def store(self, value: torch.Tensor) -> None:
        """Adds or writes a gradient, in the buffer's dtype."""
        if self.accumulate:
            self.buffer.add_(value)
        else:
            self.buffer.copy_(value)


class Untold:
    """What a backward was refused for, which only a forward can tell the other ranks.

    The next forward raises it on every rank. Where peers wait for this rank's part in the backward,
    that goes on with gradients of NaN.
    """

    def __init__(self) -> None:
        self._error: FlashMoEError | None = None

    def put_off(self, error: FlashMoEError) -> None:
        """Keeps an error for :meth:`tell`."""
        self._error = error

    def keep(
        self, error: FlashMoEError, weights: ExpertWeights, grads: Sequence[Sequence[WeightGrad]]
    ) -> list[list[WeightGrad]]:
        """Puts an error off, and gives the backward that goes on buffers for nobody.

        Args:
            error: Why gradients cannot be written.
            weights: The local experts.
            grads: Where their gradients should go, kind by kind, which become NaN.

        Returns:
            Where they go instead, for nobody: those of fc1, of fc2, and of their biases.
        """
        self.put_off(error)
        for grad in itertools.chain(*grads):
            grad.buffer.fill_(torch.nan)
        kinds = (weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
        return [
            [
                WeightGrad(torch.empty(one.shape, dtype=one.dtype, device=one.device), False)
                for one in kind
            ]
            for kind in kinds
        ]

    def tell(self) -> None:
        """Raises the error, once.

        Raises:
            FlashMoEError: There is one.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def unmatched_backward(unfollowed: Sequence[int]) -> ConfigError:
    """The error of a backward that some ranks do not have.

    Args:
        unfollowed: These ranks, as :attr:`Backend.unfollowed` names them.
    """
    ranks = ", ".join(map(str, unfollowed))
    return ConfigError(
        f"this rank has a backward of its experts and cannot run it alone: none follows this "
        f"forward on rank {ranks}, where grad mode was off or nothing that the experts were given "
        "required a gradient, neither tokens nor probabilities nor weights (all frozen); wanted a "
        "backward on every rank or on none: call with tokens that require a gradient on all ranks "
        "(x.requires_grad_()), also on those whose experts are frozen, and in the same grad mode"
    )


@dataclass
class TrafficCounters:
    """What one rank has put on the links and padded in its own memory since the last reset.

    Attributes:
        rows_sent: Token rows sent to other ranks: dispatched and returned, forward and backward.
        bytes_sent: Bytes of those rows; on the reference also of the routing weights, of
            replicas and of the gradients of both, which the kernel does not count.
        pad_rows_sent: Rows handed to the exchange that stand for no route. Always 0; counted from
            the buffers, not assumed.
        pad_rows_local: Rows that only align experts' segments in this rank's receive buffer.
        rows_crossed: Token rows sent to other hosts, which ``rows_sent`` leaves out.
        bytes_crossed: Bytes of those rows and of their routes.
    """

    rows_sent: int = 0
    bytes_sent: int = 0
    pad_rows_sent: int = 0
    pad_rows_local: int = 0
    rows_crossed: int = 0
    bytes_crossed: int = 0


@dataclass
class Void:
    """What a forward saves that has no result, since not every rank's host knows of its error yet.

    Its output is NaN, and so are the gradients of its backward, in which this rank takes part with
    no tokens.

    Attributes:
        saved: What the backend's backward needs for no tokens.
        reason: From :func:`~flashmoe_megatron.errors.reason_of`.
        probs_shape: The probabilities', and so their gradient's.
        probs_dtype: Theirs.
    """

    saved: Any
    reason: str
    probs_shape: tuple[int, ...] = ()
    probs_dtype: torch.dtype = torch.float32

    def of(self, probs: torch.Tensor) -> "Void":
        """The same for these probabilities."""
        return Void(self.saved, self.reason, tuple(probs.shape), probs.dtype)

    def gradients(self, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """NaN for tokens and probabilities."""
        probs = grad_out.new_full(self.probs_shape, torch.nan, dtype=self.probs_dtype)
        return torch.full_like(grad_out, torch.nan), probs


class Backend(Protocol):
    """Routed experts of one layer on one expert-parallel group.

    Both calls are collective over the group: every rank makes the same calls in the same order,
    also with no tokens. A forward that one rank refuses ends on every rank with that rank's error:
    in that call where every rank's host waits for it. Else its output is NaN on every rank, as are
    those of the forwards behind it, up to the first of which every rank's host knows of the error:
    that one raises it, on all.

    Attributes:
        config: The layer's shape.
        keep: What a forward keeps for its backward.
        rank: This rank in the group.
        num_calls: Forwards in which this rank has taken part, refused ones included.
        takes_split: Whether it reads gate and up projections that are matrices of their own.
    """

    config: MoEConfig
    keep: Keep
    takes_split: bool
    rank: int
    num_calls: int

    @property
    def unfollowed(self) -> tuple[int, ...]:
        """The ranks that have told in the last forward that no backward of it follows there.

        None where this rank's host has not waited for what they tell.
        """
        ...

    @property
    def traffic(self) -> TrafficCounters:
        """What this rank has sent and padded so far."""
        ...

    def take_records(self) -> list[LaunchRecord]:
        """What launches have finished since the last call, oldest first. Not collective.

        Never waits, neither for a device nor for a peer: a launch that is under way is in a later
        call's list. Records that nobody takes are given up, the oldest first. Backends that share
        memory may share their records: then each record is given once, to whoever asks first.
        """
        ...

    def forward(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        weights: ExpertWeights,
        *,
        training: bool,
        followed: bool | None = None,
        first_plan: torch.Tensor | None = None,
        layer: int = 0,
        router: Router | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Applies the routed experts.

        Args:
            x: ``[num_tokens, hidden]``, contiguous.
            probs: ``[num_tokens, num_experts]`` float32 or ``x.dtype``; scales the activation of
                each selected expert before fc2. With indices, ``[num_tokens, choices]``.
            routing_map: ``[num_tokens, num_experts]`` bool; which experts each token selects. Or
                their indices, ``[num_tokens, choices]`` int32 or int64, with at most ``topk``
                choices; -1 selects none.
            weights: The local experts.
            training: Whether what a backward needs is returned as ``saved``.
            followed: Whether a backward will follow, be it that it runs this forward again first.
                The other ranks are told if none does, since all of them have to take part in it.
                By default, ``training``.
            first_plan: Where a backward runs a forward again, what that has returned as ``saved``.
            layer: A number from 0 to 65,535 that comes back in the records of this forward and of
                its backward; evaluation's is marked, by
                :func:`~flashmoe_megatron.telemetry.record.launch_number`.
            router: Computes ``probs`` and ``routing_map`` first, which are its own tensors.

        Returns:
            The sum over the selected experts, ``[num_tokens, hidden]`` in ``x.dtype``, and an
            opaque ``saved``. Without ``training`` that is ``None`` or, if a backward will follow, a
            ``first_plan`` for it. NaN and a :class:`Void`, whether or not
            a backward will follow, where the call ends by an error that is raised later.
        """
        ...

    def refuse(self, reason: str) -> Void | None:
        """Takes part in the other ranks' forward in place of a call that this rank refuses.

        Collective over the group; waits for the other ranks.

        Args:
            reason: From :func:`~flashmoe_megatron.errors.reason_of`; the kernel tells its first 479
                bytes.

        Returns:
            ``None`` where every rank raises the reason in this call. Else the output of this call
            is NaN on every rank, and this is what its backward needs.

        Raises:
            FlashMoEError: Another error ends this call on every rank, which was known before.
            PeerTimeoutError: A rank did not come.
        """
        ...

    def backward(
        self,
        grad_out: torch.Tensor,
        saved: Any,
        weights: ExpertWeights,
        grad_fc1: Sequence[WeightGrad],
        grad_fc2: Sequence[WeightGrad],
        grad_fc1_bias: Sequence[WeightGrad] = (),
        grad_fc2_bias: Sequence[WeightGrad] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes all gradients of one forward.

        Gradients of weights and biases are plain sums over all tokens received from all ranks,
        written or added to their buffers, also (as zeros) for experts without tokens. Gradients
        of biases are asked for exactly where ``weights`` has biases.

        Returns:
            Gradients of ``x`` (``[num_tokens, hidden]``) and of ``probs`` (in its shape, zero where
            not selected), in their inputs' dtypes. Where a gradient of a weight cannot be written,
            these and all buffers are NaN, and the next forward raises the reason on every rank.

        Raises:
            ShapeError: ``grad_out`` is not a gradient of that forward's output; or there is one
                rank, and a gradient of a weight cannot be written.
        """
        ...

    def put_off(self, error: FlashMoEError) -> None:
        """Has the next forward raise an error on every rank. Not collective.

        Args:
            error: Why this rank does not begin a backward.
        """
        ...

    def raise_pending_fault(self) -> None:
        """Raises what a launch has found wrong that the host did not wait for. Not collective.

        Every call looks for it first; whoever replays launches in a graph asks for it here.

        Raises:
            FlashMoEError: A launch could not be completed.
        """
        ...

    def early_fc2_grads(self) -> AbstractContextManager[object] | None:
        """Lets others begin with the gradients of fc2's weights before the backward ends.

        Called after a backward of this backend's, before any other. Not collective.

        Returns:
            A context: what is put on the current stream within it waits for the gradients of fc2's
            weights, and for all that the backward itself has waited for, but not for its end.
            ``None`` where they are complete no earlier than the rest.
        """
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """A backend that can settle on a forward's replicas before the forward."""

    def settle(
        self,
        routing_map: torch.Tensor,
        read_weights: Callable[[], ExpertWeights],
        *,
        layer: int,
    ) -> None:
        """Settles on the experts in spare slots for the next forward of a layer. Collective.

        That forward plans from its own routing which slot computes what. A forward for which
        nothing is settled plans both; so does one on the kernel between which and its settlement
        the group has launched anything else, since layers share their slots.

        Args:
            routing_map: ``[num_tokens, num_experts]`` bool, what is expected of the routing.
            read_weights: Gives the local experts that the forward will have. Where they are read
                ahead of the forward it is called on the stream that reads them, to wait there for
                them; and what it finds wrong is left to the forward to tell all ranks.
            layer: The number that the forward will have.
        """
        ...


class Together:
    """Makes what ends one rank's call before its backend's forward end that call on every rank.

    ``with Together(backend):`` encloses all that a rank does up to that forward, checks above all.
    Within it an error of this package names this rank, as it does on the others.

    Args:
        backend: The layer's.
        may_be_void: The caller goes on behind the block with an output of NaN where the others hear
            of the error late. Else the error is raised here at once, and once more in a later call.

    Attributes:
        void: What the caller's backward needs, if it is to go on with NaN.
        error: Why.
    """

    def __init__(self, backend: Backend, *, may_be_void: bool = False) -> None:
        self.void: Void | None = None
        self.error: Exception | None = None
        self._backend = backend
        self._may_be_void = may_be_void
        self._num_calls = backend.num_calls

    def __enter__(self) -> "Together":
        """Nothing is told before there is an error."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Tells the other ranks, unless the forward has begun, which does so itself."""
        backend = self._backend
        if not isinstance(error, Exception) or backend.num_calls != self._num_calls:
            return False
        reason = reason_of(error)
        try:
            void = backend.refuse(reason)
        except FlashMoEError as trouble:
            raise error from trouble
        if void is not None and self._may_be_void:
            self.void, self.error = void, error
            return True
        if isinstance(error, FlashMoEError) and backend.config.num_ranks > 1:
            raise told_error(backend.rank, reason) from error
        return False
