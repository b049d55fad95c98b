"""NeMo Automodel: ``dispatcher: flashmoe`` in a model's backend configuration.

Importing this imports neither torch nor Automodel; :func:`attach` attaches the patches to
Automodel's modules as they are imported, or at once if they are already.
"""

import functools
import importlib
from types import ModuleType

from flashmoe_megatron.adapters.patch import when_imported

__all__ = ["attach"]

_PATCHES = (
    ("models.common.utils", "patch_backend"),
    ("moe.experts", "patch_experts"),
    ("_peft.lora_experts", "patch_lora"),
    ("moe.quantized_experts", "patch_quantized"),
)
"""A module below nemo_automodel.components, and the function of the seam that patches it."""


def attach() -> None:
    """Adds the dispatcher "flashmoe"; models of other dispatchers are not affected."""
    for theirs, function in _PATCHES:
        apply = functools.partial(_apply, function)
        when_imported(f"nemo_automodel.components.{theirs}", apply)


def _apply(function: str, theirs: ModuleType) -> None:
    """Imports what patches a module, which imports torch, when there is something to patch."""
    seam = importlib.import_module(f"{__name__}.seam")
    getattr(seam, function)(theirs)
