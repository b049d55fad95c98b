"""Functions of a user's that see the rows of a layer at its stages, and may replace them."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.utils.hooks import RemovableHandle

from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.telemetry.record import Direction, read_launch_number

When = Literal["before", "after"]
Stage = Literal["gate", "dispatch", "experts", "combine"]


@dataclass(frozen=True)
class Call:
    """The call of a layer that a hook is part of.

    Attributes:
        direction: "forward", or "backward", where gradients travel the same way. A forward that is
            computed again for its backward is one, too, and so are rows that are fetched again.
        layer: The number that the caller gave the layer.
        part: Which part of every expert's rows, from 0; at the gate and after combine always 0.
        is_probe: Whether the rows stand for none, since only what comes back is looked at.
    """

    direction: Direction
    layer: int = 0
    part: int = 0
    is_probe: bool = False

    @classmethod
    def of(cls, direction: Direction, number: int) -> "Call":
        """Makes the call of a launch from the number that the launch carries."""
        return cls(direction, read_launch_number(number).layer)


UNHEARD = Call("forward")
"""Stands for a call that runs no hook."""

Hook = Callable[[torch.Tensor, Call], torch.Tensor | None]
"""Takes the rows of a stage, and returns those to go on with, of the same shape, dtype and device,
or ``None`` to go on with the same."""


class Hooks:
    """Functions called before and after each stage of a layer, in the order of their addition.

    | stage | before | after |
    | --- | --- | --- |
    | gate | tokens, ``[tokens, hidden]`` | routing weights, ``[tokens, columns]`` |
    | dispatch | this rank's routes, ``[routes, hidden]`` | its experts' rows, ``[rows, hidden]`` |
    | experts | the same rows | the experts' outputs, ``[rows, hidden]`` |
    | combine | the same outputs | tokens, ``[tokens, hidden]`` |

    Rows are in the order of experts. With experts in FP8 a hook sees dispatched tokens as numbers,
    and tokens that it puts in their place are quantized. The gate's hooks are called in forward
    alone, and after the gate where that is the caller's. Gradients pass as though no hook had
    replaced anything.
    """

    def __init__(self) -> None:
        self._hooks: dict[tuple[When, Stage], dict[int, Hook]] = {}
        self._probed: set[tuple[torch.dtype, torch.device, tuple[int, ...]]] = set()

    def __bool__(self) -> bool:
        """Returns whether there is any hook."""
        return any(self._hooks.values())

    def add(self, when: When, stage: Stage, hook: Hook) -> RemovableHandle:
        """Has a hook called from the next call on; the same hooks on every rank.

        Args:
            when: "before" or "after".
            stage: "gate", "dispatch", "experts" or "combine".
            hook: The first call in each dtype hands it rows that stand for none, before anything
                is sent, so that one which returns rows of another shape is refused on every rank.

        Returns:
            Its ``remove()`` takes the hook away.

        Raises:
            ConfigError: There is no such stage.
        """
        for name, value, choices in (("when", when, When), ("stage", stage, Stage)):
            if value not in get_args(choices):
                wanted = ", ".join(get_args(choices))
                raise ConfigError(f"{name}={value!r} of a hook: wanted one of {wanted}")
        hooks = self._hooks.setdefault((when, stage), OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        self._probed.clear()
        return handle

    def run(self, when: When, stage: Stage, rows: torch.Tensor, call: Call) -> torch.Tensor:
        """The rows to go on with.

        Raises:
            ShapeError: A hook returned what cannot take the rows' place.
        """
        for hook in self._hooks.get((when, stage), {}).values():
            replaced: Any = hook(rows, call)
            if replaced is None:
                continue
            problem = _problem(replaced, rows)
            if problem is not None:
                raise ShapeError(f"a hook {when} {stage} returned {problem}")
            rows = replaced.contiguous()
        return rows

    def probe(self, x: torch.Tensor, probs: torch.Tensor) -> None:
        """Refuses hooks that change shapes of tokens or weights, once for each kind of rows.

        Raises:
            ShapeError: A hook returned what cannot take the rows' place.
        """
        if not self:
            return
        kind = (x.dtype, x.device, tuple(probs.shape[1:]))
        if kind in self._probed:
            return
        rows = x.new_zeros(_PROBE_ROWS, x.shape[1])
        weights = probs.new_zeros(_PROBE_ROWS, *probs.shape[1:])
        seen: Mapping[tuple[When, Stage], torch.Tensor] = {("after", "gate"): weights}
        directions: tuple[Direction, ...] = get_args(Direction)
        for direction in directions:
            call = Call(direction, is_probe=True)
            for when, stage in self._hooks:
                if stage != "gate" or direction == "forward":
                    self.run(when, stage, seen.get((when, stage), rows).clone(), call)
        self._probed.add(kind)


_PROBE_ROWS = 3
"""More than one, so that a hook that reduces rows to one is seen."""


def of_part(call: Call, part: int) -> Call:
    """The same call, at one of its parts."""
    return Call(call.direction, call.layer, part, call.is_probe) if part else call


def _problem(got: Any, rows: torch.Tensor) -> str | None:
    if not isinstance(got, torch.Tensor):
        return f"a {type(got).__name__}: wanted a tensor or None"
    for name in ("shape", "dtype", "device"):
        its, wanted = getattr(got, name), getattr(rows, name)
        if its != wanted:
            shown = (tuple(its), tuple(wanted)) if name == "shape" else (its, wanted)
            return f"rows of {name} {shown[0]}: wanted {shown[1]}, as it got them"
    return None
