"""Measures a layer and other implementations of it, one after the other on the same data."""

import contextlib
import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.correctness import GATE, relative_errors, worst_of
from flashmoe_megatron.bench.layers import FusedLayer, UnfusedLayer, kernel_layer, without_grad
from flashmoe_megatron.bench.megatron_layer import MegatronLayer
from flashmoe_megatron.bench.problem import Problem, make_problem
from flashmoe_megatron.bench.shapes import Form, Shape
from flashmoe_megatron.bench.timer import Timer, Timing
from flashmoe_megatron.config import KEEPS, Keep
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.kernel.memory import reads_tokens
from flashmoe_megatron.planner import choose_keep, kept_bytes
from flashmoe_megatron.select import Kind

SECONDS = 0.6
"""The most that the timed calls of one figure take, unless few of them take more."""
FEWEST, MOST = 3, 50
"""Timed calls of one figure."""
SMALL = Shape(128, 256, 256, 8, 8, gated=True)
"""A CPU gets no more tokens, widths and experts than these."""
GIB = 2**30

Layer = FusedLayer | UnfusedLayer | MegatronLayer


@dataclass(frozen=True)
class Row:
    """Figures of one implementation.

    Attributes:
        name: The implementation, for a reader.
        reason: Says why it has no times, "" where it has.
        error: The largest relative L2 error of a result against float32.
        forward: Times of a forward in evaluation.
        both: Times of a forward and its backward.
        kept: Bytes that a forward keeps for its backward, without its input.
    """

    name: str
    reason: str = ""
    error: float | None = None
    forward: Timing | None = None
    both: Timing | None = None
    kept: int | None = None

    @property
    def is_wrong(self) -> bool:
        """Tells whether the results are further from float32's than the gate allows."""
        return self.error is not None and not self.error <= GATE


def small(shape: Shape, num_ranks: int) -> Shape:
    """Returns a layer of the same form that a CPU can compute while a user waits."""
    experts = min(shape.num_experts, max(SMALL.num_experts, shape.topk))
    return replace(
        shape,
        tokens=min(shape.tokens, SMALL.tokens),
        hidden=min(shape.hidden, SMALL.hidden),
        intermediate=min(shape.intermediate, SMALL.intermediate),
        num_experts=-(-experts // num_ranks) * num_ranks,
    )


def needed_bytes(shape: Shape, num_ranks: int) -> int:
    """Returns about how much of a GPU's memory the most demanding implementation needs.

    This is torch's: a copy of the weights and their gradients, and rows of all intermediate results
    with their gradients.
    """
    config = shape.config(num_ranks)
    weights = config.num_local_experts * config.hidden * (config.fc1_rows + config.intermediate)
    rows = shape.tokens * shape.topk
    values = rows * (4 * config.hidden + 2 * config.fc1_rows + 2 * config.intermediate)
    return 2 * (3 * weights + 2 * values) + 40 * shape.tokens * shape.num_experts


def check_fits(shape: Shape, num_ranks: int, free: int) -> None:
    """Refuses a layer that does not fit into a GPU's free memory.

    Raises:
        ConfigError: Says how much is needed, and which share of the experts would fit.
    """
    if needed_bytes(shape, num_ranks) <= free:
        return
    most = shape.num_experts // max(shape.topk, num_ranks)
    shares = (
        share
        for share in range(2, most + 1)
        if shape.num_experts % (share * num_ranks) == 0
        and needed_bytes(shape.one_of(share), num_ranks) <= free
    )
    share = next(shares, None)
    way_out = f"--one-of {share}, which has {shape.num_experts // share} experts" if share else ""
    needed = needed_bytes(shape, num_ranks) / GIB
    raise ConfigError(
        f"{shape.num_experts // num_ranks} experts on a GPU, with what else is measured, "
        f"need about {needed:.0f} GiB of its memory, {free / GIB:.0f} GiB are free: wanted "
        f"{way_out or 'fewer --tokens'}, or more GPUs"
    )


def rows_of(
    shape: Shape,
    form: Form,
    num_ranks: int,
    kind: Kind,
    row_bound: float | None,
    others: list[str],
) -> Iterator[Row]:
    """Measures all implementations, the first one's rows first. Collective over the ranks.

    Args:
        shape: The layer; a CPU should get a :func:`small` one.
        form: What its experts compute besides products.
        num_ranks: The ranks of the default group, 1 without it.
        kind: The backend of our layer.
        row_bound: The bound of its rows, ``None`` for exact buffers.
        others: Names from ``OTHERS``.
    """
    problem = make_problem(shape, num_ranks, form=form)
    reads = kind == "kernel" and reads_tokens(problem.config)
    chosen = choose_keep("auto", problem.config, reads_tokens=reads)
    for keep in KEEPS:
        make = partial(
            kernel_layer,
            use_main_grad=False,
            kind=kind,
            keep=keep,
            row_bound=row_bound,
        )
        name = f"flashmoe, keep {keep}{' (auto)' if keep == chosen else ''}"
        planned = None if stopwatch.HAS_GPU else _planned(problem, keep)
        yield _measured(name, problem, make, planned)
    for name in others:
        label, other = OTHERS[name]
        yield _tried(label, problem, other)


def _planned(problem: Problem, keep: Keep) -> int:
    """Returns what a forward keeps by formula, without its input."""
    inputs = 0 if keep == "all" else kept_bytes(problem.config, "inputs")
    return kept_bytes(problem.config, keep) - inputs


def _measured(
    name: str, problem: Problem, make: Callable[[Problem], Layer], planned: int | None = None
) -> Row:
    for leaf in (problem.x, problem.probs, problem.topk_weight, *problem.parameters):
        leaf.grad = None
    layer = make(problem)
    try:
        row = Row(name, error=worst_of(relative_errors(problem, layer.results()).values()))
        if row.is_wrong:
            return replace(row, reason=f"is wrong: error {row.error:.3g}, wanted at most {GATE}")
        return replace(
            row,
            forward=_timed(without_grad(layer)),
            both=_timed(layer.forward_and_backward),
            kept=_kept(layer) if stopwatch.HAS_GPU else planned,
        )
    finally:
        del layer
        _forget()


def _tried(name: str, problem: Problem, make: Callable[[Problem], Layer]) -> Row:
    """Measures what others have made; the row says so if it fails. Collective over the ranks."""
    try:
        return _measured(name, problem, make)
    except ImportError as error:
        return Row(name, f"is left out: {error}")
    except Exception as error:  # noqa: BLE001 - others' code may raise anything
        first = (str(error).strip().splitlines() or [""])[0]
        return Row(name, f"fails here: {type(error).__name__}: {first}")
    finally:
        _forget()


def _timed(call: Callable[[], object]) -> Timing:
    """Times a call as often as some time allows, equally often on all ranks."""
    once = Timer(1, 1)(call).median_ms  # the slowest rank's, which all ranks know
    calls = int(SECONDS * 1e3 / max(once, 1e-3))
    return Timer(min(max(calls, FEWEST), MOST), 1)(call)


def _kept(layer: Layer) -> int:
    """Returns the bytes that torch has allocated for a backward after a forward."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = layer()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before - out.numel() * out.element_size()


def _forget() -> None:
    """Frees the memory of a measured layer; a GPU that an assertion has ended frees none."""
    gc.collect()
    if stopwatch.HAS_GPU:
        with contextlib.suppress(RuntimeError):  # whatever uses the GPU next says so, too
            torch.cuda.empty_cache()


def _megatron(problem: Problem) -> MegatronLayer:
    config = problem.config
    form = Form(
        config.activation,
        config.clamp_value,
        config.linear_offset,
        has_bias=bool(problem.weights.fc1_bias),
    )
    if form != Form.plain(config.gated):
        raise ImportError("it is measured with SwiGLU or GELU, without clamp, offset and biases")
    if not problem.x.is_cuda:
        raise ImportError("its grouped products are Transformer Engine's, which needs a GPU")
    import transformer_engine.pytorch  # noqa: F401 - before a group is made for nothing
    from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: F401 - likewise

    if not dist.is_initialized():  # Megatron wants a group, also of one rank
        place = f"file://{tempfile.mkdtemp(prefix='flashmoe_bench_')}/store"
        dist.init_process_group("nccl", init_method=place, rank=0, world_size=1)
    return MegatronLayer(problem)


OTHERS: dict[str, tuple[str, Callable[[Problem], Layer]]] = {
    "torch": ("torch, grouped GEMM", partial(UnfusedLayer, use_main_grad=False)),
    "megatron": ("Megatron, alltoall", _megatron),
}
"""Other implementations by name, each with its name for a reader."""
