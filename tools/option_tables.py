"""Writes the tables of options into the adapters' pages, from the options themselves.

::

    python -m tools.option_tables
"""

import json
import sys
from pathlib import Path

from flashmoe_megatron.adapters.deepspeed import settings as deepspeed
from flashmoe_megatron.adapters.megatron import settings as megatron
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.options import option_table
from tools.arguments import parser_of

ADAPTERS = Path(__file__).parents[1] / "flashmoe_megatron" / "adapters"
TABLES = {
    ADAPTERS / "megatron" / "README.md": lambda: option_table(
        megatron.Settings, "flag", megatron.flag_of, str
    ),
    ADAPTERS / "deepspeed" / "README.md": lambda: option_table(
        deepspeed.Settings, "key", str, json.dumps
    ),
    ADAPTERS / "transformers" / "README.md": lambda: option_table(
        ModuleOptions, "option", str, repr
    ),
}
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->\n"


def with_table(page: str, table: str) -> str:
    """A page with its table replaced, between the two marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page has no {BEGIN.strip()} before {END.strip()}")
    return before + BEGIN + table + END + after


def main() -> int:
    parser_of(__doc__).parse_args()
    for page, table in TABLES.items():
        page.write_text(with_table(page.read_text(), table()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
