"""The seat of experts that a framework calls with each token's choices as indices."""

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.experts import GroupBackends, LayerExperts, shared_backends
from flashmoe_megatron.adapters.held import Held, Holding
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.call import Backend, Together
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.eager import unseen
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.layer import moe_forward
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.weights import ExpertWeights, SplitWeights

ReadWeights: TypeAlias = Callable[[], ExpertWeights | SplitWeights]
"""Checks a layer's experts, and gives the local ones as they are now. Not collective over the
expert-parallel group."""


class IndexedExperts(LayerExperts):
    """Applies a layer's routed experts to tokens that the framework has routed.

    Making one is collective over the group, and so is every call. The layer tells ``is_training``
    before each.

    Args:
        is_promised: Whether somebody gives the layer's promise, so that its weights go with it.
    """

    ORDERED_GRADS: ClassVar[bool] = False
    """Passed to :func:`~flashmoe_megatron.autograd.moe_apply`."""

    def __init__(
        self,
        shape: MoEConfig,
        backends: GroupBackends,
        dtype: torch.dtype,
        *,
        layer: int = 0,
        capacity_factor: float = 1.0,
        is_promised: bool = False,
    ) -> None:
        super().__init__(backends.group, dtype, layer=layer, capacity_factor=capacity_factor)
        self._is_promised = is_promised
        self._shape, self._backends = shape, backends
        self.open()  # what cannot run is to fail now, not in the first step

    def __call__(
        self,
        x: torch.Tensor,
        expert_idx: torch.Tensor,
        expert_weight: torch.Tensor,
        read_weights: ReadWeights,
    ) -> torch.Tensor:
        """Applies the experts. Collective over the group.

        Args:
            x: ``[num_tokens, hidden]``.
            expert_idx: ``[num_tokens, k]`` int32 or int64, -1 for a choice that does not count.
            expert_weight: ``[num_tokens, k]``, the routing weights.
            read_weights: Asked once; what it raises is raised on every rank.

        Raises:
            RoutingError: A weight is NaN, unless tokens are float16: see :meth:`LayerExperts.run`.
            ShapeError: A tensor is not what the layer was built for, or there are more tokens than
                the user said.
        """

        def compute(
            backend: Backend, rows: torch.Tensor, finite_weight: torch.Tensor, number: int
        ) -> torch.Tensor:
            with Together(backend):  # made by now for as many tokens as all ranks have
                weights = read_weights()
                if self._is_promised:
                    weights = dataclasses.replace(weights, promise=self.promise)
                self.check_weights(rows, weights)
            return moe_forward(
                rows,
                expert_idx,
                finite_weight,
                weights,
                backend=backend,
                check_routing=False,
                ordered_grads=self.ORDERED_GRADS,
                layer=number,
            )

        return self.run(x, expert_weight, compute)

    def check_weights(self, x: torch.Tensor, weights: ExpertWeights | SplitWeights) -> None:
        """Raises an error if the framework refuses these weights for the tokens; here never."""

    def locate(self) -> tuple[MoEConfig, GroupBackends]:
        """Returns the shape and the backends that were given."""
        return self._shape, self._backends


def facts_of(shape: MoEConfig) -> dict[str, Any]:
    """A shape as names and values, which ranks can compare."""
    facts = dataclasses.asdict(shape)
    return {name: v.value if isinstance(v, enum.Enum) else v for name, v in facts.items()}


@contextlib.contextmanager
def outside_autocast(device: torch.device) -> Iterator[torch.dtype | None]:
    """Switches autocast off within; gives the dtype that it computes in, or None if it is off."""
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with torch.autocast(kind, enabled=False):
        yield dtype


_Seat = TypeVar("_Seat", bound=IndexedExperts)


@dataclasses.dataclass(frozen=True)
class Reading(Generic[_Seat]):
    """How the experts of one module are read, and what applies them.

    Attributes:
        look: Finds what decides what they compute; cheap, for it is asked in every call.
        shape: Reads the layer's shape; its ``max_tokens`` does not count.
        weights: Reads this rank's experts for a seat; what it raises is raised on every rank.
        make: Makes what applies experts of a shape, over these backends; collective.
    """

    look: Callable[[], Holding]
    shape: Callable[[], MoEConfig]
    weights: Callable[[_Seat], ExpertWeights | SplitWeights]
    make: Callable[[MoEConfig, GroupBackends], _Seat]


class KnownExperts(Generic[_Seat]):
    """Knows what a module's experts computed when they were read, and what applies them since.

    They are read in their first call. Where a module with all experts holds something else later,
    they are read again. Ranks that share experts do not tell each other in every call what they
    hold, so that there a change is an error, which all ranks learn of.

    Args:
        ignored: Attributes of the module that do not say what it computes.
        way_out: What a user does about a change on ranks that share experts, as an imperative.
    """

    def __init__(self, ignored: Collection[str], way_out: str) -> None:
        self._ignored = ignored
        self._way_out = way_out
        self._held: Held | None = None
        self._seats: dict[Hashable, _Seat] = {}
        self._current: set[Hashable] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, also one in a file, is of another module: it has read nothing."""
        return type(self), (self._ignored, self._way_out)

    def apply(
        self,
        reading: Reading[_Seat],
        routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        options: ModuleOptions,
        is_training: bool,
        more: Hashable = None,
    ) -> torch.Tensor:
        """Applies the experts to routed tokens. Collective over the group.

        Args:
            reading: How they are read.
            routed: The tokens, their choices and routing weights, as :class:`IndexedExperts` takes.
            dtype: The dtype of the computation; the result has that of the tokens.
            group: The expert-parallel group, ``None`` if the module has all experts.
            options: The program's.
            is_training: Tells a step of training.
            more: What else asks for another seat, on every rank in the same call.

        Raises:
            ConfigError: On every rank, if any rank's experts compute something that no backend
                does, the ranks' experts differ, or those of several ranks have changed.
            ShapeError: A tensor is not what the experts were made for.
        """
        x, expert_idx, expert_weight = routed
        key = x.device, expert_idx.shape[-1], dtype, group, more
        seat = self._seat(key, reading, group, options, x.device)
        seat.is_training = is_training

        def checked() -> ExpertWeights | SplitWeights:
            if Ranks(group).num_ranks > 1:
                self._check_unchanged(seat, reading)
            return reading.weights(seat)

        return seat(x.to(dtype), expert_idx, expert_weight, checked).to(x.dtype)

    def _seat(
        self,
        key: Hashable,
        reading: Reading[_Seat],
        group: dist.ProcessGroup | None,
        options: ModuleOptions,
        device: torch.device,
    ) -> _Seat:
        """Gives what applies the experts now. The first time, collective over the group."""
        ranks = Ranks(group)
        if (
            ranks.num_ranks == 1
            and self._held is not None
            and self._held.change(reading.look()) is not None
        ):
            self._current.clear()
            self._held = None
        if key not in self._current:
            with unseen():
                shapes = ranks.all(lambda: (reading.look(), reading.shape())[1], alike=facts_of)
            known = self._seats.get(key)
            if known is None or known.locate()[0] != shapes[0]:
                backends = shared_backends(group, device, options, options.max_tokens)
                self._seats[key] = reading.make(shapes[0], backends)
            if self._held is None:
                self._held = Held(reading.look(), self._ignored)
            self._current.add(key)
        return self._seats[key]

    def _check_unchanged(self, seat: _Seat, reading: Reading[_Seat]) -> None:
        """Refuses experts that compute something else than when they got this seat."""
        assert self._held is not None
        holding = reading.look()
        change = self._held.change(holding)
        if change is None:
            return
        if reading.shape() != seat.locate()[0]:
            raise ConfigError(
                f"{change[1]} of the experts is not what it was in their first call, and they "
                f"compute something else; {self._way_out}"
            )
        self._held.note(holding)
