"""torch.distributed as a link: NCCL's, or gloo's, sends and receives on a part of the bytes."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.errors import LinkError
from flashmoe_megatron.multipath.control import Control
from flashmoe_megatron.multipath.links import (
    Exchange,
    Flight,
    Link,
    seconds_between,
)
from flashmoe_megatron.multipath.queues import Queues


class GroupLink(Link):
    """The group's own communicator: NCCL's for tensors on GPUs, gloo's for those of a CPU.

    Args:
        control: The ranks.
        queues: The queues of the device where tensors are.

    Raises:
        LinkError: The group has another backend for such tensors.
    """

    def __init__(self, control: Control, queues: Queues) -> None:
        self.group, self.rank, self.queues = control.group, control.rank, queues
        kind = queues.device.type
        self.name = {"cuda": "nccl", "cpu": "gloo"}[kind]
        try:
            found = self.group._get_backend(torch.device(kind)).name()
        except RuntimeError as error:
            found = f"none ({error})"
        if found != self.name:
            raise LinkError(f"link {self.name}: the group's backend is {found}, wanted {self.name}")
        self.stream = queues.make()

    def begin(self, exchange: Exchange, index: int) -> Flight:
        """See the base class."""
        return _GroupFlight(self, exchange, index)

    def close(self) -> None:
        """The communicator is the group's, and stays."""


class _GroupFlight(Flight):
    """The part of an exchange that a communicator carries."""

    def __init__(self, link: GroupLink, exchange: Exchange, index: int) -> None:
        self._link = link
        part = exchange.parts[index]
        self._peers = ", ".join(str(piece.peer) for piece in exchange.pieces)
        self._operations, self._received = list[Any](), 0
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
        """Returns the bytes that this rank received by it."""
        return self._received

    def steps(self) -> Iterator[None]:
        """Issues it after the current stream's work; torch.distributed cuts messages itself."""
        link = self._link
        link.stream.wait_event(self._started)
        link.queues.run(link.stream, self._carry)
        self._ended = link.queues.moment(link.stream, self._is_timed)
        yield

    def join(self) -> None:
        """Makes the current stream wait for it."""
        self._link.queues.current().wait_event(self._ended)

    def seconds(self) -> float:
        """By the clock of queues."""
        return seconds_between(self._started, self._ended)

    def _carry(self) -> None:
        operations, self._operations = self._operations, []  # flights are kept, tensors are not
        try:  # torch.distributed also raises at the start where a peer is gone
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        except RuntimeError as error:
            link = self._link
            raise LinkError(
                f"link {link.name} between ranks {link.rank} and {self._peers} broke: {error}"
            ) from error
