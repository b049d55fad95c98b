"""The command line; see the package."""

import sys

from tools import tables
from tools.arguments import parser_of
from tools.tables.makers import MAKERS
from tools.tables.marks import ROOT, pages, with_tables


def main(arguments: list[str]) -> int:
    parser_of(tables.__doc__).parse_args(arguments)
    for page in pages():
        text = page.read_text()
        try:
            made = with_tables(text, MAKERS)
        except ValueError as error:
            print(f"error: {page.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 2
        if made != text:
            page.write_text(made)
            print(page.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
