"""Launches are operators for whoever looks, and plain calls for nobody."""

import ctypes
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_megatron.call import Given

COUNTS = torch.zeros(2, dtype=torch.int32)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Who has run launches that settle replicas: the body or the operator; one is made before."""
    from flashmoe_megatron.kernel import bindings, ops

    seen: list[str] = []

    def function(name: str) -> Callable[..., int]:
        seen.append(f"library's {name}")
        return lambda *_: bindings.OK

    monkeypatch.setattr(bindings, "function", function)
    with torch.library._scoped_library("flashmoe", "IMPL") as library:
        library.impl("settle", lambda *_: seen.append("operator"), "CPU")
        ops.settle(COUNTS, None, None, 1, 2)
        yield seen


def test_packed_structs_are_the_librarys() -> None:
    """Values lie where fields do, in memory that the next call of the thread writes over."""
    from flashmoe_megatron.kernel import bindings

    for kind in (bindings.FlashMoEInput, bindings.FlashMoELaunch):
        names = [name for name, _ in kind._fields_[1:]]
        packed = bindings.Packed(kind)
        for first in (1, 100):
            packed.pack(*range(first, first + len(names)))
            given = kind.from_address(packed.address)
            assert given.struct_size == ctypes.sizeof(kind)
            for value, name in enumerate(names, first):
                found = getattr(kind, name)
                at, size = found.offset, found.size
                raw = bytes(given)[at : at + size]
                is_float = dict(kind._fields_)[name] is ctypes.c_float
                want = struct.pack("f", value) if is_float else value.to_bytes(size, "little")
                assert raw == want, name


def test_each_thread_packs_a_struct_of_its_own() -> None:
    from flashmoe_megatron.kernel import bindings

    packed = bindings.Packed(bindings.FlashMoELaunch)
    num_fields = len(bindings.FlashMoELaunch._fields_) - 1

    def pack(value: int) -> int:
        packed.pack(*[value] * num_fields)
        return packed.address

    with ThreadPoolExecutor(1) as pool:
        here, there = pack(1), pool.submit(pack, 2).result()
        assert (
            bindings.FlashMoELaunch.from_address(here).plan,
            bindings.FlashMoELaunch.from_address(there).plan,
        ) == (1, 2)


class Names(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_nobody_looks(calls: list[str]) -> None:
    assert calls == ["library's settle"]


@pytest.mark.parametrize("profile", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_a_profiler_sees_an_operator(calls: list[str], profile: Callable[[], Any]) -> None:
    from flashmoe_megatron.kernel import ops

    with profile() as profiled:
        ops.settle(COUNTS, None, None, 1, 2)
    assert calls[1:] == ["operator"]
    assert "flashmoe::settle" in {event.key for event in profiled.key_averages()}


def test_a_dispatch_mode_sees_an_operator(calls: list[str]) -> None:
    from flashmoe_megatron.kernel import ops

    with Names() as mode:
        ops.settle(COUNTS, None, None, 1, 2)
    assert (mode.names, calls[1:]) == (["flashmoe.settle.default"], ["operator"])


@pytest.mark.parametrize("rows_at", [0, 384])
@pytest.mark.parametrize("has_own", [True, False])
def test_what_has_no_memory_of_its_own_follows_the_plan(
    has_own: bool, rows_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashmoe_megatron.kernel import bindings, ops

    launches: list[bytes] = []

    def forward(_problem: int, _group: int, _given: int, launch: int, _is_planned: bool) -> int:
        launches.append(ctypes.string_at(launch, ctypes.sizeof(bindings.FlashMoELaunch)))
        return bindings.OK

    monkeypatch.setattr(bindings, "function", {"forward": forward}.__getitem__)
    plan, scratch = (torch.empty(512, dtype=torch.uint8) for _ in range(2))
    x, probs = torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, 4)
    given = Given(x, probs, probs > 0, training=False, followed=False)
    own = scratch if has_own else None
    ops.forward(
        *(plan, plan, None, None, None, None, own, x, 1, False, False, 0, 256, rows_at, 1, 2),
        *ops.arguments(given, None, is_settled=False),
    )
    found = bindings.FlashMoELaunch.from_buffer_copy(launches[0])
    assert found.plan == plan.data_ptr()
    assert found.scratch == (scratch.data_ptr() if has_own else plan.data_ptr() + 256)
    assert found.rows == (plan.data_ptr() + rows_at if rows_at else None)
