"""Hosts that die in each phase of a call, and the numbers of ranks and tokens of a real run."""

import re

import pytest

from tests.faults.hosts_job import PHASES, compute, die, run_hosts


@pytest.mark.parametrize("phase", PHASES)
def test_a_host_that_dies_is_a_named_error_on_every_rank(phase: str):
    found = run_hosts(die, 4, 2, 3, PHASES[phase])
    assert found[3] is None
    for said in found[:3]:
        assert re.match(r"PeerTimeoutError: .*rank \d.* gone or did not come", said, re.S), said


@pytest.mark.parametrize(("num_ranks", "hosts", "tokens"), [(16, 4, 1024), (2, 2, 8192)])
def test_nothing_is_lost(num_ranks: int, hosts: int, tokens: int):
    """FlashMoE's own run over hosts lost messages beyond 2,048 tokens of a GPU, on 4 hosts of 4."""
    for error, rows, _ in run_hosts(compute, num_ranks, hosts, tokens, 1):
        assert error < 1e-5
        assert rows > tokens
