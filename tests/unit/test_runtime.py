"""The kernel's backend, as far as it can be seen without a GPU."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from flashmoe_megatron.kernel.backend import KernelBackend, _on_own_device


class OnGpu(KernelBackend):
    """Tells which GPU is the current one in its calls."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    @_on_own_device
    def call(self) -> int:
        """The number of the current GPU."""
        return torch.cuda.current_device()


def test_calls_run_on_the_gpu_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", enter)
    for index in (0, 1):
        assert OnGpu(index).call() == index
        assert current == [0]


@pytest.mark.parametrize(
    "name",
    [
        *("forward", "begin", "finish", "backward"),
        "early_fc2_grads",
    ],
)
def test_all_calls_that_launch_do(name: str) -> None:
    assert hasattr(getattr(KernelBackend, name), "__wrapped__")
