"""What overlaps in a call of separate kernels, seen in the order in which its operators are issued.

A transfer runs concurrently with what is issued after it, up to the first operator that reads its
rows. On a CPU each operator ends before the next one is issued, in the order of a GPU.
"""

from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.distributed import RankPool
from tests.unit import cases

CONFIG = cases.make_config(num_ranks=2)
OF_WEIGHTS = {(CONFIG.fc1_rows, CONFIG.hidden), (CONFIG.hidden, CONFIG.intermediate)}
FORWARD, BACKWARD = 3, 2
"""Parts."""


class Waits(TorchFunctionMode):
    """Notes in a timeline when the host reads numbers."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.tolist:
            self._events.append("host")
        return function(*args, **(kwargs or {}))


class Timeline(TorchDispatchMode):
    """Notes the operators of a call in their order, and where transfers put rows.

    Attributes:
        events: "counts", a transfer of the numbers of rows; "host", a wait of the host for them;
            "gather", rows taken from tokens; "rows" and "probs", their transfer and that of
            their weights; "place", a computation of which row goes where; "product"; "weights", a
            product that is a gradient of weights; "sum", of routes.
        filled: The memory of each transfer of rows.
        summed: The memory and the number of the rows that are summed.
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        super().__init__()
        self.events: list[str] = []
        self.filled: list[int] = []
        self.summed: list[tuple[int, int]] = []
        self._tokens = _memory(tokens)

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name == "alltoall_base_":
            kind = "rows" if first.dim() > 1 else "probs"
            self.events.append(kind if first.is_floating_point() else "counts")
            if self.events[-1] == "rows":
                self.filled.append(_memory(first))
        elif name == "index_select" and _memory(first) == self._tokens:
            self.events.append("gather")
        elif name == "repeat_interleave":
            self.events.append("place")
        elif name == "mm":
            self.events.append("weights" if tuple(result.shape) in OF_WEIGHTS else "product")
        elif name == "index" and first.dim() == 2:
            self.events.append("sum")
            self.summed.append((_memory(first), len(first)))
        return result

    def seen(self) -> "Seen":
        """Returns what can go to another process."""
        return Seen(self.events, self.filled, self.summed)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Seen(NamedTuple):
    """One direction of a call; attributes as those of :class:`Timeline`."""

    events: list[str]
    filled: list[int]
    summed: list[tuple[int, int]]


def call(group: dist.ProcessGroup, inputs: cases.Inputs) -> tuple[Seen, Seen]:
    """A rank's forward and backward."""
    rank = dist.get_rank(group)
    first = rank * CONFIG.num_local_experts
    mine = slice(first, first + CONFIG.num_local_experts)
    weights = ExpertWeights((torch.stack(inputs.fc1[mine]),), (torch.stack(inputs.fc2[mine]),))
    grads = [[WeightGrad(torch.empty_like(one[0]), False)] for one in (weights.fc1, weights.fc2)]
    backend = ScheduledBackend(CONFIG, group, degrees=(FORWARD, BACKWARD))
    x, grad_out = inputs.x[rank], inputs.grad_out[rank]
    forward, backward = Timeline(x), Timeline(grad_out)
    with Waits(forward.events), forward:
        _, saved = backend.forward(
            x, inputs.probs[rank], inputs.routing_map[rank], weights, training=True
        )
    with Waits(backward.events), backward:
        backend.backward(grad_out, saved, weights, *grads)
    return forward.seen(), backward.seen()


def transfers(events: list[str]) -> list[int]:
    """Where in a timeline rows begin to travel."""
    return [at for at, event in enumerate(events) if event == "rows"]


def order(events: list[str]) -> list[str]:
    """The events without those that repeat the one before."""
    return [event for event, _ in groupby(events)]


def make_inputs(routing: cases.Routing) -> cases.Inputs:
    return cases.make_inputs(CONFIG, routing, [30, 11], dtype=torch.float32)


def test_parts_travel_while_others_are_computed(ranks: RankPool) -> None:
    inputs = make_inputs(cases.with_dropped_tokens)
    for forward, backward in ranks.run(call, inputs, num_ranks=2):
        events, at = forward.events, transfers(forward.events)
        assert len(at) == 2 * FORWARD
        host = events.index("host")
        assert events.index("counts") < events.index("gather")
        assert "gather" not in events[host:], "rows are collected while the numbers travel"
        assert set(events[host + 1 : at[FORWARD - 1]]) == {"probs", "rows"}, "rows leave at once"
        assert order(events[at[FORWARD - 1] :])[-2 * FORWARD - 1 :] == [
            *["product", "rows"] * FORWARD,
            "sum",
        ]

        events, at = backward.events, transfers(backward.events)
        assert len(at) == 2 * BACKWARD
        leaving, rest = events[: at[BACKWARD - 1] + 1], events[at[BACKWARD - 1] + 1 :]
        assert order(leaving)[-2 * BACKWARD :] == ["gather", "rows"] * BACKWARD
        assert order(rest)[:-1] == [
            "place",
            *["product", "rows"] * BACKWARD,
            "probs",
            "weights",
        ], "gradients of weights are computed while those of tokens travel"


def test_parts_come_back_to_the_memory_that_is_summed(ranks: RankPool) -> None:
    inputs = make_inputs(cases.skewed)
    for rank, seen in enumerate(ranks.run(call, inputs, num_ranks=2)):
        num_routes = int(inputs.routing_map[rank].sum())
        for (_, filled, summed), degree in zip(seen, (FORWARD, BACKWARD), strict=True):
            assert summed == [(filled[-1], num_routes)]
            assert set(filled[-degree:]) == {filled[-1]}, "nothing is copied together"
