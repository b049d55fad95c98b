"""Kernels that hold multiprocessors: until they are told to leave, or for a time."""

import contextlib
import time
from collections.abc import Iterator

import torch

SOURCE = """
extern "C" __global__ void hold(volatile int* stop, volatile int* started, int milliseconds) {
    if (threadIdx.x != 0) return;
    atomicAdd_system((int*)started, 1);
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (!*stop && now - begin < milliseconds * 1000000ull);
}
"""
WAIT_SOURCE = """
extern "C" __global__ void wait_for(int microseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        __nanosleep(500);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < microseconds * 1000ull);
}
"""
SHARED_BYTES = 40_000  # what is left of an SM does not do for a CTA of the layer


class Spinner:
    """Holds one multiprocessor with each of its blocks."""

    def __init__(self) -> None:
        self._kernel = torch.cuda._compile_kernel(SOURCE, "hold")
        self._words = torch.zeros(2, dtype=torch.int32).pin_memory()
        self._stream = torch.cuda.Stream()

    @contextlib.contextmanager
    def hold(self, num_sms: int, *, at_most_s: float = 20.0) -> Iterator[None]:
        """Holds them for the length of the block, and no longer than ``at_most_s``."""
        torch.cuda.synchronize()
        self.launch(num_sms, at_most_s=at_most_s)
        deadline = time.monotonic() + 5
        while self.num_begun < num_sms and time.monotonic() < deadline:
            time.sleep(1e-4)
        assert self.num_begun == num_sms, "the spinner did not start"
        try:
            yield
        finally:
            self.leave()

    def launch(self, num_sms: int, *, at_most_s: float = 20.0) -> None:
        """Lets it hold them once there is room; nothing of it may be under way."""
        self._words.zero_()
        self._kernel(
            grid=(num_sms, 1, 1),
            block=(256, 1, 1),
            args=[self._words[:1], self._words[1:], int(1000 * at_most_s)],
            shared_mem=SHARED_BYTES,
            stream=self._stream,
        )

    def leave(self) -> None:
        """Ends it."""
        self._words[0] = 1

    @property
    def stream(self) -> torch.cuda.Stream:
        """What waits for it waits until it ends."""
        return self._stream

    @property
    def num_begun(self) -> int:
        """How many of its blocks have begun."""
        return int(self._words[1])

    @property
    def is_running(self) -> bool:
        """Whether it still holds them."""
        return not self._stream.query()


class Wait:
    """Keeps the current stream waiting for a time by the GPU's clock, on a few multiprocessors."""

    def __init__(self) -> None:
        self._kernel = torch.cuda._compile_kernel(WAIT_SOURCE, "wait_for")

    def __call__(self, microseconds: float, num_sms: int = 1, shared_bytes: int = 0) -> None:
        self._kernel(
            grid=(num_sms, 1, 1),
            block=(32, 1, 1),
            args=[round(microseconds)],
            shared_mem=shared_bytes,
        )
