"""One rank of :mod:`tests.gpu.stress` on GPUs of one host; started by torchrun.

    torchrun --nproc-per-node 4 -m tests.multi_gpu.stress --seconds 120

All ranks draw the same scenarios in the same order and pause at random on their own.
"""

import argparse
import datetime
import faulthandler
import os
import sys

import torch
import torch.distributed as dist

from flashmoe_megatron import planner
from flashmoe_megatron.config import Experts
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.replicas.policy import When
from flashmoe_megatron.select import select_backend
from tests.gpu.stress import (
    TIMEOUT_S,
    Ledger,
    Pauses,
    Report,
    Scenario,
    Values,
    Way,
    add_arguments,
    bounds_of,
    check_first,
    finish,
    phases,
    placement_of,
    stress,
)
from tests.gpu.virtual import poisoned_empties

COLLECTIVE_TIMEOUT_S = 90
LATE_S = 3 * COLLECTIVE_TIMEOUT_S  # after its time a run shows where it is, and ends


class RealRun:
    """This rank's share of every step."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        symmetric: str,
        seed: int,
        spare_slots: int,
        placement: When,
        experts: Experts,
    ) -> None:
        self.num_ranks, self.experts = dist.get_world_size(group), experts
        self.rank = dist.get_rank(group)
        self._group = group
        self._symmetric = symmetric
        self._spare_slots = spare_slots
        self._placement = placement
        planner.HIDDEN_PUSH = 1.0  # layers this small have replicas, too
        self._pauses = Pauses(1000 * seed + self.rank)
        self._backends: dict[int, KernelBackend] = {}

    def prepare(self, scenario: Scenario) -> None:
        """Collective: registers the layer and makes the memory that it needs."""
        torch.cuda.synchronize()
        backend = select_backend(
            scenario.config,
            self._group,
            torch.device("cuda", torch.cuda.current_device()),
            kind="kernel",
            symmetric_memory=self._symmetric,
            timeout=TIMEOUT_S,
            spare_slots=min(self._spare_slots, scenario.config.num_local_experts),
            placement=self._placement,
        )
        assert isinstance(backend, KernelBackend)
        backend._use_weights(scenario.weights[self.rank])
        backend._prepare()
        self._backends[scenario.seed] = backend

    def run(self, scenario: Scenario, way: Way) -> list[Values]:
        """One step of this rank; returns without waiting for its last launch."""
        launches = phases(self._backends[scenario.seed], scenario, self.rank, way)
        with poisoned_empties():
            while True:
                self._pauses.take()
                try:
                    next(launches)
                except StopIteration as done:
                    return [done.value]

    def enter(self, ledger: Ledger, scenario: Scenario, way: Way, got: list[Values]) -> None:
        """Compares this rank's results."""
        ledger.enter(scenario, way, self.rank, got[0])

    def check_first(self, scenario: Scenario, got: list[Values]) -> None:
        """Compares this rank's results with the oracle."""
        check_first(scenario, got, self.rank)

    def count_replicas(self) -> int:
        """What this rank's spare slots held in the last launches, as far as records are kept."""
        records = [one for each in self._backends.values() for one in each.take_records()]
        return sum(len(record.replicas.rows) for record in records if record.replicas)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--symmetric", choices=("cuda", "nvshmem"), default="cuda")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(options.seconds + LATE_S, exit=True)

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("nccl", device_id=device, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    # Apart, since a rank that has failed is past the first while others still use it.
    agreeing, reporting = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))

    def agree_to_stop(is_over: bool) -> bool:
        vote = torch.tensor([int(is_over)])
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=agreeing)
        return bool(vote.item())

    given = options.slots, placement_of(options), options.experts
    run = RealRun(group, options.symmetric, options.seed, *given)
    report = Report("real", run.num_ranks, bindings.library_path().name, options.seed)
    bounds = bounds_of(options)
    stress(run, report, options.seconds, agree_to_stop, looks_ahead=options.ahead, **bounds)
    report.replicas = run.count_replicas()
    everyone: list[Report] = [report] * run.num_ranks
    dist.all_gather_object(everyone, report, group=reporting)
    failures = [f"rank {rank}:\n{one.failure}" for rank, one in enumerate(everyone) if one.failure]
    report.failure = "\n".join(failures)
    report.compared = sum(one.compared for one in everyone)
    report.differences = sum(one.differences for one in everyone)
    report.replicas = sum(one.replicas for one in everyone)
    return finish(report, options.out) if run.rank == 0 else int(bool(failures))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a launch that hangs must not keep the process
