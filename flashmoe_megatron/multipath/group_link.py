"""torch.distributed as a link: NCCL's, or gloo's, sends and receives on a part of the bytes."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

from flashmoe_megatron.errors import LinkError
from flashmoe_megatron.multipath.control import Control
from flashmoe_megatron.multipath.links import (
    Exchange,
    Flight,
    Link,
    broken_link,
    moment,
    seconds_between,
)


class GroupLink(Link):
    """The group's own communicator.

    Args:
        control: The ranks.
        backend: "nccl" moves tensors on GPUs, "gloo" those in the host's memory.
        device: Where tensors are.

    Raises:
        LinkError: The group has another backend for such tensors.
    """

    def __init__(
        self, control: Control, backend: Literal["nccl", "gloo"], device: torch.device
    ) -> None:
        self.name = backend
        self.device_type = "cuda" if backend == "nccl" else "cpu"
        self.group, self.device = control.group, device
        self.rank = control.rank
        try:
            found = self.group._get_backend(torch.device(self.device_type)).name()
        except RuntimeError as error:
            found = f"none ({error})"
        if found != backend:
            raise LinkError(f"link {backend}: the group's backend is {found}, wanted {backend}")
        self.stream: torch.cuda.Stream | None = None
        if backend == "nccl":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, exchange: Exchange, index: int, tickets: Any) -> Flight:
        """See the base class."""
        kind = _HostFlight if self.stream is None else _DeviceFlight
        return kind(self, exchange, index)

    def close(self) -> None:
        """The communicator is the group's, and stays."""


class _GroupFlight(Flight):
    """What a communicator carries of an exchange."""

    def __init__(self, link: GroupLink, exchange: Exchange, index: int) -> None:
        self._link, self._works = link, list[Any]()
        part = exchange.parts[index]
        self._peers = ", ".join(str(piece.peer) for piece in exchange.pieces)
        self._operations, self._received = [], 0
        self._started, self._is_timed = exchange.started, exchange.is_timed
        for piece in exchange.pieces:
            send, receive = (
                tensor[part.begin : part.end] for tensor in (piece.send, piece.receive)
            )
            self._received += receive.numel()
            for function, tensor in ((dist.isend, send), (dist.irecv, receive)):
                if tensor.numel():
                    operation = dist.P2POp(
                        function, tensor, group=link.group, group_peer=piece.peer
                    )
                    self._operations.append(operation)

    def num_bytes(self) -> int:
        """What this rank received by it."""
        return self._received

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """What torch.distributed raises, also at the start where a peer is gone, as the link's."""
        try:
            yield
        except RuntimeError as error:
            raise broken_link(self._link.name, self._link.rank, self._peers, error) from error

    def _start(self) -> None:
        if self._operations:
            with self._named_errors():
                self._works = dist.batch_isend_irecv(self._operations)

    def _finish(self) -> None:
        with self._named_errors():
            for work in self._works:
                work.wait()
        self._works, self._operations = [], []  # flights are kept for their times, tensors are not


class _HostFlight(_GroupFlight):
    """The same with tensors in the host's memory."""

    _began_at = _ended_at = 0.0

    def steps(self) -> Iterator[None]:
        """Starts it; gloo cuts messages itself."""
        self._began_at = time.monotonic()
        self._start()
        yield

    def join(self) -> None:
        """Waits for it."""
        self._finish()
        self._ended_at = time.monotonic()

    def seconds(self) -> float:
        """Until the caller saw its end."""
        return self._ended_at - self._began_at


class _DeviceFlight(_GroupFlight):
    """The same on a GPU, in a stream of the link's."""

    def steps(self) -> Iterator[None]:
        """Issues it behind the current stream; NCCL cuts messages itself."""
        stream = self._link.stream
        assert stream is not None
        stream.wait_event(self._started)
        with torch.cuda.stream(stream):
            self._start()
            self._finish()
            self._end_event = moment(stream, self._is_timed)
        yield

    def join(self) -> None:
        """Makes the current stream wait for it."""
        torch.cuda.current_stream(self._link.device).wait_event(self._end_event)

    def seconds(self) -> float:
        """By the GPU's clock."""
        return seconds_between(self._started, self._end_event)
