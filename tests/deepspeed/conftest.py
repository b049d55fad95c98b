"""Process pools in which DeepSpeed runs on processors, and skips where it is not installed."""

import contextlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import ForkServer

AUTOEP = (0, 19, 7)
"""The first release whose AutoEP layers are served; tests of them have it in their name."""


@pytest.fixture(scope="package")
def servers() -> Iterator[list[ForkServer]]:
    """A process that has imported DeepSpeed, from which ranks are forked.

    DeepSpeed orders expert groups as they lie in a set of strings, and needs one order on all.
    """
    with contextlib.closing(ForkServer("tests.deepspeed.preloaded")) as server:
        yield [server]


def release() -> tuple[int, ...]:
    """DeepSpeed's, without importing it; () where it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("deepspeed")
        return tuple(int(part) for part in version.split("+")[0].split(".")[:3])
    return ()


def pytest_report_header() -> str:
    return "deepspeed: " + (".".join(map(str, release())) or "not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        if not release():
            item.add_marker(pytest.mark.skip(reason="deepspeed is not installed"))
        elif "older_releases" in item.name:
            if release() >= AUTOEP:
                item.add_marker(pytest.mark.skip(reason="about releases before DeepSpeed 0.19.7"))
        elif "autoep" in item.name and release() < AUTOEP:
            item.add_marker(pytest.mark.skip(reason="AutoEP is served from DeepSpeed 0.19.7"))
