"""The promise that weights of a model's experts stay as they are, in a loop of plain PyTorch."""

import contextlib
from collections.abc import Iterator

from torch import nn

from flashmoe_megatron.config import check_class
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.promise import promised


@contextlib.contextmanager
def unchanged_weights(model: nn.Module) -> Iterator[None]:
    """Promises that no weight of the model's experts in FP8 changes within.

    They are quantized in each layer's first forward, and later forwards within find the copies.
    Nothing can tell whether the promise is kept: a write through ``.data`` leaves no trace. What a
    layer does see ends the copies' use: a write in place, other memory, and ``load_state_dict``.
    Made for the micro-batches between two steps of an optimizer::

        for batches in loader:
            with flashmoe_megatron.unchanged_weights(model):
                for batch in batches:
                    model(batch).sum().backward()
            optimizer.step()

    A layer keeps the memory of its copies, a byte for each weight, as long as it lives. Within
    another promise for the same layers this one ends both.

    Raises:
        ConfigError: The model is no module, or has no
            :class:`~flashmoe_megatron.layer.FlashMoELayer` whose experts compute in FP8.
    """
    check_class("the model", model, nn.Module, "a torch.nn.Module")
    promises = [
        module.promise
        for module in model.modules()
        if isinstance(module, FlashMoELayer) and module.config.in_fp8
    ]
    if not promises:
        raise ConfigError(
            f"unchanged_weights of a {type(model).__name__} without experts in FP8: wanted a model "
            "with a FlashMoELayer whose config has experts='fp8', since others copy no weights"
        )
    with promised(promises):
        yield
