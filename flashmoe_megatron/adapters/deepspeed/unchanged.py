"""Promises that weights stay as they are within one batch of a DeepSpeed engine's micro-batches.

Imported after DeepSpeed.
"""

import functools
from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from flashmoe_megatron.adapters.deepspeed.settings import SECTION, Settings
from flashmoe_megatron.eager import eager
from flashmoe_megatron.promise import Promise


def promise_problem(engine: Any, settings: Settings) -> str | None:
    """Says why nothing can be promised of an engine's weights, if that is asked for."""
    if settings.quantize != "step":
        return None
    if isinstance(engine, PipelineEngine):
        problem = "in a PipelineEngine, which counts no micro-batches"
    elif getattr(engine, "zenflow", False):
        problem = "with ZenFlow, which updates weights within a batch"
    else:
        return None
    return f'{SECTION}.quantize is "step" {problem}; wanted "pass"'


class Batches:
    """Gives the promise in the first micro-batch of each batch, before a forward of the model.

    The engine's step updates weights after the last one. A loop that sets its boundaries by itself
    is followed by the engine's count of steps. Nothing is promised of evaluation, which a loop may
    run with other weights, nor of what is left of a batch after it, nor after a loaded checkpoint.
    """

    def __init__(self, engine: Any, promises: Sequence[Promise]) -> None:
        self._engine, self._promises = engine, promises
        self._batch: tuple[int, int] | None = None
        load = engine.load_checkpoint

        @functools.wraps(load)
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            try:
                return load(*args, **kwargs)
            finally:
                self._end()

        engine.load_checkpoint = load_checkpoint

    @eager  # engine.compile() takes the hooks of a forward along
    def __call__(self) -> None:
        """Looks where in a batch the engine is."""
        engine = self._engine
        number, micro_batch = divmod(engine.micro_steps, engine.gradient_accumulation_steps())
        batch = int(engine.global_steps), number
        if not engine.module.training:
            self._end()
        elif micro_batch == 0:
            self._batch = batch
            for promise in self._promises:
                promise.give()
        elif batch != self._batch:
            self._end()

    def _end(self) -> None:
        self._batch = None
        for promise in self._promises:
            promise.end()
