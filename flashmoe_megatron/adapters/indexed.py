"""The seat of experts that a framework calls with each token's choices as indices."""

import dataclasses
import enum
from collections.abc import Callable, Collection, Hashable
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.experts import GroupBackends, LayerExperts
from flashmoe_megatron.adapters.held import Held, Holding
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
    ) -> None:
        super().__init__(backends.group, dtype, layer=layer, capacity_factor=capacity_factor)
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


_Seat = TypeVar("_Seat", bound=IndexedExperts)


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

    def seat(
        self,
        key: Hashable,
        group: dist.ProcessGroup | None,
        look: Callable[[], Holding],
        read_shape: Callable[[], MoEConfig],
        make: Callable[[MoEConfig], _Seat],
    ) -> _Seat:
        """Gives what applies the experts now. The first time, collective over the group.

        Args:
            key: Names a kind of call; experts are read separately for each kind.
            group: The ranks that share the experts, ``None`` if there is one.
            look: Gives what says what the experts compute, and refuses what would not be called.
            read_shape: Reads what they compute. Neither is collective.
            make: Makes what applies experts of a shape; collective over the group.

        Raises:
            ConfigError: On every rank, if any rank's experts compute something that no backend
                does, or the ranks' experts differ.
        """
        ranks = Ranks(group)
        if (
            ranks.num_ranks == 1
            and self._held is not None
            and self._held.change(look()) is not None
        ):
            self._current.clear()
            self._held = None
        if key not in self._current:
            with unseen():
                shapes = ranks.all(lambda: (look(), read_shape())[1], alike=facts_of)
            known = self._seats.get(key)
            if known is None or known.locate()[0] != shapes[0]:
                self._seats[key] = make(shapes[0])
            if self._held is None:
                self._held = Held(look(), self._ignored)
            self._current.add(key)
        return self._seats[key]

    def check_unchanged(
        self, seat: _Seat, look: Callable[[], Holding], read_shape: Callable[[], MoEConfig]
    ) -> None:
        """Refuses experts that compute something else than when :meth:`seat` gave their seat.

        Not collective; only experts of several ranks do.

        Raises:
            ConfigError: They do, or no backend computes what they do.
        """
        assert self._held is not None
        holding = look()
        change = self._held.change(holding)
        if change is None:
            return
        if read_shape() != seat.locate()[0]:
            raise ConfigError(
                f"{change[1]} of the experts is not what it was in their first call, and they "
                f"compute something else; {self._way_out}"
            )
        self._held.note(holding)
