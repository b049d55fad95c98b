"""The scheduled backend whose rows copy engines carry, between processes that share one GPU."""

import contextlib
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.errors import FlashMoEError, PeerTimeoutError, RoutingError
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.exchange import Copies
from flashmoe_megatron.separate.reference import ReferenceBackend
from tests.distributed import RankPool, assert_waited
from tests.gpu.test_scheduled import on
from tests.unit import cases, separate
from tests.unit.separate import run
from tests.unit.test_scheduled import broken

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
PATIENCE_S = 100.0
"""How long ranks wait that share a GPU in turns, also with the processes of other tests."""

CALLS = [
    ([5, 0, 3], cases.to_nobody),
    *itertools.product(([5, 0, 3], [300, 17, 64], [20, 40, 1]), (cases.to_one_rank, cases.skewed)),
]
"""Tokens of each rank and their routing, one call after the other."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with contextlib.closing(RankPool(3)) as pool:
        yield pool


def backend_of(
    group: dist.ProcessGroup, degrees: tuple[int, int], timeout: float = PATIENCE_S
) -> ScheduledBackend:
    torch.cuda.set_device(DEVICE)
    num_ranks = dist.get_world_size(group)
    config = cases.make_config(num_ranks=num_ranks, num_experts=4 * num_ranks, max_tokens=300)
    options = BackendOptions(exchange="copies", keep="preactivations", timeout=timeout)
    backend = ScheduledBackend(config, group, device=DEVICE, options=options, degrees=degrees)
    assert isinstance(backend._exchange, Copies)
    return backend


def compare(found: separate.Found, want: separate.Found, dtype: torch.dtype) -> None:
    """A GPU's products may add parts of a sum in bfloat16, which those of a CPU do not."""
    separate.compare(found, want, dtype, times=1.5)


def on_cpu(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in found.items()}


def layers_of_ranks(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Compares two layers, which share the group's memory, call by call."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    backends = [backend_of(group, degrees) for degrees in ((1, 1), (3, 2))]
    config = backends[0].config
    reference = ReferenceBackend(config, group)
    for tokens, routing in CALLS:
        given = cases.make_inputs(config, routing, tokens[:num_ranks], dtype=dtype)
        want = run(reference, given, rank=rank)
        moved = on(DEVICE, given, dtype)
        for backend in backends:
            found = on_cpu(run(backend, moved, rank=rank))
            compare(found, want, dtype)
            again = on_cpu(run(backend, moved, rank=rank))
            assert all(torch.equal(again[name], value) for name, value in found.items())
    for backend in backends:
        with pytest.raises(RoutingError, match=f"rank {num_ranks // 2}: token 0 selects"):
            broken(backend, moved, rank)
        compare(on_cpu(run(backend, moved, rank=rank)), want, dtype)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_are_the_reference(num_ranks: int, dtype: torch.dtype, ranks: RankPool) -> None:
    ranks.run(layers_of_ranks, dtype, num_ranks=num_ranks)


def without_a_peer(group: dist.ProcessGroup) -> str:
    """One rank does not come to the exchange of rows, although it has told its counts."""
    rank = dist.get_rank(group)
    backend = backend_of(group, (2, 2), timeout=2.0)
    dtype = torch.float32
    inputs = cases.make_inputs(backend.config, cases.uniform, [64, 64], dtype=dtype)
    given = on(DEVICE, inputs, dtype)
    for _ in range(2):  # the second one gives back what the first one has outgrown
        run(backend, given, rank=rank)
    said = "no error"
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(backend._exchange, "room", _stay_away)
        try:
            out = run(backend, given, rank=rank)["out"]
            torch.cuda.synchronize()  # which ends, since the link lets its streams go
            assert math.isnan(float(out.sum()))
            run(backend, given, rank=rank)
        except PeerTimeoutError as error:
            said = str(error)
        except FlashMoEError:
            assert rank == 1
    dist.barrier(group)
    return said


def _stay_away(*_: object) -> None:
    raise PeerTimeoutError("stays away")


def test_a_peer_that_stays_away_is_named(ranks: RankPool) -> None:
    said = ranks.run(without_a_peer, num_ranks=2)
    assert_waited(said[0], [1], 2)
