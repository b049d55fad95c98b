"""The current GPU and its current stream, without what torch takes to tell the latter."""

import functools

import torch


def index_of(device: torch.device) -> int:
    """A GPU's index, the current one's if the device has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream(index: int) -> torch.cuda.Stream:
    """The current stream of a GPU by its index; to ask torch for it costs as much as to use it."""
    return _stream_of(index, torch._C._cuda_getCurrentRawStream(index))


@functools.lru_cache(maxsize=64)
def _stream_of(index: int, raw: int) -> torch.cuda.Stream:
    del raw  # which names it
    return torch.cuda.current_stream(index)
