"""Records a forward and a backward on GPUs, with the library that stamps the time.

Run under torchrun, one process per GPU, or alone on one GPU. The library is built by
``python tools/build.py --trace``; the ordinary one stays as it is and is not used here.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flashmoe_megatron.bench.correctness import relative_errors
from flashmoe_megatron.bench.layers import FusedLayer, kernel_layer
from flashmoe_megatron.bench.problem import make_problem
from flashmoe_megatron.bench.shapes import SHAPES, shares_of
from flashmoe_megatron.bench.timer import wait_for_all
from flashmoe_megatron.kernel import bindings, ops
from flashmoe_megatron.kernel.backend import KernelBackend
from tools.bench import common
from tools.bench.gate import pass_gate
from tools.timeline.records import (
    LaunchTrace,
    Layout,
    RankTrace,
    TraceError,
    kinds_of_sources,
    layout_of_sources,
    read_buffer,
)

LIBRARY = bindings.LIBRARY.with_name("libflashmoe_trace.so")
TRACED = ("forward", "backward")
WARMUP = 3
CLOCK_ROUNDS = 8
FASTEST_CYCLES_PER_NS = 1.98  # no Hopper GPU is faster, so that no event is dated too late


class Recorder:
    """Records each layer kernel of a backend, and nothing else.

    The group's struct tells the kernels where to write. It holds the buffer's address during the
    launches of layer kernels alone: weight gradients and a plan of its own, which share the struct,
    do not begin a record and would write into that of another.

    Args:
        backend: Its group has one stream.
        layout: How the buffer is laid out.
    """

    def __init__(self, backend: KernelBackend, layout: Layout) -> None:
        self._backend = backend
        self._layout = layout
        size = layout.bytes_of(backend.num_ctas)
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=backend.device)
        self.taken: list[tuple[str, torch.Tensor]] = []
        self.launched_ns = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records every launch that begins inside."""
        originals = {name: getattr(ops, name) for name in TRACED}
        for name, original in originals.items():
            setattr(ops, name, functools.partial(self._record, name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(ops, name, original)

    def _record(
        self, name: str, original: Callable[..., None], *arguments: Any, **named: Any
    ) -> None:
        group = self._backend.memory.open()
        self._buffer.zero_()
        group.trace = self._buffer.data_ptr()
        self.launched_ns = time.monotonic_ns()
        try:
            original(*arguments, **named)
        finally:
            group.trace = None
        self.taken.append((name, self._buffer.clone()))


def capture(options: argparse.Namespace) -> int:
    """Records and writes ``forward.npz`` and ``backward.npz``. Collective over torchrun's ranks.

    Returns:
        0, or 2 without a GPU.

    Raises:
        TraceError: The folder has an earlier capture, the library is not built, or it records
            nothing.
        SystemExit: The layer does not pass the correctness gate of ``bench_layer``.
    """
    paths = {direction: options.out / f"{direction}.npz" for direction in TRACED}
    for path in paths.values():
        if path.exists():
            raise TraceError(f"{path} is of an earlier capture: wanted another folder by --out")
    if not common.has_gpu():
        return 2
    if not LIBRARY.exists():
        raise TraceError(f"no {LIBRARY.name}: build it by `python tools/build.py --trace`")
    common.use_library(LIBRARY)
    num_ranks = common.join_group()
    rank = dist.get_rank() if num_ranks > 1 else 0
    (shape,) = shares_of({options.shape: SHAPES[options.shape]}, options.one_of, num_ranks).values()
    problem = make_problem(shape, num_ranks)
    layer = kernel_layer(problem, row_bound=options.row_bound)
    pass_gate(options.shape, relative_errors(problem, layer.results()))
    backend = layer.backend
    assert isinstance(backend, KernelBackend)
    for _ in range(WARMUP):
        layer.forward_and_backward()
    layout = layout_of_sources()
    recorder = Recorder(backend, layout)
    with recorder.recording():
        offset = _host_offset(recorder, layer, layout, backend.num_ctas)
        recorder.taken.clear()
        wait_for_all()
        # The second one is kept: its launches follow on others without a gap, as in training.
        for _ in range(3):
            layer.forward_and_backward()
        torch.cuda.synchronize()
    del recorder.taken[: len(TRACED)]
    buffers = [buffer.cpu().numpy() for _, buffer in recorder.taken]
    machine = common.machine(options.commit)
    for at, direction in enumerate(TRACED):
        if recorder.taken[at][0] != direction:
            raise TraceError(f"launch {at} is a {recorder.taken[at][0]}, wanted a {direction}")
        ours = read_buffer(buffers[at], buffers[at + 1], layout, backend.num_ctas, offset)
        ranks = _gather(ours, num_ranks)
        if rank != 0:
            continue
        about = {
            "direction": direction,
            "name": options.shape,
            "shape": vars(shape),
            "gpu": machine["gpus"][0],
            "num_ctas": backend.num_ctas,
            "row_bound": options.row_bound,
            "machine": machine,
        }
        launch = LaunchTrace(about, kinds_of_sources(), ranks)
        launch.save(paths[direction])
        events = sum(len(trace.kind) for trace in ranks)
        parts = (f"{paths[direction]}: {events} events of {len(ranks)} ranks", launch.incomplete)
        print("; ".join(filter(None, parts)), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def _host_offset(
    recorder: Recorder, layer: FusedLayer, layout: Layout, num_ctas: int
) -> tuple[int, int]:
    """Bounds of %globaltimer less the host's clock, which all processes of a host share.

    A launch begins after the host has asked for it, and its last event ends before the host knows
    that it has ended; of several launches the tightest bounds hold. Collective.
    """
    bounds = []
    for _ in range(CLOCK_ROUNDS):
        wait_for_all()
        with torch.no_grad():
            layer()
        asked = recorder.launched_ns
        torch.cuda.synchronize()
        known = time.monotonic_ns()
        buffer = recorder.taken.pop()[1].cpu().numpy()
        trace = read_buffer(buffer, buffer, layout, num_ctas)
        stamps = trace.nanoseconds.ravel().astype(np.int64)
        end_ns = (trace.begin + trace.duration) / FASTEST_CYCLES_PER_NS
        last = stamps[trace.warp] + end_ns.astype(np.int64)
        bounds.append((int(last.max()) - known, int(stamps[stamps > 0].min()) - asked))
    return max(low for low, _ in bounds), min(high for _, high in bounds)


def _gather(ours: RankTrace, num_ranks: int) -> list[RankTrace]:
    """All ranks' records, on rank 0."""
    if num_ranks == 1:
        return [ours]
    everyone: list[Any] | None = [None] * num_ranks if dist.get_rank() == 0 else None
    dist.gather_object(ours, everyone)
    return everyone or []
