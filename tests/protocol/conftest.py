"""The programs, compiled once for a session, and the figures that they report at its end."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.protocol.programs import build

FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def explore(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("explore", tmp_path_factory.mktemp("protocol") / "explore")


@pytest.fixture(scope="session")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("order", tmp_path_factory.mktemp("protocol") / "order")


@pytest.fixture(scope="session")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("stress", tmp_path_factory.mktemp("protocol") / "stress")


@pytest.fixture
def tell(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[[str], None]:
    """Keeps a line for the summary, and for the XML report."""

    def keep(line: str) -> None:
        record_property("protocol", line)
        request.config.stash.setdefault(FIGURES, []).append(line)

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures = terminalreporter.config.stash.get(FIGURES, [])
    if figures:
        terminalreporter.section("protocol")
    for line in figures:
        terminalreporter.write_line(line)
