"""Lines about calls over several links that do not end."""

import functools
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.multipath import Multipath, watchdog
from flashmoe_megatron.multipath.watchdog import Patience
from tests.distributed import RankPool, refusal

SOON_S = 0.2
"""The tests wait for lines, so that no machine is too slow for them."""


class Lines(logging.Handler):
    """Keeps the lines and lets a thread wait for one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._added = threading.Condition()
        logging.getLogger("flashmoe_megatron").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        with self._added:
            self.lines.append(record.getMessage())
            self._added.notify_all()

    def of(self, part: str) -> str:
        """Waits for a line that has a part."""
        with self._added:
            assert self._added.wait_for(lambda: any(part in one for one in self.lines), 60)
            return next(one for one in self.lines if part in one)


def stood_still(group: dist.ProcessGroup, links: list[str], min_bytes: int) -> str:
    """Rank 1 stands still before its second call until both ranks have said so."""
    lines, rank = Lines(), dist.get_rank(group)
    store = dist.distributed_c10d._get_default_store()
    try:
        with Multipath(
            group, links=links, min_bytes=min_bytes, timeout=60, watch=SOON_S
        ) as multipath:
            multipath.all_reduce(torch.ones(2**12))
            found: list[str] = []

            def tell() -> None:
                found.append(lines.of("has not ended"))
                store.set("rank 0 has said so", "yes")

            teller = threading.Thread(target=tell)
            if rank:
                found.append(lines.of("no call for"))
                store.get("rank 0 has said so")
            else:
                teller.start()
            whole = torch.zeros(2**13)
            multipath.all_gather(whole, torch.ones(2**12))
            assert torch.equal(whole, torch.ones(2**13))
            if not rank:
                teller.join()
                store.delete_key("rank 0 has said so")
        return found[0]
    finally:
        logging.getLogger("flashmoe_megatron").removeHandler(lines)


@pytest.mark.parametrize(("links", "min_bytes"), [(["host"], 1), (["gloo"], 2**30)])
def test_a_peer_that_stands_still_is_named(
    links: list[str], min_bytes: int, ranks: RankPool
) -> None:
    waiting, standing = ranks.run(stood_still, links, min_bytes, num_ranks=2)
    assert re.fullmatch(
        r"multipath, rank 0: call 2, all_gather of 32768 bytes, has not ended for [\d.]+ s, and "
        r"this rank's stream waits in it; rank 1 has not made it \(its last is call 1, all_reduce "
        r"of 16384 bytes\); its host is at [\w.: <]+",
        waiting,
    )
    assert re.fullmatch(
        r"multipath, rank 1: no call for [\d.]+ s, since call 1, all_reduce of 16384 bytes, has "
        r"ended; rank 0 has (ended it|made call 2); its host is at .*test_watchdog.py:\d+.*",
        standing,
    )


def off(group: dist.ProcessGroup) -> None:
    with Multipath(group, links=["host"], min_bytes=1, timeout=60) as multipath:
        multipath.all_reduce(torch.ones(16))
        assert multipath._watched("all_reduce", torch.ones(16)).__enter__() is None
        assert not [one for one in threading.enumerate() if one.name == "flashmoe-watchdog"]


def test_nothing_is_there_without_it(ranks: RankPool) -> None:
    ranks.run(off, num_ranks=2)


def refused(group: dist.ProcessGroup, watch: list[Any]) -> str:
    make: Callable[[Any], Any] = functools.partial(
        Multipath, links=["gloo"], timeout=20, watch=watch[dist.get_rank(group)]
    )
    return refusal(group, make)


def test_wrong_seconds_are_refused_on_every_rank(ranks: RankPool) -> None:
    for watch, said in (
        ([0.0, 0.0], "ConfigError: watch is 0.0: wanted None, or seconds above 0, 1e-06 to 1e+09"),
        ([5.0, None], "ConfigError: the ranks disagree on watch: 5.0 on rank 0, None on rank 1"),
    ):
        for one in ranks.run(refused, watch, num_ranks=2):
            assert one.startswith(said)


def test_lines_become_rarer_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "MOST_LINES", 5)
    patience = Patience(10.0)
    said = [now for now in range(1000) if patience.is_due(now, 1, True) is not None]
    assert said == [10, 20, 40, 80, 160], "all lines have been written then"
    patience = Patience(10.0)
    assert [t for t in range(100) if patience.is_due(t, 1, True) is not None] == [10, 20, 40, 80]
    assert [t for t in range(100, 200) if patience.is_due(t, 1, False) is not None] == [110]
    assert patience.is_due(300, 2, True) is None
    assert patience.is_due(320, 2, True) is None, "five lines have been written"
