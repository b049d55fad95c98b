"""Process pools in which DeepSpeed runs on processors, and skips where it is not installed."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import RankPool

START_S = 240
"""A pool's first use imports torch and DeepSpeed in all its processes, slowly on a busy machine."""


@pytest.fixture(scope="session")
def _same_hashes() -> Iterator[None]:
    """DeepSpeed orders expert groups as they lie in a set of strings, and needs one order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        yield


@pytest.fixture(scope="session")
def two_ranks(_same_hashes: None) -> Iterator[RankPool]:
    """Two processes for DeepSpeed; they start with the first use."""
    with contextlib.closing(RankPool(2)) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks(_same_hashes: None) -> Iterator[RankPool]:
    """Four processes for DeepSpeed; they start with the first use."""
    with contextlib.closing(RankPool(4)) as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_installed = importlib.util.find_spec("deepspeed") is not None
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        if not is_installed:
            item.add_marker(pytest.mark.skip(reason="deepspeed is not installed"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(START_S))
