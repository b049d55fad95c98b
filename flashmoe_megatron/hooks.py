"""Functions of a user's that see what passes the stages of a layer, and may replace it."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch.utils.hooks import RemovableHandle

from flashmoe_megatron.config import TILE_M, MoEConfig, is_word
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.telemetry.record import Direction, read_launch_number

When = Literal["before", "after"]
Stage = Literal["gate", "capacity", "padding", "dispatch", "experts", "combine"]
Point = tuple[When, Stage]
"""One end of a stage."""

FORWARD_ALONE: frozenset[Stage] = frozenset(("gate", "capacity", "padding"))
"""Stages that a backward does not pass."""

DropPolicy = Literal["probs", "position"]


def ends_of(*stages: Stage) -> tuple[Point, ...]:
    """Both ends of each stage."""
    whens: tuple[When, ...] = get_args(When)
    return tuple((when, stage) for stage in stages for when in whens)


@dataclass(frozen=True)
class Call:
    """The call of a layer that a hook is part of.

    Attributes:
        direction: "forward", or "backward", where gradients travel the same way. A forward that is
            computed again for its backward is one, too, and so are rows that are fetched again.
        layer: The number that the caller gave the layer.
        part: Which part of every expert's rows, from 0; at the gate and after combine always 0.
        is_probe: Whether the rows stand for none, since only what comes back is looked at.
        block: Rows of a block, to which capacities are aligned.
    """

    direction: Direction
    layer: int = 0
    part: int = 0
    is_probe: bool = False
    block: int = TILE_M

    @classmethod
    def of(cls, direction: Direction, number: int) -> "Call":
        """Makes the call of a launch from the number that the launch carries."""
        return cls(direction, read_launch_number(number).layer)


UNHEARD = Call("forward")
"""Stands for a call that runs no hook."""

Hook = Callable[[torch.Tensor, Call], torch.Tensor | None]
"""Takes the tensor of a stage, and returns that to go on with, of the same shape, dtype and device,
or ``None`` to go on with the same."""


class Order(ABC):
    """Brings tokens into rows by expert, and rows back into tokens.

    Attributes:
        takes_bytes: Whether rows may be bytes, as those of experts in FP8 are.
    """

    takes_bytes: ClassVar[bool] = False

    @abstractmethod
    def order(self, tokens: torch.Tensor, token_idx: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the rows of routes.

        Args:
            tokens: ``[tokens, width]``; in a backward gradients of the layer's output.
            token_idx: ``[routes]`` int64, the token of each route, by expert.
            out: ``[routes, width]``.
        """

    @abstractmethod
    def restore(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Sums each token's rows.

        Args:
            rows: ``[routes, hidden]``.
            place: ``[tokens, choices]`` int64, where each token's rows are, by ascending expert; a
                number of rows or more stands for none.

        Returns:
            ``[tokens, hidden]`` in the rows' dtype.
        """


class OneExpert(NamedTuple):
    """The weights of one expert, as the layer has them."""

    fc1: torch.Tensor
    fc2: torch.Tensor
    fc1_bias: torch.Tensor | None
    fc2_bias: torch.Tensor | None


class Expert(ABC):
    """Computes an expert's rows, in place of the layer's own FFN; autograd differentiates it."""

    @abstractmethod
    def __call__(self, rows: torch.Tensor, weights: OneExpert) -> torch.Tensor:
        """Computes rows ``[rows, hidden]``, also none.

        The result has their shape and dtype; the layer multiplies it by the routing weights.
        """


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The stages that hooks of a backend reach.

    Attributes:
        refused: Why hooks at some ends of stages are refused there, and the way out.
        views: The ends of stages whose tensors can be looked at and not replaced.
        fixed: Why an order or an expert of a user's own is refused there, empty if it is not.
    """

    refused: Mapping[Point, str]
    views: frozenset[Point] = frozenset()
    fixed: str = ""


EVERYWHERE = Reach(refused={})


class Hooks:
    """Functions called before and after each stage of a layer, in the order of their addition.

    | stage | before | after |
    | --- | --- | --- |
    | gate | tokens, ``[tokens, hidden]`` | routing weights, ``[tokens, columns]`` |
    | capacity | this rank's routes to each expert, ``[experts]`` int64 | most of them, likewise |
    | padding | their value, ``[]`` on the CPU | experts' rows and pads, ``[rows, hidden]`` |
    | dispatch | this rank's routes, ``[routes, hidden]`` | its experts' rows, ``[rows, hidden]`` |
    | experts | the same rows | the experts' outputs, ``[rows, hidden]`` |
    | combine | the same outputs | tokens, ``[tokens, hidden]`` |

    Rows are in the order of experts. With experts in FP8 a hook sees dispatched tokens as numbers,
    and tokens that it puts in their place are quantized. The hooks of gate, capacity and padding
    are called in forward alone, those of the gate after the gate where that is the caller's.
    Gradients pass as though no hook had replaced anything, but for the routes beyond a capacity:
    they are dropped, and have none.

    A capacity is by default the number of routes rounded up to whole blocks, which drops nothing.

    Args:
        reach: The stages that the backend has.

    Attributes:
        drop_policy: The routes that an expert keeps where a capacity is too small for all: those
            with the largest "probs", or of the first tokens, by "position".
        order: How tokens become rows and rows tokens, ``None`` as the backend does it by itself.
        expert: What an expert computes, ``None`` for the FFN of the layer's shape.
        are_used: Whether there has ever been a hook or a part of the user's own; without any, a
            call asks nothing else.
    """

    def __init__(self, reach: Reach = EVERYWHERE) -> None:
        self._reach = reach
        self.are_used = False
        self._hooks: dict[Point, dict[int, Hook]] = {}
        self._probed: set[tuple[torch.dtype, torch.device, tuple[int, ...]]] = set()
        self._drop_policy: DropPolicy = "probs"
        self._order: Order | None = None
        self._expert: Expert | None = None

    def __bool__(self) -> bool:
        """Returns whether there is any hook, or a part of the layer's is replaced."""
        if not self.are_used:
            return False
        has_parts = self._order is not None or self._expert is not None
        return has_parts or (bool(self._hooks) and any(self._hooks.values()))

    def has(self, *stages: Stage) -> bool:
        """Returns whether any of these stages has a hook."""
        return bool(self._hooks) and any(map(self._hooks.get, ends_of(*stages)))

    @property
    def drop_policy(self) -> DropPolicy:
        """The routes that an expert keeps where a capacity is too small for all."""
        return self._drop_policy

    @drop_policy.setter
    def drop_policy(self, policy: DropPolicy) -> None:
        _check_choice("drop_policy", policy, get_args(DropPolicy))
        self._drop_policy = policy

    @property
    def order(self) -> Order | None:
        """How tokens become rows and rows tokens."""
        return self._order

    @order.setter
    def order(self, order: Order | None) -> None:
        self._check_part("order", order, Order)
        self._order = order

    @property
    def expert(self) -> Expert | None:
        """Computes one expert's rows."""
        return self._expert

    @expert.setter
    def expert(self, expert: Expert | None) -> None:
        self._check_part("expert", expert, Expert)
        self._expert = expert

    def _check_part(self, name: str, part: object, wanted: type) -> None:
        if part is not None and not isinstance(part, wanted):
            raise ConfigError(
                f"{name}={part!r} of hooks: wanted an object of a class that is derived from "
                f"flashmoe_megatron.hooks.{wanted.__name__}, or None"
            )
        if part is not None and self._reach.fixed:
            raise ConfigError(f"an {name} of your own: {self._reach.fixed}")
        self.are_used = True

    def add(self, when: When, stage: Stage, hook: Hook) -> RemovableHandle:
        """Has a hook called from the next call on; the same hooks on every rank.

        Args:
            when: "before" or "after".
            stage: "gate", "capacity", "padding", "dispatch", "experts" or "combine".
            hook: The first call in each dtype hands it a tensor that stands for none, before
                anything is sent, so that one which returns another shape is refused on every rank.

        Returns:
            Its ``remove()`` takes the hook away.

        Raises:
            ConfigError: There is no such stage, the hook is no function, or the backend cannot call
                hooks there.
        """
        _check_choice("when", when, get_args(When))
        _check_choice("stage", stage, get_args(Stage))
        if not callable(hook):
            raise ConfigError(f"hook={hook!r} {when} {stage}: wanted a function")
        reason = self._reach.refused.get((when, stage))
        if reason is not None:
            raise ConfigError(f"a hook {when} {stage}: {reason}")
        hooks = self._hooks.setdefault((when, stage), OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        self.are_used = True
        self._probed.clear()
        return handle

    def run(self, when: When, stage: Stage, rows: torch.Tensor, call: Call) -> torch.Tensor:
        """The tensor to go on with.

        Raises:
            ShapeError: A hook returned what cannot take its place.
            ConfigError: A hook replaced what can only be looked at.
        """
        is_view = (when, stage) in self._reach.views
        for hook in self._hooks.get((when, stage), {}).values():
            version = _version(rows)
            replaced: Any = hook(rows, call)
            if is_view and (replaced is not None or _version(rows) != version):
                how = "returned rows" if replaced is not None else "changed rows in place"
                raise ConfigError(
                    f"a hook {when} {stage} {how}, which the launch has used by then: wanted None, "
                    "and a copy of what it changes, or the backend 'scheduled'"
                )
            if replaced is None:
                continue
            problem = _problem(replaced, rows)
            if problem is not None:
                raise ShapeError(f"a hook {when} {stage} returned {problem}")
            rows = replaced.contiguous()
        return rows

    def pad_value(self, call: Call) -> float:
        """The value of pad rows, 0 unless a hook says another."""
        return float(self.run("before", "padding", torch.zeros(()), call))

    def capped(
        self, config: MoEConfig, probs: torch.Tensor, routing_map: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """The routing without the routes that are beyond their experts' capacities.

        The host waits for nothing. The tensors are those of a backend's forward. Routing that is
        not usable stays so.
        """
        if not self.has("capacity"):
            return routing_map
        is_map = routing_map.dtype == torch.bool
        num_experts = config.num_experts
        keys = probs.detach().float() if probs.dtype != torch.float64 else probs.detach()
        if self.drop_policy == "position":
            keys = torch.zeros_like(keys).masked_fill_(keys.isnan(), torch.nan)
        if is_map:
            selected = routing_map & (probs != 0) if config.skip_zero_probs else routing_map
        else:  # what selects no expert, or none that there is, goes into a column of its own
            chosen = (routing_map >= 0) & (routing_map < num_experts)
            if config.skip_zero_probs:
                chosen = chosen & (probs != 0)
            columns = routing_map.long().masked_fill(~chosen, num_experts)
            shape = len(probs), num_experts + 1
            selected = torch.zeros(shape, dtype=torch.bool, device=probs.device)
            selected = selected.scatter_(1, columns, True)[:, :num_experts]
            keys = keys.new_zeros(shape).scatter_(1, columns, keys)[:, :num_experts]
        counts = self.run("before", "capacity", selected.sum(0), call)
        aligned = -(-counts // call.block) * call.block
        capacity = self.run("after", "capacity", aligned, call)
        order = (
            keys.masked_fill(~selected, -torch.inf)
            .sort(dim=0, descending=True, stable=True)
            .indices
        )
        place = torch.arange(len(order), device=order.device)[:, None].expand_as(order)
        rank = torch.empty_like(order).scatter_(0, order, place)
        # A weight that is NaN is left to the backend, which tells of it.
        kept = (rank < capacity) | keys.isnan()
        if is_map:
            return routing_map & kept
        kept = torch.nn.functional.pad(kept, (0, 1), value=True).gather(1, columns)
        return routing_map.masked_fill(~kept, -1)

    def probe(self, config: MoEConfig, x: torch.Tensor, probs: torch.Tensor) -> None:
        """Refuses hooks that change shapes of tokens or weights, once for each kind of rows.

        Raises:
            ShapeError: A hook returned what cannot take the rows' place.
            ConfigError: A hook replaced what can only be looked at.
        """
        if not self:
            return
        kind = (x.dtype, x.device, tuple(probs.shape[1:]))
        if kind in self._probed:
            return
        rows = x.new_zeros(_PROBE_ROWS, x.shape[1])
        counts = torch.zeros(config.num_experts, dtype=torch.int64, device=x.device)
        seen: Mapping[Point, torch.Tensor] = {
            ("after", "gate"): probs.new_zeros(_PROBE_ROWS, *probs.shape[1:]),
            ("before", "capacity"): counts,
            ("after", "capacity"): counts,
            ("before", "padding"): torch.zeros(()),
        }
        directions: tuple[Direction, ...] = get_args(Direction)
        for direction in directions:
            call = Call(direction, is_probe=True)
            for when, stage in self._hooks:
                if stage not in FORWARD_ALONE or direction == "forward":
                    self.run(when, stage, seen.get((when, stage), rows).clone(), call)
        self._probed.add(kind)


_PROBE_ROWS = 3
"""More than one, so that a hook that reduces rows to one is seen."""


def of_part(call: Call, part: int) -> Call:
    """The same call, at one of its parts."""
    return Call(call.direction, call.layer, part, call.is_probe) if part else call


def _version(rows: torch.Tensor) -> int:
    """Returns how often a tensor was written, which nobody counts in inference mode."""
    return 0 if rows.is_inference() else rows._version


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not is_word(value, choices):
        raise ConfigError(f"{name}={value!r} of a hook: wanted one of {', '.join(choices)}")


def _problem(got: Any, rows: torch.Tensor) -> str | None:
    if not isinstance(got, torch.Tensor):
        return f"a {type(got).__name__}: wanted a tensor or None"
    for name in ("shape", "dtype", "device"):
        its, wanted = getattr(got, name), getattr(rows, name)
        if its != wanted:
            shown = (tuple(its), tuple(wanted)) if name == "shape" else (its, wanted)
            return f"rows of {name} {shown[0]}: wanted {shown[1]}, as it got them"
    return None
