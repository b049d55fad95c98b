"""Memory of GPUs of one host that the processes of a group have mapped from one another."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from flashmoe_megatron.errors import DeviceError, LinkError, ShapeError
from flashmoe_megatron.multipath.control import Control
from flashmoe_megatron.multipath.queues import Queues


class Block(NamedTuple):
    """Some memory of every rank, and where this rank sees it.

    Attributes:
        number: Counts the blocks, the same on every rank.
        begin: Where this rank's is.
        nbytes: Its size, the same on every rank.
        mapped: Where each peer's is.
    """

    number: int
    begin: int
    nbytes: int
    mapped: dict[int, int]

    def has(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor lies in this rank's memory of the block."""
        begin = tensor.data_ptr()
        return self.begin <= begin and begin + tensor.nbytes <= self.begin + self.nbytes


class MappedMemory:
    """Blocks of memory that every rank of a group can write to.

    Calls are collective, except :meth:`leave` and :meth:`close`.

    Args:
        control: The ranks.
        peers: The others.
        queues: The queues of the device whose memory it is.
    """

    def __init__(self, control: Control, peers: Iterable[int], queues: Queues) -> None:
        self._control, self._peers, self._queues = control, tuple(peers), queues
        self._count = 0
        self._adopted: dict[int, tuple[int, int]] = {}
        self._held: dict[int, tuple[contextlib.ExitStack, contextlib.ExitStack]] = {}

    def allocate(self, nbytes: int) -> Block:
        """New memory of the current GPU.

        Raises:
            ShapeError: Ranks ask for other numbers of bytes.
            DeviceError: A GPU has no room.
        """

        def place(own: contextlib.ExitStack) -> tuple[int, int]:
            address = self._queues.allocate(nbytes)
            own.callback(self._queues.free, address)
            return address, 0

        return self._made(nbytes, place)

    def adopt(self, tensor: torch.Tensor) -> Block:
        """Makes a block of a tensor's memory, kept until its release unless the tensor is resized.

        Raises:
            ShapeError: Tensors of ranks differ in their bytes.
            DeviceError: The driver cannot share the memory of one of them.
        """
        identity = 0

        def place(own: contextlib.ExitStack) -> tuple[int, int]:
            nonlocal identity
            own.callback(_keep, tensor)
            identity = self._queues.allocation_id(tensor.data_ptr())
            allocation = self._queues.allocation_of(tensor.data_ptr())
            return allocation, tensor.data_ptr() - allocation

        block = self._made(tensor.nbytes, place)
        self._adopted[block.number] = block.begin, identity
        return block

    def check(self, number: int) -> None:
        """Refuses to have a block written to whose memory is not what peers have mapped any more.

        Raises:
            LinkError: A tensor that was adopted has been given back to the self._queues.
        """
        if number in self._adopted:
            address, identity = self._adopted[number]
            try:
                is_same = self._queues.allocation_id(address) == identity
            except DeviceError:  # there is no memory at all
                is_same = False
            if not is_same:
                raise LinkError(
                    "the memory of a tensor that peers write to has been given back: wanted its "
                    "storage not to be resized"
                )

    def release(self, block: Block) -> None:
        """Gives a block back; no rank's GPU may still be using it."""
        self._adopted.pop(block.number, None)
        own, theirs = self._held.pop(block.number)
        with own:  # which no rank has mapped any more
            self._control.all(theirs.close)

    def leave(self) -> None:
        """Unmaps other ranks' memory, which this rank does not use any more. Never waits."""
        with contextlib.ExitStack() as stack:
            for _, theirs in self._held.values():
                stack.callback(theirs.close)

    def close(self) -> None:
        """Gives all of them back; no rank has mapped them once all have left. Never waits."""
        with contextlib.ExitStack() as stack:
            for own, theirs in self._held.values():
                stack.callback(own.close)
                stack.callback(theirs.close)
            self._held.clear()

    def _made(self, nbytes: int, place: Callable[[contextlib.ExitStack], tuple[int, int]]) -> Block:
        """Makes a block; ``place`` finds the allocation and the bytes before the block in it."""
        number, own, theirs = self._count, contextlib.ExitStack(), contextlib.ExitStack()
        self._count += 1
        self._held[number] = own, theirs

        def share() -> tuple[int, int, int, str]:
            allocation, offset = place(own)
            return nbytes, allocation + offset, offset, self._queues.share(allocation).hex()

        def connect() -> None:
            for peer in self._peers:
                allocation = self._queues.map_shared(bytes.fromhex(shared[peer][3]))
                theirs.callback(self._queues.unmap, allocation)
                mapped[peer] = allocation + shared[peer][2]

        mapped: dict[int, int] = {}
        try:
            shared: list[Any] = self._control.all(share)
            sizes = [size for size, *_ in shared]
            if len(set(sizes)) > 1:
                raise ShapeError(f"memory of {sizes} bytes: wanted as many on every rank")
            self._control.all(connect)
        except BaseException:
            del self._held[number]
            with own:
                theirs.close()
            raise
        return Block(number, shared[self._control.rank][1], nbytes, mapped)


def _keep(tensor: torch.Tensor) -> None:
    """Does nothing; a callback to it holds the tensor until then."""
