"""Gives tests pools in which Megatron runs on processors, and skips them where it is missing."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import ForkServer

MEGATRON_LM = "FLASHMOE_MEGATRON_LM"
"""Environment variable that names a checkout of Megatron-LM."""


@pytest.fixture(scope="package")
def servers() -> Iterator[list[ForkServer]]:
    """Two processes that have imported Megatron, from which ranks are forked."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(ForkServer("tests.megatron.preloaded")))
            for _ in range(2)
        ]


@pytest.fixture(scope="session")
def megatron_lm() -> Path:
    """The checkout of Megatron-LM, which has the stock training scripts and NVIDIA's tests."""
    named = os.environ.get(MEGATRON_LM)
    if not named:
        pytest.skip(f"{MEGATRON_LM} names no checkout of Megatron-LM")
    path = Path(named).resolve()
    if not (path / "pretrain_gpt.py").is_file():
        pytest.fail(f"{MEGATRON_LM}={named}: wanted a checkout with pretrain_gpt.py")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_installed = _is_installed("megatron.core")
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        if not is_installed:
            item.add_marker(pytest.mark.skip(reason="megatron-core is not installed"))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
