"""The few functions of CUDA's driver that torch does not offer."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from flashmoe_megatron.errors import DeviceError

_ADDRESS, _SIZE, _WORD = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32
_GREATER_OR_EQUAL = 0  # compares the difference as a signed number, so counters may wrap
_WAIT_VALUE, _WRITE_VALUE = 1, 2
_PORTABLE_AND_MAPPED = 3
_LAZY_PEER_ACCESS = 1
_BUFFER_ID = 7
HANDLE_BYTES = 64


class _Bytes:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _IpcHandle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class _MemoryOp(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", _ADDRESS),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", _ADDRESS),
        ("pad", ctypes.c_uint64),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, ctypes.c_void_p),
    "cuStreamWaitValue32_v2": (ctypes.c_void_p, _ADDRESS, _WORD, ctypes.c_uint),
    "cuStreamWriteValue32_v2": (ctypes.c_void_p, _ADDRESS, _WORD, ctypes.c_uint),
    "cuStreamBatchMemOp_v2": (
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.POINTER(_MemoryOp),
        ctypes.c_uint,
    ),
    "cuMemHostRegister_v2": (ctypes.c_void_p, _SIZE, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_ADDRESS), ctypes.c_void_p, ctypes.c_uint),
    "cuMemAlloc_v2": (ctypes.POINTER(_ADDRESS), _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_ADDRESS), ctypes.POINTER(_SIZE), _ADDRESS),
    "cuPointerGetAttribute": (ctypes.c_void_p, ctypes.c_int, _ADDRESS),
    "cuIpcGetMemHandle": (ctypes.POINTER(_IpcHandle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_ADDRESS), _IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetPCIBusId": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


@functools.cache
def _function(name: str) -> Any:
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise DeviceError(f"CUDA's driver has no {name}: {error}") from error
    function.argtypes, function.restype = _SIGNATURES[name], ctypes.c_int
    return function


def _call(name: str, *args: Any) -> None:
    status = _function(name)(*args)
    if status:
        text = ctypes.c_char_p()
        _function("cuGetErrorName")(status, ctypes.byref(text))
        raise DeviceError(f"{name}: {(text.value or b'error').decode()} ({status})")


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copies bytes between any two places, in a stream."""
    _call("cuMemcpyAsync", target, source, nbytes, stream)


def wait_value(stream: int, address: int, value: int) -> None:
    """Makes a stream wait until a word in memory is at least a value, modulo 2**32."""
    _call("cuStreamWaitValue32_v2", stream, address, value & 0xFFFFFFFF, _GREATER_OR_EQUAL)


def write_value(stream: int, address: int, value: int) -> None:
    """Makes a stream write a word when everything before it is done and visible."""
    _call("cuStreamWriteValue32_v2", stream, address, value & 0xFFFFFFFF, 0)


class MemoryOps:
    """Words at addresses that streams write, and then others that they wait for, time and again."""

    def __init__(self, writes: Sequence[int], waits: Sequence[int]) -> None:
        ops = [_MemoryOp(_WRITE_VALUE, address) for address in writes]
        ops += [_MemoryOp(_WAIT_VALUE, address, 0, _GREATER_OR_EQUAL) for address in waits]
        self._ops = (_MemoryOp * len(ops))(*ops)
        self._views = list(self._ops)  # since ctypes makes new ones at each access

    def issue(self, stream: int, value: int) -> None:
        """Issues them to a stream with one call: words are written as, or awaited at, a value."""
        value &= 0xFFFFFFFF
        for op in self._views:
            op.value = value
        _call("cuStreamBatchMemOp_v2", stream, len(self._views), self._ops, 0)


def register(address: int, nbytes: int) -> int:
    """Pins host memory; returns where GPUs see it."""
    _call("cuMemHostRegister_v2", address, nbytes, _PORTABLE_AND_MAPPED)
    seen = _ADDRESS()
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), address, 0)
    return int(seen.value)


def unregister(address: int) -> None:
    """Unpins the host memory at an address that :func:`register` was given."""
    _call("cuMemHostUnregister", address)


def allocate(nbytes: int) -> int:
    """Memory of the current GPU that other processes can map."""
    address = _ADDRESS()
    _call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
    return int(address.value)


def free(address: int) -> None:
    """Frees what :func:`allocate` gave."""
    _call("cuMemFree_v2", address)


def allocation_of(address: int) -> int:
    """Returns where the allocation begins that contains an address."""
    begin, size = _ADDRESS(), _SIZE()
    _call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), address)
    return int(begin.value)


def allocation_id(address: int) -> int:
    """A number that no other allocation of the process has ever had."""
    number = ctypes.c_uint64()
    _call("cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID, address)
    return int(number.value)


def tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that the GPU sees, as bytes."""
    return torch.as_tensor(_Bytes(address, nbytes), device=device)


def share(address: int) -> bytes:
    """Returns a handle for another process to map the allocation that begins at an address."""
    handle = _IpcHandle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle.data)


def map_shared(handle: bytes) -> int:
    """Maps another process's allocation; its GPU has to be this one or a peer of it.

    What is mapped already is found at the same place, and has to be unmapped as often.
    """
    address = _ADDRESS()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(address),
        _IpcHandle.from_buffer_copy(handle),
        _LAZY_PEER_ACCESS,
    )
    return int(address.value)


def unmap(address: int) -> None:
    """Unmaps what :func:`map_shared` has mapped at an address."""
    _call("cuIpcCloseMemHandle", address)


def pci_bus_id(index: int) -> str:
    """The place of a GPU on the bus, for example "0000:1b:00.0"."""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(32)
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDeviceGetPCIBusId", name, len(name), device.value)
    return name.value.decode()
