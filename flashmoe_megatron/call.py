"""Defines a call of a layer's experts, and does the steps that are alike in all backends.

The CUDA kernel, the separate kernels and several hosts are a :class:`Backend` each; the autograd
function, the adapters and the tests know nothing else of them.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from flashmoe_megatron.attempts import ATTEMPTS
from flashmoe_megatron.checks import (
    check_kinds,
    check_readable,
    check_tensor,
    check_tokens,
    check_weight_grads,
    check_weights,
)
from flashmoe_megatron.config import Keep, MoEConfig, check_class
from flashmoe_megatron.errors import ConfigError, FlashMoEError, ShapeError, reason_of, told_error
from flashmoe_megatron.hooks import EVERYWHERE, Call, Hooks, Reach
from flashmoe_megatron.low_rank import NO_FACTORS, Factors
from flashmoe_megatron.ranks import OfGroup
from flashmoe_megatron.releases import TORCH
from flashmoe_megatron.router import Router
from flashmoe_megatron.telemetry.record import LaunchRecord
from flashmoe_megatron.weights import MATRIX, VECTOR, ExpertWeights, WeightGrad, unstacked

if _problem := TORCH.problem(torch.__version__):
    # pip has checked that, unless it was asked to leave dependencies alone.
    raise ConfigError(_problem)


class Given(NamedTuple):
    """The arguments of a forward except the weights; see :meth:`Backend.forward`."""

    x: torch.Tensor
    probs: torch.Tensor
    routing_map: torch.Tensor
    training: bool
    followed: bool
    layer: int = 0
    router: Router | None = None
    first_plan: torch.Tensor | None = None
    trains_fc1: bool = True
    gives_rows: bool = False

    def check_kinds(self, weights: object) -> None:
        """Does what :func:`~flashmoe_megatron.checks.check_kinds` does, for a failed forward."""
        check_kinds(weights, x=self.x, probs=self.probs, routing_map=self.routing_map)


Targets = Sequence[WeightGrad | None]
"""The buffers for gradients of one kind of weights; an unwanted gradient has ``None``."""


class Grads(NamedTuple):
    """The targets of gradients of weights and biases, kind by kind.

    If any is not wanted, each expert has a target of its own
    (:func:`~flashmoe_megatron.weights.spread`).
    """

    fc1: Targets
    fc2: Targets
    fc1_bias: Targets = ()
    fc2_bias: Targets = ()


@dataclass
class GradCounters:
    """Counts of one rank's gradients of weights and biases so far, and of memory for them.

    Attributes:
        computed: Tensors whose gradient a backward has computed, once for each backward.
        left_out: Frozen tensors, whose gradient was not wanted, once for each backward.
        buffer_bytes: Bytes of the buffers that backwards have made for gradients; what is added to
            ``main_grad`` needs none.
        row_bytes: Bytes of the tokens' rows that forwards have kept for fc1's gradients.
    """

    computed: int = 0
    left_out: int = 0
    buffer_bytes: int = 0
    row_bytes: int = 0


@dataclass
class TrafficCounters:
    """Rows and bytes that one rank has sent, and rows that it has padded, since the last reset.

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
class NaNResult:
    """Saved state of a forward that failed, but whose error is raised later.

    Not every rank's host knows of the error yet. The output is NaN, and so are the gradients of
    its backward, in which this rank takes part with no tokens. Or every rank has had the error in
    this call and has put it off; then there is no backward to take part in.

    Attributes:
        saved: What the backend's backward needs for no tokens, ``None`` if it is put off.
        reason: From :func:`~flashmoe_megatron.errors.reason_of`.
        probs_shape: The shape of the probabilities, and so of their gradient.
        probs_dtype: The dtype of the probabilities, and so of their gradient.
    """

    saved: Any
    reason: str
    probs_shape: tuple[int, ...] = ()
    probs_dtype: torch.dtype = torch.float32

    @property
    def is_put_off(self) -> bool:
        """Tells whether every rank has put the error off."""
        return self.saved is None

    def of(self, probs: torch.Tensor) -> "NaNResult":
        """Returns the same for these probabilities."""
        return NaNResult(self.saved, self.reason, tuple(probs.shape), probs.dtype)

    def gradients(self, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns NaN for tokens and probabilities."""
        probs = grad_out.new_full(self.probs_shape, torch.nan, dtype=self.probs_dtype)
        return torch.full_like(grad_out, torch.nan), probs


class Backend(OfGroup, ABC):
    """Routed experts of one layer on one expert-parallel group.

    A subclass says what it checks, tells and computes in :meth:`_forward` and :meth:`_backward`.

    Both calls are collective over the group: every rank makes the same calls in the same order,
    also with no tokens. A forward that one rank refuses ends on every rank with that rank's error:
    in that call where every rank's host waits for it. Else its output is NaN on every rank, and so
    are those of the forwards after it, until one begins when every rank's host knows the error:
    that forward raises it, on all ranks.

    Attributes:
        config: The layer's shape.
        keep: What a forward keeps for its backward.
        rank: This rank in the group.
        num_calls: Forwards in which this rank has taken part, refused ones included.
        weight_grads: Counts of its gradients of weights.
        takes_split: Whether it reads gate and up projections that are matrices of their own.
        unfollowed: The ranks that have announced in the last forward that no backward of it follows
            there; none where this rank's host has not waited for their announcements.
        attempts: The steps of this process, which may be repeated.
        hooks: Called before and after the stages of every call that the backend has.
        reads_tokens: Whether a backward takes what it needs of rows that were not kept from the
            caller's tokens, in its own launch.
    """

    reads_tokens: bool = False
    spare_slots: int = 0
    """Places of each rank for replicas of other ranks' experts, that are filled."""
    host_slots: int = 0
    """Places of each rank for experts of other hosts, that are filled."""
    num_hosts: int = 1
    """Hosts of the group, as many ranks on each."""
    kind: ClassVar[str] = ""
    """The choice that it is: "kernel", "scheduled" or "reference"; none over hosts."""
    reach: ClassVar[Reach] = EVERYWHERE
    """The stages that its hooks reach."""

    def __init__(
        self, config: MoEConfig, *, keep: Keep, rank: int, takes_split: bool = False
    ) -> None:
        self.config, self.keep = config, keep
        self.rank, self.takes_split = rank, takes_split
        self.num_calls = 0
        self.weight_grads = GradCounters()
        self.unfollowed: tuple[int, ...] = ()
        self.attempts = ATTEMPTS
        self.hooks = Hooks(self.reach)
        self._pending: Exception | None = None
        self._checked: tuple[object, ...] = ()

    @property
    def within(self) -> "Backend":
        """The backend that computes the experts: over hosts, the one within this host."""
        return self

    @property
    @abstractmethod
    def traffic(self) -> TrafficCounters:
        """Counts of the rows that this rank has sent and padded so far."""
        ...

    @abstractmethod
    def take_records(self) -> list[LaunchRecord]:
        """Returns records of launches finished since the last call, oldest first. Not collective.

        Never waits, neither for a device nor for a peer: a launch that is under way is in a later
        call's list. Records that no caller takes are dropped, the oldest first. Backends that share
        memory may share their records: then only the first caller gets each record.
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
        trains_fc1: bool = True,
        gives_rows: bool = False,
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
                If none does, the other ranks learn it, since all of them have to take part in it.
                By default, ``training``.
            first_plan: Where a backward runs a forward again, what that has returned as ``saved``.
            layer: The number in the records; see :func:`~flashmoe_megatron.autograd.moe_apply`.
            router: Computes ``probs`` and ``routing_map`` first, which are its own tensors.
            trains_fc1: Whether a backward may want gradients of weights of fc1. If not, rows of
                tokens are not kept for them.
            gives_rows: Whether a backward will give rows of tokens to factors of fc1. If so, tokens
                are no substitute for rows, which "auto" then has kept.

        Returns:
            The sum over the selected experts, ``[num_tokens, hidden]`` in ``x.dtype``, and an
            opaque ``saved``. Without ``training`` that is ``None`` or, if a backward will follow, a
            ``first_plan`` for it. NaN and a :class:`NaNResult`, whether or not a backward will
            follow, where the call ends by an error that is raised later.

        Raises:
            ShapeError: A tensor is not what the layer was built for; as all that one rank refuses,
                on every rank.
            RowBoundError: On every rank, if any rank is to receive more rows than ``row_bound``
                allows.
            RoutingError: On every rank, if any rank's routing is unusable.
            PeerTimeoutError: A rank is gone or did not call in time, here and in backward.
        """
        is_followed = training if followed is None else followed
        given = Given(
            x,
            probs,
            routing_map,
            training,
            is_followed,
            layer,
            router,
            first_plan,
            trains_fc1,
            gives_rows,
        )
        try:
            return self._forward(given, weights)
        except FlashMoEError as error:
            if not self.attempts.put_off(error):
                raise
            self.unfollowed = ()
            if router is not None:
                router.spoil()
            out = torch.full_like(x, torch.nan)
            return out, NaNResult(None, reason_of(error)).of(probs)

    @abstractmethod
    def _forward(self, given: Given, weights: ExpertWeights) -> tuple[torch.Tensor, Any]:
        """Does what :meth:`forward` says."""

    def _check(self, given: Given, weights: ExpertWeights) -> None:
        """Raises an error that was put off, or that of arguments which no forward takes."""
        self._raise_pending()
        x, probs, routing_map = given[:3]
        try:
            if type(x) is not torch.Tensor or x.layout != torch.strided or x.is_meta:
                check_readable("x", x)  # which a layer has done, and others have not
            self._check_weights(weights, x.device)
            dtype = weights.fc1[0].dtype
            check_tokens(self.config, x, probs, routing_map, dtype=dtype, device=x.device)
        except (AttributeError, TypeError):
            given.check_kinds(weights)
            raise

    def _routed(self, given: Given) -> Given:
        """Runs the router and the hooks of gate and capacity; returns the call that they make."""
        x, probs, routing_map, router = given.x, given.probs, given.routing_map, given.router
        hooks, call = self.hooks, Call.of("forward", given.layer)
        has_hooks = bool(hooks)
        if has_hooks:
            hooks.probe(self.config, x, probs)
            x = hooks.run("before", "gate", x, call)
        if router is not None:
            if x is not given.x:
                raise ConfigError(
                    "a hook before gate replaced the tokens of a router within the launch, "
                    "which has its gradient from the caller's: wanted fuse_router=False"
                )
            router.run(x, self.config.topk)
        if has_hooks:
            probs = hooks.run("after", "gate", probs, call)
            routing_map = hooks.capped(self.config, probs, routing_map, call)
        return given._replace(x=x, probs=probs, routing_map=routing_map)

    def _check_weights(self, weights: ExpertWeights, device: torch.device) -> None:
        """Checks weights unless the last ones looked the same."""
        kinds = (weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
        looks: list[object] = [device, weights.transposed, weights.split, *map(len, kinds)]
        for one in itertools.chain(*kinds):
            if type(one) not in (torch.Tensor, torch.nn.Parameter) or one.layout != torch.strided:
                looks = [None]  # never the same
                break
            looks += (one.shape, one.stride(), one.dtype, one.device)
        if tuple(looks) != self._checked:
            self._checked = ()
            check_weights(self.config, weights, device)
            self._checked = () if looks == [None] else tuple(looks)

    @abstractmethod
    def refuse(self, reason: str) -> NaNResult | None:
        """Takes part in the other ranks' forward in place of a call that this rank refuses.

        Collective over the group; waits for the other ranks.

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
        grad_fc1: Targets,
        grad_fc2: Targets,
        grad_fc1_bias: Targets = (),
        grad_fc2_bias: Targets = (),
        *,
        factors: Factors = NO_FACTORS,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes all gradients of one forward.

        Gradients of weights and biases are plain sums over all tokens received from all ranks,
        written or added to their buffers, also (as zeros) for experts without tokens. Gradients
        of biases are asked for exactly where ``weights`` has biases. What is frozen has ``None`` in
        place of a target; see :class:`Grads`. ``factors`` take the rows that gradients of weights
        are products of.

        Returns:
            Gradients of ``x`` (``[num_tokens, hidden]``) and of ``probs`` (in its shape, zero where
            not selected), in their inputs' dtypes. Where a gradient of a weight cannot be written,
            these and all buffers are NaN, and the next forward raises the reason on every rank.

        Raises:
            ShapeError: ``grad_out`` is not a gradient of that forward's output; or there is one
                rank, and a gradient of a weight cannot be written.
        """
        grads = Grads(grad_fc1, grad_fc2, grad_fc1_bias, grad_fc2_bias)
        if isinstance(saved, NaNResult) and saved.is_put_off:
            for grad in filter(None, itertools.chain(*grads)):
                grad.buffer.fill_(torch.nan)
            return saved.gradients(grad_out)
        return self._backward(grad_out, saved, weights, grads, factors)

    @abstractmethod
    def _backward(
        self,
        grad_out: torch.Tensor,
        saved: Any,
        weights: ExpertWeights,
        grads: Grads,
        factors: Factors,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Does what :meth:`backward` says."""

    @property
    def _is_alone(self) -> bool:
        """True if no other rank takes part in a backward."""
        return self.config.num_ranks == 1

    def _writable(self, weights: ExpertWeights, grads: Grads) -> tuple[Grads, bool]:
        """Returns where a backward writes, and whether that stays unread as it cannot be right."""
        try:
            check_weight_grads(weights, grads)
        except (AttributeError, TypeError, ShapeError) as error:
            return self._for_nobody(self._unusable(error, grads), weights, grads), True
        return grads, False

    def _unusable(self, error: Exception, grads: Grads) -> ShapeError:
        """Returns what is wrong with gradients that a backward has failed to take.

        Raises:
            ShapeError: The same, where no other rank waits for this one.
            Exception: What the backward has failed with, if that is about something else.
        """
        try:  # asked once there is an error, for a backward's launch would wait for it
            for grad in filter(None, itertools.chain(*grads)):
                check_tensor("the buffer of a weight gradient", grad.buffer)
        except ShapeError as better:
            if self._is_alone:
                raise
            return better
        if self._is_alone or not isinstance(error, ShapeError):
            raise error
        return error

    def _for_nobody(self, error: FlashMoEError, weights: ExpertWeights, grads: Grads) -> Grads:
        """Puts an error off, and fills the gradients with NaN.

        The backward, in which peers wait for this rank, goes on with buffers that are never read.
        """
        self.put_off(error)
        for grad in itertools.chain(*grads):
            if grad is not None and isinstance(grad.buffer, torch.Tensor):
                grad.buffer.fill_(torch.nan)
        kinds = (weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
        unread = []
        for kind, of_kind, num_dims in zip(
            kinds, grads, (MATRIX, MATRIX, VECTOR, VECTOR), strict=True
        ):
            is_each = None in of_kind
            tensors = unstacked(kind, num_dims) if is_each else kind
            wanted = [one is not None for one in of_kind] if is_each else itertools.repeat(True)
            unread.append(
                [
                    WeightGrad(torch.empty(one.shape, dtype=one.dtype, device=one.device), False)
                    if is_wanted
                    else None
                    for one, is_wanted in zip(tensors, wanted, strict=False)
                ]
            )
        return Grads(*unread)

    @staticmethod
    def _spoil(grad_x: torch.Tensor, grad_probs: torch.Tensor, factors: Factors) -> None:
        """Fills a backward's gradients with NaN where weights' gradients stay unread."""
        for grad in (grad_x, grad_probs):
            grad.fill_(torch.nan)
        for one in factors.wanted:
            one.spoil()

    def put_off(self, error: Exception) -> None:
        """Has the next forward raise an error of a backward on all ranks. Not collective."""
        self._pending = error

    def _raise_pending(self) -> None:
        """Raises the error that was put off, once."""
        if self._pending is not None:
            error, self._pending = self._pending, None
            raise error

    def raise_pending_fault(self) -> None:
        """Raises what a launch has found wrong that the host did not wait for. Not collective.

        Every call looks for it first; a caller that replays launches in a graph asks for it here.

        Raises:
            FlashMoEError: A launch could not be completed.
        """

    def early_fc2_grads(self) -> AbstractContextManager[object] | None:
        """Lets others begin with the gradients of fc2's weights before the backward ends.

        Called after a backward of this backend's, before any other. Not collective.

        Returns:
            A context: what is put on the current stream within it waits for the gradients of fc2's
            weights, and for all that the backward itself has waited for, but not for its end.
            ``None`` where they are complete no earlier than the rest.
        """
        return None


@runtime_checkable
class LooksAhead(Protocol):
    """A backend that can settle on a forward's replicas before the forward."""

    def settle(
        self, routing_map: torch.Tensor, read_weights: Callable[[], ExpertWeights], *, layer: int
    ) -> None:
        """Settles on the experts in spare slots for the next forward of a layer. Collective.

        That forward plans from its own routing which slot computes what. A forward without a
        settlement plans both; so does a forward on the kernel if the group has launched anything
        else since its settlement, since layers share their slots.

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
        may_be_void: The caller goes on after the block with an output of NaN where the others learn
            of the error late, or all put it off. Else the error is raised here at once, and where
            they learn of it late, once more in a later call.
        num_calls: The backend's when the block began, where that is a ``try`` block whose error
            :meth:`ends` takes: before a launch even the making of this object counts.
    """

    def __init__(
        self, backend: Backend, *, may_be_void: bool = False, num_calls: int | None = None
    ) -> None:
        self.void: NaNResult | None = None
        self.error: Exception | None = None
        self._backend = backend
        self._may_be_void = may_be_void
        try:
            self._num_calls = backend.num_calls if num_calls is None else num_calls
        except AttributeError:
            check_class("backend", backend, Backend, "what select_backend gives")
            raise

    def __enter__(self) -> "Together":
        """Returns itself; nothing is sent before there is an error."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Tells the other ranks."""
        return isinstance(error, Exception) and self.ends(error)

    def ends(self, error: Exception, check: Callable[[], None] | None = None) -> bool:
        """Tells the other ranks of the block's error, unless the forward has begun, which does so.

        ``check`` raises an error of this package, which takes the place of another one, if an
        argument is of another class: then Python's own error does not name it.

        Returns whether the caller goes on with NaN; else it raises the error on.
        """
        backend = self._backend
        if backend.num_calls != self._num_calls:
            return False
        original = error
        if check is not None and not isinstance(error, FlashMoEError):
            try:
                check()
            except FlashMoEError as better:
                error = better
        reason, told = reason_of(error), error
        if isinstance(error, FlashMoEError) and backend.config.num_ranks > 1:
            told = told_error(backend.rank, reason)
        try:
            void = backend.refuse(reason)
        except FlashMoEError as trouble:
            if not self._is_put_off(trouble):
                raise error from trouble
            void = NaNResult(None, reason)
        if void is None and self._is_put_off(told):
            void = NaNResult(None, reason)
        if void is not None and self._may_be_void:
            self.void, self.error = void, error
            return True
        if told is not original:  # the block's own error says what led to it
            raise told from original
        return False

    def _is_put_off(self, error: Exception) -> bool:
        """Keeps an error for the end of a step that may be repeated, as every other rank does."""
        return self._may_be_void and self._backend.attempts.put_off(error)


def unmatched_backward(unfollowed: Sequence[int]) -> ConfigError:
    """The error of a backward that some ranks, :attr:`Backend.unfollowed`, do not have."""
    ranks = ", ".join(map(str, unfollowed))
    return ConfigError(
        f"this rank has a backward of its experts and cannot run it alone: none follows this "
        f"forward on rank {ranks}, where grad mode was off or nothing that the experts were given "
        "required a gradient, neither tokens nor probabilities nor weights (all frozen); wanted a "
        "backward on every rank or on none: call with tokens that require a gradient on all ranks "
        "(x.requires_grad_()), also on those whose experts are frozen, and in the same grad mode"
    )
