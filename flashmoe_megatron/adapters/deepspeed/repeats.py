"""Repeats a step of a DeepSpeed engine in which a rank received more rows than the bound.

Imported after DeepSpeed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from flashmoe_megatron.adapters.metrics import Figures
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.repeats import Steps
from flashmoe_megatron.saved import Saved, save_tracker

_OF_ENGINE = "micro_steps", "_unmanaged_backward_count"
"""Attributes of an engine that its backwards and steps within a batch count."""
_OF_OPTIMIZER = ("micro_step_id",)
_OF_TIMER = ("micro_step_count",)
_OF_LAYER = "num_calls", "num_tokens"


class EngineSteps(Steps):
    """Implements :func:`~flashmoe_megatron.adapters.deepspeed.initialize.repeated_steps`."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = engine
        self._check()

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what a step returns. Collective over all ranks of the job.

        Raises:
            ConfigError: The engine is within a batch, or the step does not end where ``step`` of
                the engine updates the parameters.
        """
        if self._engine.micro_steps % self._engine.gradient_accumulation_steps():
            raise ConfigError(
                f"the engine is in micro-batch {self._engine.micro_steps}, within a batch of "
                f"{self._engine.gradient_accumulation_steps()}: wanted run before the first "
                "forward of a batch, so that all of it can be repeated"
            )
        with self._without_update():
            result = super().run(step, *args, **kwargs)
        if not self._engine.is_gradient_accumulation_boundary():
            raise ConfigError(
                "the function of run has ended within a batch of "
                f"{self._engine.gradient_accumulation_steps()} micro-batches: wanted forwards and "
                "backwards of all of them, and engine.step() between two"
            )
        return result

    @property
    def _model(self) -> nn.Module:
        module: nn.Module = self._engine.module
        return module

    def _check(self) -> None:
        problem = _problem(self._engine)
        if problem is not None:
            raise ConfigError(
                f"steps of this engine cannot be repeated, since {problem}; wanted ZeRO stage 0, "
                "1 or 2 without it, or a loop without repeated_steps and a larger row_bound"
            )

    def _save(self) -> Saved:
        engine = self._engine
        served: list[Any] = [
            module.flashmoe for module in self._model.modules() if _is_fused(module)
        ]
        counted: list[tuple[Any, tuple[str, ...]]] = [
            (engine, _OF_ENGINE),
            (engine.optimizer, _OF_OPTIMIZER),
            (engine.tput_timer, _OF_TIMER),
            *((one.experts, _OF_LAYER) for one in served),
            *((one.routes, ("counts",)) for one in served),
        ]
        tables = [
            (vars(owner), tuple(name for name in names if name in vars(owner)))
            for owner, names in counted
        ]
        tracker = checkpointing.get_cuda_rng_tracker()
        return Saved(
            self._model.modules(),
            tables,
            [lambda: save_tracker(tracker), lambda: Figures.forget_records],
        )

    def _drop_gradients(self) -> None:
        optimizer = self._engine.optimizer
        optimizer.zero_grad()
        self._engine.zero_grad()
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
                for group in gradients:
                    gradients[group] = None

    @contextlib.contextmanager
    def _without_update(self) -> Iterator[None]:
        """Refuses an update of parameters within, before all ranks have agreed on the step."""

        def refuse(*_: Any) -> None:
            raise ConfigError(
                "engine.step() of the last micro-batch was called within the function of run: "
                "wanted it after run, which decides whether the batch is repeated"
            )

        vars(self._engine)["_take_model_step"] = refuse
        try:
            yield
        finally:
            del self._engine._take_model_step


def _is_fused(module: nn.Module) -> bool:
    return hasattr(module, "flashmoe")


def _problem(engine: Any) -> str | None:
    """Says what about an engine keeps its gradients from being dropped."""
    optimizer = engine.optimizer
    if isinstance(engine, PipelineEngine):
        return "a PipelineEngine steps by itself"
    if engine.zero_optimization_stage() == 3:
        return "ZeRO stage 3 keeps gradients in partitions of its own"
    if engine.zenflow:
        return "ZenFlow keeps gradients over several steps"
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        if optimizer.cpu_offload:
            return "offload_optimizer keeps gradients in the memory of the host"
        if any(group.get("use_muon") for group in optimizer.optimizer.param_groups):
            return "Muon changes momenta in a backward"
    elif engine.zero_optimization_stage() > 0 and not isinstance(optimizer, BF16_Optimizer):
        return f"its optimizer is a {type(optimizer).__name__}"
    return None
