"""Gives all tests process pools, skips what the machine cannot run, and tells failures at once."""

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from flashmoe_megatron.kernel import bindings
from tests import program_forks
from tests.distributed import RankPool, plain_servers
from tests.forks import ForkServer
from tools.gpu_check import SHARED_GPUS

HOPPER = (9, 0)
ENDING = Path(__file__).parent / "ending"
"""Has what every process of the tests does at its start and at its end."""
WITH_TORCH = (
    "torch._dynamo",  # which optimizers import
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
)
"""Imports of many programs that take long."""

# Ranks that share a GPU wait for one another, while a kernel's first launch waits for all of them.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
# Else gloo looks up the host's name for each group of processes. Where that name is not in
# /etc/hosts and no name server answers, a pool of ranks then takes ten seconds longer to start.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ENDING), os.environ.get("PYTHONPATH")])
)


@pytest.fixture(scope="package")
def servers() -> Sequence[ForkServer]:
    """Processes from which ranks are forked; a framework's folder has its own, which import it."""
    return plain_servers()


@pytest.fixture(scope="session")
def with_torch() -> Path:
    """Forks programs that have torch already; see ``run_python``."""
    return program_forks.listening("torch", *WITH_TORCH)


@pytest.fixture(scope="session")
def with_transformers() -> Path:
    """Forks programs that have torch and transformers, which DeepSpeed imports, too."""
    return program_forks.listening("transformers", *WITH_TORCH, "transformers.trainer")


@pytest.fixture(scope="session")
def with_megatron() -> Path:
    """Forks programs that have what Megatron imports, and import Megatron and the package."""
    modules = ("torch.distributed.run", "tests.megatron.without_megatron")
    return program_forks.listening("megatron", *modules)


@pytest.fixture(scope="module")  # gloo's threads poll for as long as their groups live
def ranks(servers: Sequence[ForkServer]) -> Iterator[RankPool]:
    """Four gloo processes that live as long as a file's tests; they start with the first use."""
    with contextlib.closing(RankPool(4, servers)) as pool:
        yield pool


@pytest.fixture(scope="module")
def four_ranks(ranks: RankPool) -> RankPool:
    """The same, where there are two_ranks besides."""
    return ranks


@pytest.fixture(scope="module")
def two_ranks(servers: Sequence[ForkServer]) -> Iterator[RankPool]:
    """Two gloo processes, which are all ranks of their world."""
    with contextlib.closing(RankPool(2, servers)) as pool:
        yield pool


class AtOnce:
    """Prints a failure when it happens, for whoever reads a run that may be cut short."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_sep("_", f"{report.nodeid} ({report.when})")
            self._terminal.write_line(report.longreprtext)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--at-once",
        action="store_true",
        help="print failures when they happen, not at the end alone",
    )


def gpu_of_worker(worker: str, gpus: str) -> str:
    """Returns the GPU of a process of xdist, "gw5" being the sixth of them."""
    shared = gpus.split(",")
    return shared[int(worker.removeprefix("gw")) % len(shared)]


@pytest.hookimpl(trylast=True)  # after pytest has made its terminal
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        program_forks.begin_run()
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get(SHARED_GPUS)
    if worker and gpus:  # before CUDA is begun, which reads it once
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of_worker(worker, gpus)
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    # The processes of xdist hand their reports to the first one, which prints them.
    if config.getoption("at_once", False) and not hasattr(config, "workerinput") and terminal:
        config.pluginmanager.register(AtOnce(terminal), "flashmoe-at-once")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = _num_hopper_gpus()
    has_library = bindings.LIBRARY_VARIABLE in os.environ or bindings.LIBRARY.is_file()
    for item in items:
        if item.get_closest_marker("library") and not has_library:
            reason = f"{bindings.LIBRARY} is not built: run python tools/build.py"
            item.add_marker(pytest.mark.skip(reason=reason))
        wanted = 1 if item.get_closest_marker("gpu") else 0
        marker = item.get_closest_marker("multi_gpu")
        if marker is not None:
            wanted = int(marker.args[0])
        if wanted > num_gpus:
            item.add_marker(
                pytest.mark.skip(reason=f"needs {wanted} Hopper GPU(s), found {num_gpus}")
            )


def pytest_collection_finish() -> None:
    """Keeps collections of garbage from looking at imported modules and tests, which stay."""
    gc.collect()
    gc.freeze()


def _num_hopper_gpus() -> int:
    if not torch.cuda.is_available():
        return 0
    devices = range(torch.cuda.device_count())
    return sum(torch.cuda.get_device_capability(device) == HOPPER for device in devices)
