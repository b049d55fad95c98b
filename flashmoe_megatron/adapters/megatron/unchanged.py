"""Promises that weights stay as they are within one call of Megatron's schedule.

Such a call has all micro-batches of a step, and the optimizer comes after it; parameters that
``--overlap-param-gather`` still gathers are there before a layer reads them. Transformer Engine's
own signal, ``is_first_microbatch``, says the same from the first micro-batch on, but Megatron gives
it in runs with ``--fp8-format`` alone, and does not say when it ends: a generation of text that
follows would find a promise that nobody keeps.

Within a graph of a whole iteration the schedule is captured, and so is the promise: each replay
quantizes in its first micro-batch. Graphs of pieces are captured outside of it, or within a promise
that was given outside of them: they quantize in each pass.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from flashmoe_megatron.adapters.megatron.settings import current_value
from flashmoe_megatron.adapters.megatron.shape import ROUTED
from flashmoe_megatron.promise import promised


@contextlib.contextmanager
def unchanged_within(model: Any) -> Iterator[None]:
    """Gives the promise for all layers of the chunks that a schedule is called with.

    Where calls are nested, the inner one ends both promises. Nothing is promised unless settings
    ask for it.
    """
    if current_value("quantize") != "step":
        yield
        return
    chunks = model if isinstance(model, list) else [model]
    promises = [
        getattr(module, ROUTED).promise
        for chunk in chunks
        for module in chunk.modules()
        if hasattr(module, ROUTED)
    ]
    with promised(promises):
        yield
