"""Time stamps of one layer's schedule, as the streams have run it."""

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist

from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.schedule.layer import RandomLayer
from flashmoe_megatron.separate import lanes
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.hooks import Call, When
from flashmoe_megatron.separate.model import Stream
from flashmoe_megatron.telemetry.record import DIRECTIONS, Direction, Phase

WARM_UP = 3


@dataclass(frozen=True)
class Stamped:
    """What a stream did for a while.

    Attributes:
        name: The stage: "probabilities", "dispatch", "experts", "weights" or "combine".
        part: Which part, from 0; -1 for what no part is.
        stream: Where it ran.
        begin_us: From the beginning of its pass.
        end_us: Likewise.
    """

    name: str
    part: int
    stream: Stream
    begin_us: float
    end_us: float


def trace(
    backend: ScheduledBackend,
    group: dist.ProcessGroup,
    *,
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[Direction, list[Stamped]]:
    """Runs a layer with random tokens and says when each stream did what. Collective.

    Args:
        backend: A layer's, whose experts nobody shares and which keeps all.
        group: Its ranks.
        num_tokens: Tokens of this rank.
        dtype: Theirs.
        device: Where they are.
    """
    layer = RandomLayer(backend, num_tokens, dtype, device)
    found: dict[Direction, list[Stamped]] = {}
    for turn in range(WARM_UP + 1):
        recorder = _Recorder(backend, device) if turn == WARM_UP else None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        Ranks(group).meet()
        begin = lanes.stamp(device)
        saved = layer.forward()
        middle = lanes.stamp(device)
        layer.backward(saved)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        records = backend.take_records()
        if recorder is not None:
            found = recorder.stop({"forward": begin, "backward": middle})
            phases = records[-1].phase_ns
            products_end = (phases[Phase.HEAD] + phases[Phase.GEMM]) / 1e3
            before = [  # on a processor, all that was issued before
                one.end_us
                for one in found["backward"]
                if one.stream == "compute" or device.type != "cuda"
            ]
            last = max(before)
            found["backward"].append(Stamped("weights", -1, "compute", last, products_end))
    return found


class _Recorder:
    """Has a backend's lanes and hooks write down when they are at work."""

    def __init__(self, backend: ScheduledBackend, device: torch.device) -> None:
        self._backend, self._device = backend, device
        self._experts: list[tuple[Call, Any]] = []
        for lane in backend.streams.values():
            lane.stamps = []
        moments: tuple[When, ...] = get_args(When)
        self._handles = [backend.hooks.add(when, "experts", self._note) for when in moments]

    def _note(self, rows: torch.Tensor, call: Call) -> None:
        if not call.is_probe:
            self._experts.append((call, lanes.stamp(self._device)))

    def stop(self, begins: dict[Direction, Any]) -> dict[Direction, list[Stamped]]:
        """What they wrote down, from the beginning of each pass."""
        for handle in self._handles:
            handle.remove()
        found: dict[Direction, list[Stamped]] = {name: [] for name in DIRECTIONS}

        def add(of: Direction, name: str, part: int, stream: Any, pair: tuple[Any, Any]) -> None:
            begin, end = (lanes.nanoseconds(begins[of], one) / 1e3 for one in pair)
            found[of].append(Stamped(name, part, stream, begin, end))

        pairs = zip(self._experts[::2], self._experts[1::2], strict=True)
        for (call, begin), (_, end) in pairs:
            add(call.direction, "experts", call.part, "compute", (begin, end))
        for stream, lane in self._backend.streams.items():
            stamps, lane.stamps = lane.stamps or [], None
            names = _names(self._backend)
            for (of, name, part), pair in zip(names, stamps, strict=True):
                add(of, name, part, stream, pair)
        return found


def _names(backend: ScheduledBackend) -> list[tuple[Direction, str, int]]:
    """What travels in a forward and a backward, in the order in which it is issued."""
    forward, backward = backend.degrees
    return [
        ("forward", "probabilities", -1),
        *(("forward", name, part) for name in ("dispatch", "combine") for part in range(forward)),
        *(("backward", name, part) for name in ("dispatch", "combine") for part in range(backward)),
        ("backward", "probabilities", -1),
    ]


def as_json(found: dict[Direction, list[Stamped]]) -> dict[str, Any]:
    """For a file."""
    return {of: [dataclasses.asdict(one) for one in spans] for of, spans in found.items()}
