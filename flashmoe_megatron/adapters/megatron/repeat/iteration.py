"""Runs an iteration again whose rows did not fit, with buffers as large as they need.

An iteration is one call of Megatron's schedule, or of the wrapper that replays it as a CUDA graph.
Its reductions are over when it returns, and the optimizer has not begun. There all ranks of the job
agree whether some rank received more rows than its buffers hold. If one did, everything that the
iteration has changed is put back, and it runs again without a bound, outside of graphs.

A bound that is to be measured begins with iterations that run so at once.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron import repeats
from flashmoe_megatron.adapters.megatron.config.asked import (
    has_all_experts,
    is_megakernel,
    is_set,
)
from flashmoe_megatron.adapters.megatron.dispatcher import is_ours
from flashmoe_megatron.adapters.megatron.repeat.batches import (
    is_kept,
    keep_batches,
    kept_again,
    problem_of,
)
from flashmoe_megatron.adapters.megatron.repeat.state import Changing
from flashmoe_megatron.adapters.megatron.repeat.verdicts import hold_verdicts
from flashmoe_megatron.adapters.megatron.routed import (
    built_experts,
    say,
    say_once,
)
from flashmoe_megatron.adapters.megatron.settings import (
    current_value,
    flag_of,
    megatron_args,
)
from flashmoe_megatron.adapters.megatron.shape import row_bound_of
from flashmoe_megatron.adapters.megatron.unchanged import unchanged_within
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.attempts import ATTEMPTS
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.options import RowBound
from flashmoe_megatron.ranks import Ranks

MEASURED = 10
"""The first iterations of a training whose bound is measured, which have exact buffers."""
_IS_ZEROED = "flashmoe_is_zeroed"
"""Attribute of Megatron's DDP: its gradients were set to zero since the last iteration."""
_MODEL = "flashmoe_repeated_model"
"""Attribute of a model's first chunk: what is known of the model."""
_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
_RESTORED = ("delayed", "blockwise", "tensorwise", "mxfp8")
"""The recipes of ``--fp8-format`` whose scales are put back, or come from a call's values alone.

A quantizer of a user's own, which the recipe ``custom`` names, may keep anything anywhere.
"""

Call = Callable[..., Any]
Leave = Callable[[], object]


class Iterations(repeats.Repeats):
    """The iterations of this process.

    Attributes:
        num_watched: How many were watched for an overflow, batches of evaluation included.
        num_repeats: How many of these were repeated.
    """

    def __init__(self) -> None:
        super().__init__("iteration", flag_of("row_bound"))
        self.num_watched = 0
        self._is_within = False
        self._measured: list[int] = []

    def run(self, call: Call, arguments: dict[str, Any], leave_graphs: Leave) -> Any:
        """Runs an iteration, a second time if its rows did not fit. Collective over the job.

        Args:
            call: Megatron's own.
            arguments: The call's, by their names.
            leave_graphs: Called before exact buffers are used; has the call run outside of CUDA
                graphs.

        Raises:
            ConfigError: The bound is to be measured, and no iteration can be repeated.
            RowBoundError: The rows did not fit, and the iteration cannot be repeated, or the ones
                before it were, too, or exact buffers do not fit.
            FlashMoEError: Another error that calls have put off.
        """
        given = arguments.get("model")
        chunks = given if isinstance(given, list) else [given]
        bound = None if self._is_within else _bound_of(chunks[0])
        if bound is None:
            return call(**arguments)
        self._is_within = True
        try:
            model = getattr(chunks[0], _MODEL, None) or _Model(chunks)
            is_measured = bound == "auto"
            if model.agreed_problem(arguments, is_measured=is_measured) is not None:
                return call(**arguments)
            if is_measured and not ATTEMPTS.blocks:
                return self._measure(model, call, arguments, leave_graphs)
            return self._run(model, call, arguments, leave_graphs)
        finally:
            self._is_within = False

    def _measure(
        self, model: "_Model", call: Call, arguments: dict[str, Any], leave_graphs: Leave
    ) -> Any:
        """Runs an iteration with exact buffers; the last such iteration sets the bound."""
        leave_graphs()
        with self._exact("starts"):
            result = call(**arguments)
        if not arguments.get("forward_only"):
            model.note_gradients()
            self._measured.append(ATTEMPTS.most)
        if len(self._measured) == MEASURED:
            (most,) = self._agree(max(self._measured))
            self._measured.clear()
            ATTEMPTS.grow(most)
            torch.cuda.empty_cache()  # what buffers of many sizes have left
            say(
                f"{flag_of('row_bound')} auto: a rank received at most {most} blocks of 128 rows "
                f"in {MEASURED} iterations, and buffers hold {ATTEMPTS.blocks} from now on"
            )
        return result

    def _run(
        self, model: "_Model", call: Call, arguments: dict[str, Any], leave_graphs: Leave
    ) -> Any:
        self.num_watched += 1
        before, began = self.num_repeats, 0.0
        problem = model.problem(arguments)
        is_training = not arguments.get("forward_only")
        if is_training:
            model.note_gradients()
        batches = arguments.get("data_iterator")
        kept = keep_batches(batches) if is_kept(batches) else batches

        def again() -> Any:
            nonlocal began
            began = time.perf_counter()
            verdicts.clear()
            leave_graphs()
            if is_training:
                model.zero_gradients()
            return call(**{**arguments, "data_iterator": kept_again(kept)})

        with hold_verdicts() as verdicts:
            result = self._run_twice_at_most(
                lambda: call(**{**arguments, "data_iterator": kept}),
                again,
                model.changing.save(),
                lambda: problem or problem_of(kept),
            )
        for give in verdicts:
            give()
        if self.num_repeats > before:
            say(
                f"repeated {'an iteration' if is_training else 'a batch of evaluation'} with exact "
                "buffers, since a rank received more rows than the row bound allows; buffers hold "
                f"{ATTEMPTS.blocks} blocks of 128 rows from now on (repeat {self.num_repeats}, "
                f"{time.perf_counter() - began:.2f} s)"
            )
        return result

    def _agree(self, *values: int) -> list[int]:
        """Tells once how long agreeing takes."""
        began = time.perf_counter()
        agreed = super()._agree(*values)
        if self.num_watched == 2:  # the first one makes connections
            say_once(
                "an iteration with more rows than the row bound allows is repeated; all ranks "
                f"agree on that after each, {1e3 * (time.perf_counter() - began):.2f} ms just now"
            )
        return agreed


class _Model:
    """A model's chunks, and what is known of them."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks
        self.changing = Changing(chunks)
        self._agreed: dict[bool, str | None] = {}
        setattr(chunks[0], _MODEL, self)  # which lives as long as the model

    def agreed_problem(self, arguments: Mapping[str, Any], *, is_measured: bool) -> str | None:
        """Returns why no iteration of this kind can be repeated on some rank, ``None`` if all can.

        Collective over the job in the first call for each kind; rank 0 then tells the user.

        Args:
            arguments: The iteration's.
            is_measured: Whether the bound is to be measured.

        Raises:
            ConfigError: There is one, and the bound is to be measured.
        """
        kind = bool(arguments.get("forward_only"))
        if kind not in self._agreed:
            problems = Ranks(dist.group.WORLD).gather(self.problem(arguments))
            found = [problem for problem in problems if problem is not None]
            self._agreed[kind] = found[0] if found else None
        first, what = self._agreed[kind], "a batch of evaluation" if kind else "an iteration"
        if first is not None and is_measured:
            raise ConfigError(
                f"{flag_of('row_bound')} auto: {what} cannot be repeated, since {first}; wanted a "
                "number, or neither a bound nor a CUDA graph of the iteration"
            )
        if first is not None:
            say_once(
                f"{what} with more rows than the row bound allows ends this run and is not "
                f"repeated: {first}"
            )
        return first

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """Returns why this iteration cannot be repeated on this rank."""
        return next(self._problems(arguments), None)

    def _problems(self, arguments: Mapping[str, Any]) -> Iterator[str]:
        config = _config_of(self._chunks[0])
        recipe = getattr(config, "fp8_recipe", None)
        if is_set("fp8")(config) and recipe not in _RESTORED:
            yield (
                f"--fp8-recipe {getattr(recipe, 'value', recipe)} has quantizers that may keep "
                f"what is not put back: wanted one of {', '.join(_RESTORED)}"
            )
        if is_set("fine_grained_activation_offloading")(config):
            yield "what --fine-grained-activation-offloading keeps cannot be put back"
        if is_set("moe_routing_trace_path")(megatron_args()):
            yield "records of --moe-routing-trace-path cannot be taken back"
        if any(isinstance(one.backend, HostsBackend) for one in built_experts()):
            yield "experts are on several hosts"
        if not is_kept(arguments.get("data_iterator")):
            kind = type(arguments["data_iterator"]).__name__
            yield f"data_iterator is a {kind}, wanted an iterator, a list of iterators or None"
        if arguments.get("forward_only"):
            return
        for chunk in self._chunks:
            if not hasattr(chunk, "zero_grad_buffer"):
                yield f"the model is a {type(chunk).__name__}, wanted Megatron's DDP"
            elif not getattr(chunk, _IS_ZEROED, False):
                yield (
                    "gradients of earlier calls would be lost: wanted one call of the schedule "
                    "between zero_grad_buffer of Megatron's DDP and the optimizer's step"
                )

    def note_gradients(self) -> None:
        """Notes that there are gradients from now on."""
        for chunk in self._chunks:
            setattr(chunk, _IS_ZEROED, False)

    def zero_gradients(self) -> None:
        """Drops the gradients of an iteration."""
        for chunk in self._chunks:
            zero: Any = chunk.zero_grad_buffer
            zero()
        self.note_gradients()


ITERATIONS = Iterations()
"""The iterations of this process."""


def patch_schedules(schedules: ModuleType) -> None:
    """Wraps the schedules of ``megatron.core.pipeline_parallel.schedules``."""
    for name in _SCHEDULES:
        patch(schedules, name, _repeated)


def _repeated(original: Function) -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        with unchanged_within(kwargs.get("model")):
            return ITERATIONS.run(functools.partial(original, *args), kwargs, lambda: None)

    return run


def patch_stash(paged_stash: ModuleType) -> None:
    """Takes the place of Megatron's own repeats, which are for rows that its dispatchers drop."""

    def make(original: Function) -> Function:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            run = self.forward_backward_func if _is_ours(self.config) else None
            return original(self, *args, **kwargs) if run is None else run(*args, **kwargs)

        return call

    patch(paged_stash.PagedStashRunner, "__call__", make)


def patch_ddp(module: ModuleType) -> None:
    """Notes when gradients are set to zero."""

    def make(original: Function) -> Function:
        def zero_grad_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
            setattr(self, _IS_ZEROED, True)
            return original(self, *args, **kwargs)

        return zero_grad_buffer

    patch(module.DistributedDataParallel, "zero_grad_buffer", make)


def _bound_of(chunk: Any) -> RowBound | None:
    """Returns the bound of a model whose layers are ours and may overflow, on every rank alike.

    A rank that has all experts receives the rows of its own tokens alone, which are the mean, and
    no bound is less. The wait after an iteration would only take time.
    """
    config = _config_of(chunk)
    is_watched = _is_ours(config) and not has_all_experts(config)
    return row_bound_of(config, current_value("row_bound")) if is_watched else None


def _is_ours(config: Any) -> bool:
    return bool(getattr(config, "num_moe_experts", None)) and (
        is_ours(config) or is_megakernel(config)
    )


def _config_of(chunk: Any) -> Any:
    while not hasattr(chunk, "config") and hasattr(chunk, "module"):
        chunk = chunk.module
    return getattr(chunk, "config", None)
