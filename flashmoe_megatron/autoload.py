"""Installs the flashmoe dispatcher in every process that imports torch, for those who opt in.

The package's entry point in the group ``torch.backends``, which torch calls at the end of its own
import. With ``FLASHMOE_AUTOLOAD=1`` an unmodified ``torchrun pretrain_gpt.py`` knows
``--moe-token-dispatcher-type flashmoe``, and NeMo Automodel ``dispatcher: flashmoe``. With
``FLASHMOE_REPLACES=alltoall`` Megatron's layers of that dispatcher are ours as well; otherwise
nothing happens. Torch would wrap an error that is raised here, and fail in processes that have no
MoE layers; so a wrong value is one line, and the error of Megatron's first MoE layer.
"""

import os
import sys
from types import ModuleType
from typing import Any, NoReturn

VARIABLE = "FLASHMOE_AUTOLOAD"
ON = ("1", "yes", "true", "on")
OFF = ("", "0", "no", "false", "off")


def autoload() -> None:
    """Installs flashmoe if the environment asks for it."""
    value, replaces = (os.environ.get(name, "") for name in (VARIABLE, "FLASHMOE_REPLACES"))
    is_asked = bool(replaces.strip())
    if value.lower() in OFF and not is_asked:
        return
    if value.lower() not in ON + OFF:
        sentence = f"{VARIABLE}={value!r}: wanted {', '.join(ON)} to install flashmoe, or 0"
    elif is_asked and value and value.lower() in OFF:
        sentence = (
            f"FLASHMOE_REPLACES={replaces} installs flashmoe and {VARIABLE}={value} does not: "
            "unset one of them"
        )
    else:
        from flashmoe_megatron.adapters import automodel, megatron
        from flashmoe_megatron.errors import ConfigError

        automodel.attach()
        try:
            megatron.attach()
        except ConfigError as error:
            sentence = str(error)
        else:
            return
    # torchrun imports torch itself before its ranks do, and has then said it.
    if "TORCHELASTIC_RUN_ID" not in os.environ and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"flashmoe: {sentence}\n")
    _refuse_layers(sentence)


def _refuse_layers(sentence: str) -> None:
    """Makes Megatron's MoE layers an error."""
    from flashmoe_megatron.adapters.patch import patch, when_imported

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        from flashmoe_megatron.errors import ConfigError

        raise ConfigError(sentence)

    def change(moe_layer: ModuleType) -> None:
        patch(moe_layer.MoELayer, "__init__", lambda original: refuse)

    when_imported("megatron.core.transformer.moe.moe_layer", change)
