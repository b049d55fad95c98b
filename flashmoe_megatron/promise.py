"""The word of a layer's owner that the layer's weights stay as they are for a while.

Experts in FP8 compute with quantized copies of weights. A write through ``.data``, as optimizers
make, raises no counter, so that no layer can tell by itself whether a copy is older than its
weight; by default each pass makes one. An owner that knows when weights change can promise that
they do not, until it takes its word back: then the first pass makes the copies, and others find
them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch


class Promise:
    """Says whether the weights of one layer stay as they are; keeps what was made of them.

    The word holds as well for what the layer can see for itself: where a weight lies in other
    memory, was written in place or has become frozen, its copies are made again.

    A CUDA graph repeats what its capture saw, whatever has been made outside of it, before or
    since. So a word that was given outside of a capture does not hold within it, and the other way
    round.
    """

    def __init__(self) -> None:
        self._is_given = self._is_captured = False
        self._made: dict[str, Any] = {}
        self._made_of: dict[str, tuple[object, ...]] = {}
        """The weights of each maker's current copies; other makers are left out."""

    def give(self) -> None:
        """Begins to promise; what was made before is to be made again."""
        self._is_given = True
        self._made_of.clear()
        self._is_captured = _is_capturing()

    def end(self) -> None:
        """Takes the word back; the memory of what was made stays for the next time."""
        self._is_given = False
        self._made_of.clear()

    def renew(self) -> None:
        """Tells that weights have changed, while the word is given and while it is not."""
        self._made_of.clear()

    def making(self, maker: str, tensors: Sequence[torch.Tensor]) -> "Making | None":
        """Returns what is to be known of copies of these weights; ``None`` without a promise.

        Args:
            maker: Names who makes the copies: passes of another name have copies of their own.
            tensors: The weights as this pass reads them.
        """
        if not self._is_given or self._is_captured != _is_capturing():
            return None
        if any(map(torch.Tensor.is_inference, tensors)):  # which count no writes
            return None
        seen = (*map(torch.Tensor.data_ptr, tensors), *map(_shown, tensors))
        return Making(self, maker, (*seen, sum(map(_version_of, tensors))))

    def __reduce__(self) -> tuple[type["Promise"], tuple[()]]:
        """A copy of a layer has weights of its own, of which nothing has been promised."""
        return Promise, ()


class Making(NamedTuple):
    """The copies of a layer's weights in one pass, while their owner's word holds."""

    promise: Promise
    maker: str
    of: tuple[object, ...]

    @property
    def is_current(self) -> bool:
        """Tells whether an earlier pass has made them of the same weights."""
        return self.promise._made_of.get(self.maker) == self.of

    @property
    def made(self) -> Any:
        """What was made last, ``None`` before; its memory can be used again."""
        return self.promise._made.get(self.maker)

    def keep(self, made: Any) -> None:
        """Keeps copies, or memory for them, which are not current before :meth:`note`."""
        self.promise._made[self.maker] = made
        self.promise._made_of.pop(self.maker, None)

    def note(self) -> None:
        """Notes that this pass has made the copies."""
        self.promise._made_of[self.maker] = self.of


@contextlib.contextmanager
def promised(promises: Sequence[Promise]) -> Iterator[None]:
    """Gives the promises of several layers for its body, at whose end they are taken back."""
    for promise in promises:
        promise.give()
    try:
        yield
    finally:
        for promise in promises:
            promise.end()


def _is_capturing() -> bool:
    """Asks torch, which has no answer in builds without CUDA."""
    is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_initialized and torch.cuda.is_current_stream_capturing()


_version_of = attrgetter("_version")
_shown = attrgetter("shape", "dtype", "requires_grad")
