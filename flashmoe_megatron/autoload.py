"""Installs the flashmoe dispatcher in every process that imports torch, for those who opt in.

The package's entry point in the group ``torch.backends``, which torch calls at the end of its own
import. With ``FLASHMOE_AUTOLOAD=1`` an unmodified ``torchrun pretrain_gpt.py`` knows
``--moe-token-dispatcher-type flashmoe``; otherwise nothing happens.
"""

import os

VARIABLE = "FLASHMOE_AUTOLOAD"


def autoload() -> None:
    """Installs flashmoe if the environment asks for it.

    Raises:
        ValueError: The variable is neither empty, "0" nor "1".
    """
    value = os.environ.get(VARIABLE, "")
    if value in ("", "0"):
        return
    if value != "1":
        raise ValueError(f"{VARIABLE}={value!r}: wanted 1 to install flashmoe, or 0")
    from flashmoe_megatron.adapters.megatron import install

    install()
