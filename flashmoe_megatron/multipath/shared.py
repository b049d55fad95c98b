"""Host memory that processes share; it has no name, so that it ends with its processes."""

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from pathlib import Path

import torch

from flashmoe_megatron.errors import HeapError, LinkError

_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
SegmentPlace = tuple[int, int, int, str]
"""Where another process finds a segment: the process, its descriptor, the size and the name."""


class SharedMemory:
    """A segment of one process, or another process's.

    Attributes:
        nbytes: Its size.
        address: Where it is mapped.
    """

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
        """Makes a segment of zeros.

        Args:
            nbytes: Its size.
            node: The NUMA node on which its pages should lie; -1 for any.

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


def node_of_gpu(pci_bus_id: str) -> int:
    """The NUMA node of a GPU, -1 if the machine does not say.

    Args:
        pci_bus_id: For example "0000:1b:00.0".
    """
    try:
        return int(Path(f"/sys/bus/pci/devices/{pci_bus_id.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _prefer_node(address: int, nbytes: int, node: int) -> None:
    """Asks for pages on a node; where that is not allowed they lie where they may."""
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_PREFERRED),
        mask,
        ctypes.c_ulong(len(mask) * 64 + 1),
        ctypes.c_uint(0),
    )
