"""Runs one rank of a job on processors in which something goes wrong, for ``test_ranks.py``."""

import argparse
import datetime
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron import (
    ExpertWeights,
    PeerTimeoutError,
    ReferenceBackend,
    RoutingError,
    moe_apply,
    moe_forward,
)
from tests.distributed import PATIENCE_S
from tests.faults.jobs import write_record
from tests.unit import cases

TIMEOUT_S = 10.0
MARGIN_S = 60.0
"""What a busy machine may add to the time after which a rank gives up."""
TOKENS = 40


class Ranks:
    """A layer on all ranks, as one of them sees it, with its share of the inputs."""

    def __init__(self, group: dist.ProcessGroup, folder: Path) -> None:
        self.folder = folder
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.is_faulty = self.rank == self.num_ranks - 1
        self.config = cases.make_config(num_ranks=self.num_ranks, num_experts=12)
        inputs = cases.make_inputs(
            self.config, cases.uniform, [TOKENS] * self.num_ranks, dtype=torch.float32
        )
        self.x = inputs.x[self.rank].requires_grad_()
        self.probs, self.routing_map = inputs.probs[self.rank], inputs.routing_map[self.rank]
        local = self.config.num_local_experts
        own = slice(self.rank * local, (self.rank + 1) * local)
        self.weights = ExpertWeights(tuple(inputs.fc1[own]), tuple(inputs.fc2[own]))
        self.backend = ReferenceBackend(self.config, group)

    def forward(self, num_tokens: int = TOKENS) -> torch.Tensor:
        x, probs, routing_map = (
            tensor[:num_tokens] for tensor in (self.x, self.probs, self.routing_map)
        )
        return moe_apply(self.backend, x, probs, routing_map, self.weights)

    def gives_up(self, call: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Makes a call that has to fail in time because a peer is missing."""
        start = time.monotonic()
        try:
            call(*arguments)
        except PeerTimeoutError as error:
            seconds = time.monotonic() - start
            assert seconds < TIMEOUT_S + MARGIN_S, f"gave up after {seconds:.1f} s"
            return {"error": str(error), "seconds": round(seconds, 2)}
        raise AssertionError("the call ended as if its peer had taken part")

    def wait_for_others(self) -> None:
        """Returns when the other ranks have written what they saw."""
        others = [self.folder / f"{rank}.json" for rank in range(self.num_ranks - 1)]
        while not all(path.exists() for path in others):
            time.sleep(0.1)

    def die_in(self, way: str) -> None:
        """Kills this rank when its backend sends rows to experts, or back."""
        setattr(self.backend._ways, way, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def killed_in_forward(ranks: Ranks) -> dict[str, Any]:
    """The last rank dies after the exchange of counts, before that of rows."""
    ranks.forward().sum().backward()
    if ranks.is_faulty:
        ranks.die_in("there")
    return ranks.gives_up(ranks.forward)


def killed_in_backward(ranks: Ranks) -> dict[str, Any]:
    """The last rank dies after the exchange of gradients, before their return."""
    out = ranks.forward()
    if ranks.is_faulty:
        ranks.die_in("back")
    return ranks.gives_up(out.sum().backward)


def never_calls(ranks: Ranks) -> dict[str, Any]:
    ranks.forward()
    if ranks.is_faulty:
        ranks.wait_for_others()
    return ranks.gives_up(ranks.forward)


def broken_router(ranks: Ranks) -> dict[str, Any]:
    """Ids out of range are the same error on every rank, and the next call works."""
    ids = torch.tensor([[0, 1]]).repeat(TOKENS, 1)
    if ranks.is_faulty:
        ids[7, 1] = 10_000
    try:
        moe_forward(ranks.x, ids, torch.rand(TOKENS, 2), ranks.weights, backend=ranks.backend)
    except RoutingError as error:
        ranks.forward().sum().backward()
        return {"error": str(error)}
    raise AssertionError("an id out of range was accepted")


def dataset_that_ends(ranks: Ranks) -> dict[str, Any]:
    """A rank without tokens left goes on without any; the others get what they always got."""
    want = ranks.forward()
    batches = iter([TOKENS] * (3 if ranks.is_faulty else 6))
    for step in range(6):
        out = ranks.forward(next(batches, 0))
        assert out.shape == (0 if ranks.is_faulty and step >= 3 else TOKENS, 64)
        assert torch.equal(out, want[: len(out)])
        out.sum().backward()
    # A rank that leaves altogether is missed in time.
    return {} if ranks.is_faulty else ranks.gives_up(ranks.forward)


CASES: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        killed_in_forward,
        killed_in_backward,
        never_calls,
        broken_router,
        dataset_that_ends,
    )
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_S))
    # The layer's own group waits no longer than a test may.
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    ranks = Ranks(group, options.out)
    dist.barrier()
    try:
        record = {"passed": True, **CASES[options.case](ranks)}
    except Exception:  # noqa: BLE001 - the test reports it
        record = {"passed": False, "error": traceback.format_exc()}
    write_record(options.out, ranks.rank, record)
    return int(not record["passed"])


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # the group would wait for the dead
