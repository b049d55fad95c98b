"""Memory that the processes of one host share: host memory, and the device's.

Host memory has no name, so that it ends with its processes.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from flashmoe_megatron.errors import DeviceError, HeapError, LinkError, ShapeError
from flashmoe_megatron.multipath.queues import Queues
from flashmoe_megatron.ranks import StoreRanks

_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
SegmentPlace = tuple[int, int, int, str]
"""The address of a segment for another process: process, descriptor, size and name."""


class SharedMemory:
    """A segment of host memory of this process or of another one; ``nbytes`` at ``address``."""

    def __init__(self, descriptor: int, nbytes: int, node: int = -1) -> None:
        self.nbytes = nbytes
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, nbytes)
        self._base = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._base)
        if node >= 0:
            _prefer_node(self.address, nbytes, node)

    @classmethod
    def create(cls, nbytes: int, node: int = -1) -> "SharedMemory":
        """Makes a segment of zeros, with its pages on a NUMA node if possible; -1 for any.

        Raises:
            HeapError: The machine has no room for it.
        """
        name = f"flashmoe-multipath-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            made = cls(descriptor, nbytes, node)
            # Pages that are missing later would end the process by a signal.
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.close(descriptor)
            name = errno.errorcode.get(error.errno or 0, "an error")
            raise HeapError(
                f"the host has no {nbytes} bytes of shared memory for links: {name}, {error}"
            ) from error
        return made

    @property
    def place(self) -> SegmentPlace:
        """The argument of :meth:`open` in another process."""
        return os.getpid(), self._descriptor, self.nbytes, _name_of(os.getpid(), self._descriptor)

    @classmethod
    def open(cls, place: SegmentPlace) -> "SharedMemory":
        """Maps another process's segment.

        Processes of other hosts and containers may have the same numbers, and segments as large, so
        that a segment's name tells whether it is the one.

        Raises:
            LinkError: The process is gone, or its memory is out of reach.
        """
        process, number, nbytes, name = place
        try:
            if (found := _name_of(process, number)) != name:
                raise OSError(f"there is {found!r} in place of {name!r}")
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LinkError(
                f"the shared memory of process {process} cannot be opened: {error}; wanted ranks "
                "of one host, user and process namespace"
            ) from error
        return cls(descriptor, nbytes)

    def word(self, offset: int) -> ctypes.c_uint32:
        """A word of it, as it is now and later."""
        return ctypes.c_uint32.from_address(self.address + offset)

    def number(self, offset: int) -> ctypes.c_uint64:
        """A number of two words, likewise."""
        return ctypes.c_uint64.from_address(self.address + offset)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Some bytes of it."""
        return self._map[offset : offset + nbytes]

    def write(self, offset: int, data: bytes) -> None:
        """Changes some bytes of it."""
        self._map[offset : offset + len(data)] = data

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Returns some bytes of it, which stay mapped as long as the tensor is there."""
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=nbytes)

    def hold(self) -> None:
        """Marks this process as alive until it ends, however it ends: the kernel drops the lock."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)

    def is_held(self) -> bool:
        """Returns whether the process that called :meth:`hold` still lives. For other processes."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1)
        return False

    def close(self) -> None:
        """Unmaps it as soon as no tensor has it; the memory is gone once every process has."""
        del self._base, self._map  # which a tensor may have still
        os.close(self._descriptor)


def _name_of(process: int, descriptor: int) -> str:
    """Returns the file of a process's descriptor."""
    return os.readlink(f"/proc/{process}/fd/{descriptor}")


def _prefer_node(address: int, nbytes: int, node: int) -> None:
    """Asks for pages on a node; where that is not allowed they lie where they may."""
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_PREFERRED),
        mask,
        ctypes.c_ulong(len(mask) * 64 + 1),
        ctypes.c_uint(0),
    )


class Block(NamedTuple):
    """Some memory of every rank's device, and where this rank sees its own and its peers'.

    Blocks have the same ``number`` and size on every rank.
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
    """Blocks of a device's memory that every rank of a group can write to.

    Calls are collective, except :meth:`leave` and :meth:`close`, which never wait.
    """

    def __init__(self, ranks: StoreRanks, peers: Iterable[int], queues: Queues) -> None:
        self._ranks, self._peers, self._queues = ranks, tuple(peers), queues
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
            own.callback(tensor.data_ptr)  # which keeps the tensor until then
            identity = self._queues.allocation_id(tensor.data_ptr())
            allocation = self._queues.allocation_of(tensor.data_ptr())
            return allocation, tensor.data_ptr() - allocation

        block = self._made(tensor.nbytes, place)
        self._adopted[block.number] = block.begin, identity
        return block

    def check(self, number: int) -> None:
        """Refuses to have a block written to whose memory is not what peers have mapped any more.

        Raises:
            LinkError: A tensor that was adopted has been given back.
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
            self._ranks.all(theirs.close)

    def leave(self) -> None:
        """Unmaps other ranks' memory, which this rank does not use any more."""
        with contextlib.ExitStack() as stack:
            for _, theirs in self._held.values():
                stack.callback(theirs.close)

    def close(self) -> None:
        """Gives all of them back; no rank has mapped them once all have left."""
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
            shared: list[Any] = self._ranks.all(share)
            sizes = [size for size, *_ in shared]
            if len(set(sizes)) > 1:
                raise ShapeError(f"memory of {sizes} bytes: wanted as many on every rank")
            self._ranks.all(connect)
        except BaseException:
            del self._held[number]
            with own:
                theirs.close()
            raise
        return Block(number, shared[self._ranks.rank][1], nbytes, mapped)
