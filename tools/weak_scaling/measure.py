"""Measures one point on all its ranks: gate first, then times and memory."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flashmoe_megatron.backend import Backend
from flashmoe_megatron.planner import plan_buffer_rows
from flashmoe_megatron.select import select_backend
from tools.bench.bench_layer import (
    Ceilings,
    FusedLayer,
    UnfusedLayer,
    kernel_timing,
    without_grad,
)
from tools.bench.common import ROW_BOUND, Timer, Timing, timing_of
from tools.bench.correctness import LayerResults, relative_errors
from tools.bench.shapes import Problem, make_problem
from tools.weak_scaling.points import KERNELS, Point, Settings

PEER_TIMEOUT_S = 10.0


class GateError(Exception):
    """A layer's results are not what float32 gives."""


class Layer(Protocol):
    """Either implementation."""

    def __call__(self) -> torch.Tensor:
        """One forward."""
        ...

    def forward_and_backward(self) -> torch.Tensor:
        """One of each."""
        ...


class WallTimer:
    """Times calls by the processor's clock, as ``Timer`` does by the GPU's."""

    def __init__(self, iterations: int, warmup: int) -> None:
        self.iterations = iterations
        self.warmup = warmup

    def __call__(self, call: Callable[[], object]) -> Timing:
        """Times ``call``; of each iteration the slowest rank. Collective over the default group."""
        found = []
        for iteration in range(self.warmup + self.iterations):
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            call()
            if iteration >= self.warmup:
                found.append((time.perf_counter() - begin) * 1e3)
        return timing_of(found, device="cpu")


class Bench:
    """Measures points; all of one process group share it.

    Args:
        settings: The sweep's settings.
        num_ranks: Ranks of the default group; 1 if there is none.
        device: This rank's.
    """

    def __init__(self, settings: Settings, num_ranks: int, device: torch.device) -> None:
        self.settings = settings
        self.num_ranks = num_ranks
        self.device = device
        self.ceilings: Ceilings | None = None
        self.timer: Callable[[Callable[[], object]], Timing]
        if device.type == "cuda":
            timer = Timer(settings.iterations, settings.warmup)
            self.ceilings = Ceilings(timer, num_ranks, settings.symmetric)
            self.timer = timer
        else:
            self.timer = WallTimer(settings.iterations, settings.warmup)

    def measure(self, point: Point) -> dict[str, Any]:
        """Measures one point. Collective over the default group.

        Returns:
            For JSON: relative errors, times in ms by implementation and pass, on GPUs the times
            that the fused kernel's launches record by direction, memory in bytes, and what bounds
            the times.

        Raises:
            GateError: A result of either implementation is further from float32 than allowed.
            FlashMoEError: The layer cannot run.
        """
        rank = dist.get_rank() if self.num_ranks > 1 else 0
        problem = make_problem(
            point.shape, self.num_ranks, rank=rank, device=self.device, seed=self.settings.seed
        )
        backend = self._backend(problem)
        fused = FusedLayer(problem, backend, use_main_grad=True)
        found: dict[str, Any] = {
            "imbalance": round(problem.imbalance(), 4),
            "remote_rows": problem.remote_rows(),
            "errors": {"fused": self._gate("fused", problem, fused.results())},
            "times": {"fused": self._time(fused)},
            "memory": {**_planned_bytes(problem, backend), "fused": self._peaks(fused)},
        }
        if self.ceilings is not None:
            found["cublas_tflops"] = round(self.ceilings.tflops, 1)
            found["link_gbps"] = self.ceilings.link_gbps and round(self.ceilings.link_gbps, 1)
            found["floor_ms"] = round(self.ceilings.floor_ms(point.shape, problem), 4)
            found["kernels"] = self._kernels(problem)
        del fused
        for tensor in (problem.x, problem.probs, *problem.parameters):
            tensor.grad = None
            tensor.__dict__.pop("main_grad", None)
        unfused = UnfusedLayer(problem, use_main_grad=True)
        found["errors"]["unfused"] = self._gate("unfused", problem, unfused.results())
        found["times"]["unfused"] = self._time(unfused)
        found["memory"]["unfused"] = self._peaks(unfused)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def _backend(self, problem: Problem, row_bound: float | None = None) -> Backend:
        group = dist.group.WORLD if self.num_ranks > 1 else None
        if self.device.type != "cuda":
            return select_backend(problem.config, group, self.device, kind="reference")
        return select_backend(
            problem.config,
            group,
            self.device,
            kind="kernel",
            symmetric_memory=self.settings.symmetric,
            timeout=PEER_TIMEOUT_S,
            row_bound=row_bound,
        )

    def _gate(self, name: str, problem: Problem, results: LayerResults) -> dict[str, float]:
        errors = relative_errors(problem, results)
        for what, error in errors.items():
            if not error <= self.settings.gate:
                raise GateError(
                    f"{name} {what}: relative L2 error {error:.3g}, wanted at most "
                    f"{self.settings.gate}"
                )
        return errors

    def _time(self, layer: Layer) -> dict[str, dict[str, Any]]:
        return {
            "forward": self.timer(without_grad(layer)).as_dict(),
            "forward+backward": self.timer(layer.forward_and_backward).as_dict(),
        }

    def _kernels(self, problem: Problem) -> dict[str, dict[str, Any]]:
        """Times without the hosts: of launches that follow one another without a pause."""
        backend = self._backend(problem, ROW_BOUND)
        layer = FusedLayer(problem, backend, use_main_grad=True)
        calls = {"forward": without_grad(layer), "backward": layer.forward_and_backward}
        return {
            direction: kernel_timing(
                direction, calls[direction], backend, self.settings.iterations
            ).as_dict()
            for direction in KERNELS
        }

    def _peaks(self, layer: Layer) -> dict[str, int]:
        """Bytes that torch's allocator held at most above what it held before, on this rank."""
        if self.device.type != "cuda":
            return {}
        peaks = {}
        calls = {
            "forward": without_grad(layer),
            "forward+backward": layer.forward_and_backward,
        }
        for name, call in calls.items():
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            call()
            torch.cuda.synchronize(self.device)
            peaks[name] = torch.cuda.max_memory_allocated(self.device) - before
        return peaks


def _planned_bytes(problem: Problem, backend: Backend) -> dict[str, int]:
    """Bytes of one rank that are known before a run, and the symmetric heap, which is asked for."""
    config = problem.config
    rows = plan_buffer_rows(config)
    row_bytes = problem.x.element_size() * (2 * config.hidden + config.intermediate)
    found = {
        "tokens": problem.x.numel() * problem.x.element_size(),
        "rows_expected": rows.expected * row_bytes,
        "rows_worst_case": rows.worst_case * row_bytes,
    }
    heap = getattr(backend, "heap_bytes", None)  # the reference has none
    if heap is not None:
        found["symmetric"] = heap
    return found
