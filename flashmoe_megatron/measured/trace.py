"""Time stamps of one layer's schedule, as the streams have run it."""

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from flashmoe_megatron.config import Activation
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hooks import Call, When
from flashmoe_megatron.measured import files, start
from flashmoe_megatron.measured.fit import machine_of
from flashmoe_megatron.measured.start import RandomLayer
from flashmoe_megatron.options import LAYER_SIZES, BackendOptions, add_flags, add_sizes
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.degree import Stream, choose_degrees
from flashmoe_megatron.separate.exchange import kind_of
from flashmoe_megatron.streams import Stamp
from flashmoe_megatron.telemetry.record import DIRECTIONS, Direction, Phase

WARM_UP = 3


@dataclass(frozen=True)
class Stamped:
    """One piece of work of a stream.

    Attributes:
        name: The stage: "probabilities", "dispatch", "experts", "weights" or "combine".
        part: The part, from 0; -1 for work that belongs to no part.
        stream: The stream.
        begin_us: Microseconds since its pass began.
        end_us: The same for its end.
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
    """Runs a layer with random tokens and returns the work of each stream. Collective.

    The backend keeps all, and no ranks share its experts.
    """
    layer = RandomLayer(backend, num_tokens, dtype, device)
    found: dict[Direction, list[Stamped]] = {}
    for turn in range(WARM_UP + 1):
        recorder = _Recorder(backend, device) if turn == WARM_UP else None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        Ranks(group).meet()
        begin = Stamp(device)
        saved = layer.forward()
        middle = Stamp(device)
        layer.backward(saved)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        records = backend.take_records()
        if recorder is not None:
            found = recorder.stop({"forward": begin, "backward": middle})
            phases = records[-1].phase_ns
            products_end = (phases[Phase.HEAD] + phases[Phase.GEMM]) / 1e3
            before = [  # on a CPU, everything that was issued before
                one.end_us
                for one in found["backward"]
                if one.stream == "compute" or device.type != "cuda"
            ]
            last = max(before)
            found["backward"].append(Stamped("weights", -1, "compute", last, products_end))
    return found


class _Recorder:
    """Makes a backend's lanes and hooks record when they are at work."""

    def __init__(self, backend: ScheduledBackend, device: torch.device) -> None:
        self._backend, self._device = backend, device
        self._experts: list[tuple[Call, Stamp]] = []
        for lane in backend.streams.values():
            lane.stamps = []
        moments: tuple[When, ...] = get_args(When)
        self._handles = [backend.hooks.add(when, "experts", self._note) for when in moments]

    def _note(self, rows: torch.Tensor, call: Call) -> None:
        if not call.is_probe:
            self._experts.append((call, Stamp(self._device)))

    def stop(self, begins: dict[Direction, Stamp]) -> dict[Direction, list[Stamped]]:
        """Ends the recording and returns it, with times since each pass began."""
        for handle in self._handles:
            handle.remove()
        found: dict[Direction, list[Stamped]] = {name: [] for name in DIRECTIONS}

        def add(
            of: Direction, name: str, part: int, stream: Any, pair: tuple[Stamp, Stamp]
        ) -> None:
            begin, end = (one.ns_since(begins[of]) / 1e3 for one in pair)
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
    """Lists the exchanges of a forward and a backward in the order of issue."""
    forward, backward = backend.degrees
    return [
        ("forward", "probabilities", -1),
        *(("forward", name, part) for name in ("dispatch", "combine") for part in range(forward)),
        *(("backward", name, part) for name in ("dispatch", "combine") for part in range(backward)),
        ("backward", "probabilities", -1),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the file, what the layer is, and how it runs."""
    parser.add_argument("file", type=Path, help="what is written")
    add_sizes(parser, LAYER_SIZES, required=True)
    parser.add_argument("--gated", action="store_true", help="SwiGLU, else GELU")
    add_flags(parser, BackendOptions, names=("degree", "degree_fit", "exchange"))
    start.add_dtype(parser)


def run(options: argparse.Namespace) -> None:
    """Stamps one layer and writes the file. Collective over the ranks of torchrun."""
    start.check_sizes(options, "hidden", "intermediate", "tokens")
    group, grid, device = start.join()
    if group is None:
        raise ConfigError("1 rank, with which nothing travels: wanted several, by torchrun")
    activation = Activation.SILU if options.gated else Activation.GELU
    config = start.layer_of(options, dist.get_world_size(), activation=activation)
    dtype = start.dtype_of(options.dtype, device)
    chosen = BackendOptions(
        keep="all",
        degree=options.degree,
        degree_fit=options.degree_fit,
        exchange=options.exchange,
    )
    degrees = choose_degrees(config, chosen, group=group, grid=grid, device=device, dtype=dtype)
    layers = []
    for those in ((1, 1), degrees):
        layer = ScheduledBackend(
            config, group, device=device, options=chosen, grid=grid, degrees=those
        )
        found = trace(layer, group, num_tokens=options.tokens, dtype=dtype, device=device)
        spans = {str(of): [dataclasses.asdict(one) for one in found[of]] for of in DIRECTIONS}
        layers.append({"degrees": those, **spans})
        for direction in DIRECTIONS if grid.rank == 0 else ():
            last = max(one.end_us for one in found[direction])
            sys.stdout.write(f"{direction} in {those[direction == 'backward']}: {last:.0f} us\n")
    if grid.rank == 0:
        machine = machine_of(grid, device, kind_of(chosen.exchange, grid, device))
        about = {"machine": str(machine), "config": dataclasses.asdict(config)}
        files.write(options.file, {**about, "layers": layers})
