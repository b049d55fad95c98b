"""The text of the examples: the sources of Python's own library, which every machine has."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path


def read_sources(megabytes: int) -> Iterator[bytes]:
    """The library's files, in one order on every machine of one Python.

    Args:
        megabytes: Files are left out that would exceed it in all.

    Yields:
        The bytes of one file.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    left = megabytes * 2**20
    for source in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        text = source.read_bytes()
        if not text or len(text) > left or "site-packages" in source.parts:
            continue
        left -= len(text)
        yield text
