"""What the kernel's counters say in bytes."""

from typing import Any

import pytest

from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.group_memory import GroupMemory
from tests.unit import cases
from tests.unit.simulated_gpus import Gpus, Library, install, make_backend

HIDDEN = 1024


def test_rows_in_fp8_count_with_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the rank itself cross no link, and results are of 16 bits."""

    def read_counters(_: Library, group: Any, counts: Any) -> int:
        counts._obj.rows_pulled[:2] = 100, 30
        counts._obj.results_pushed[:2] = 50, 20
        counts._obj.rows_pulled_in_fp8[:2] = 60, 12
        counts._obj.pad_rows_made = 7
        return bindings.OK

    monkeypatch.setattr(Library, "_read_counters", read_counters, raising=False)
    install(Gpus(2, 0, slow=0), monkeypatch)
    config = cases.make_config(num_ranks=2, hidden=HIDDEN, intermediate=128, experts="fp8")
    backend = make_backend(config, 0)
    assert backend.traffic.bytes_sent == 0, "there is no memory that could have counted"
    monkeypatch.setattr(backend.memory, "heap_bytes", 4096)
    monkeypatch.setattr(GroupMemory, "open", lambda _: bindings.FlashMoEGroup())
    traffic = backend.traffic
    assert (traffic.rows_sent, traffic.pad_rows_local) == (50, 7)
    assert traffic.bytes_sent == (30 - 12 + 20) * 2 * HIDDEN + 12 * (HIDDEN + HIDDEN // 128 * 4)
