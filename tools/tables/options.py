"""Makes the tables of options of the adapters' pages, from the options themselves."""

import json
from collections.abc import Callable

from flashmoe_megatron.adapters.deepspeed import settings as deepspeed
from flashmoe_megatron.adapters.megatron import settings as megatron
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.options import option_table

OPTIONS: dict[str, Callable[[], str]] = {
    "megatron": lambda: option_table(megatron.Settings, "flag", megatron.flag_of, str),
    "deepspeed": lambda: option_table(deepspeed.Settings, "key", str, json.dumps),
    "module": lambda: option_table(ModuleOptions, "option", str, repr),
}
"""By whose options they are; a module's are those of a replaced module of transformers."""


def options(whose: str) -> list[str]:
    """The table of all options of an adapter."""
    return OPTIONS[whose]().splitlines()
