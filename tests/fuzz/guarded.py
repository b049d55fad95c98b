"""Memory that ends where a page begins that nobody may touch: one byte too far is a crash."""

import ctypes
import mmap

PAGE = mmap.PAGESIZE
_PROT_NONE = 0


class GuardedBytes:
    """``num_bytes`` of memory right before an inaccessible page, and some before it."""

    def __init__(self, num_bytes: int) -> None:
        pages = -(-num_bytes // PAGE)
        self._map = mmap.mmap(-1, (pages + 1) * PAGE)
        self._view = (ctypes.c_char * len(self._map)).from_buffer(self._map)
        self.end = ctypes.addressof(self._view) + pages * PAGE
        self.num_bytes = num_bytes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if libc.mprotect(self.end, PAGE, _PROT_NONE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, content: bytes) -> int:
        """Writes the content so that it ends at the guard; returns its address."""
        assert len(content) <= self.num_bytes
        address = self.end - len(content)
        ctypes.memmove(address, content, len(content))
        return address
