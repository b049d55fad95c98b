"""One rank of a job in which something goes wrong on GPUs of one host; see ``test_faults.py``.

Run by the test, one process per rank, without torchrun, which would end the survivors itself:
``RANK=... python -m tests.multi_gpu.faults_worker --case NAME --out DIR``. A rank that lives writes
``DIR/RANK.json``: what it saw, or its traceback.
"""

import argparse
import datetime
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import HeapError, PeerTimeoutError
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.weights import WeightGrad
from tests.faults.jobs import write_record
from tests.gpu.expected import assert_as_good, assert_void, expected
from tests.gpu.layers import make_config
from tests.gpu.spinner import Spinner
from tests.multi_gpu.worker import Job
from tests.unit import cases

TIMEOUT_S = 3.0
MARGIN_S = 5.0
COLLECTIVE_TIMEOUT_S = 40
TORCH_PAGE_BYTES = 2**21
"""What torch's allocator asks CUDA for in multiples of."""


class Fault:
    """A layer on this rank, what it should compute, and what to see of a fault."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.is_faulty = job.rank == job.num_ranks - 1
        self.config = make_config(job.num_ranks)
        self.tokens = [96 + 17 * rank for rank in range(job.num_ranks)]
        self.inputs = job.inputs(self.config, cases.uniform, self.tokens)
        self.weights = job.weights(self.config, self.inputs)
        self.backend = job.backend(self.config, timeout_s=TIMEOUT_S)
        self.want = expected(self.config, self.inputs).share(self.config, self.tokens, job.rank)

    def check(self) -> None:
        """One right step of all ranks."""
        got = self.job.step(self.backend, self.inputs, self.weights)
        torch.cuda.synchronize()
        self.backend.raise_pending_fault()
        assert_as_good(got, self.want)

    def forward(self) -> tuple[torch.Tensor, Any]:
        rank, inputs = self.job.rank, self.inputs
        given = inputs.x[rank], inputs.probs[rank], inputs.routing_map[rank], self.weights
        return self.backend.forward(*given, training=True)

    def backward(self, saved: Any) -> tuple[torch.Tensor, torch.Tensor]:
        grads = [
            [WeightGrad(torch.empty_like(w, dtype=torch.float32), False) for w in share]
            for share in (self.weights.fc1, self.weights.fc2)
        ]
        grad_out = self.inputs.grad_out[self.job.rank]
        return self.backend.backward(grad_out, saved, self.weights, *grads)

    def gives_up(self, call: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Makes a call that has to time out, now or, with results of NaN, at the look after it."""
        start = time.monotonic()
        try:
            results = call(*arguments)
            torch.cuda.synchronize()
            assert_void(results)
            self.backend.raise_pending_fault()
        except PeerTimeoutError as error:
            seconds = time.monotonic() - start
            assert seconds < TIMEOUT_S + MARGIN_S, f"gave up after {seconds:.1f} s"
            assert torch.ones(1000, device=self.job.device).sum() == 1000, "the GPU is lost"
            return {"error": str(error), "seconds": round(seconds, 2)}
        raise AssertionError("the call ended as if its peer had taken part")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_forward(job: Job) -> dict[str, Any]:
    fault = Fault(job)
    fault.check()
    dist.barrier(group=job.gloo)
    if fault.is_faulty:
        rank, inputs = job.rank, fault.inputs
        fault.backend.begin(inputs.x[rank], inputs.probs[rank], inputs.routing_map[rank])
        die()
    return fault.gives_up(fault.forward)


def killed_in_backward(job: Job) -> dict[str, Any]:
    fault = Fault(job)
    fault.check()
    _, saved = fault.forward()
    torch.cuda.synchronize()
    dist.barrier(group=job.gloo)
    if fault.is_faulty:
        die()
    return fault.gives_up(fault.backward, saved)


def never_launches_forward(job: Job) -> dict[str, Any]:
    """The faulty rank comes when the others have given up; then all go on together."""
    fault = Fault(job)
    fault.check()
    seen = {}
    for _ in range(2):
        dist.barrier(group=job.gloo)
        if fault.is_faulty:
            time.sleep(TIMEOUT_S + 1.5)
        seen = fault.gives_up(fault.forward)
        dist.barrier()  # NCCL's, which shows that the group works
        for _ in range(3):
            fault.check()
    return seen


def never_launches_backward(job: Job) -> dict[str, Any]:
    fault = Fault(job)
    fault.check()
    _, saved = fault.forward()
    torch.cuda.synchronize()
    dist.barrier(group=job.gloo)
    if fault.is_faulty:
        time.sleep(TIMEOUT_S + 1.5)
    seen = fault.gives_up(fault.backward, saved)
    dist.barrier()
    for _ in range(3):
        fault.check()
    return seen


def withheld_signals(job: Job) -> dict[str, Any]:
    """The faulty rank writes what is for rank 0 into memory of its own."""
    fault = Fault(job)
    fault.check()
    memory = fault.backend.memory
    honest_open = memory.open
    assert memory._heap is not None
    elsewhere = torch.zeros_like(memory._heap.local)

    def open_elsewhere() -> bindings.FlashMoEGroup:
        group = honest_open()
        group.heaps[0] = elsewhere.data_ptr()
        return group

    torch.cuda.synchronize()
    dist.barrier(group=job.gloo)
    if fault.is_faulty:
        memory.open = open_elsewhere  # type: ignore[method-assign]
    seen = fault.gives_up(fault.forward)
    memory._groups.clear()
    memory.open = honest_open  # type: ignore[method-assign]
    dist.barrier()
    fault.check()
    return seen


def not_a_number(job: Job) -> dict[str, Any]:
    """NaN and infinity in one token of the faulty rank leave all other tokens as they were."""
    fault = Fault(job)
    clean = job.step(fault.backend, fault.inputs, fault.weights)
    victim = 5
    for value in (float("nan"), float("inf")):
        x = [tensor.clone() for tensor in fault.inputs.x]
        x[-1][victim, 7] = value
        spoiled = replace(fault.inputs, x=x)
        got = job.step(fault.backend, spoiled, fault.weights)
        torch.cuda.synchronize()
        others = torch.ones(len(got.out), dtype=torch.bool, device=job.device)
        if fault.is_faulty:
            others[victim] = False
            assert not got.out[victim].isfinite().all()
        for name in ("out", "grad_x", "grad_probs"):
            assert torch.equal(getattr(got, name)[others], getattr(clean, name)[others]), name
        first = job.rank * fault.config.num_local_experts
        met = fault.inputs.routing_map[-1][victim][first : first + fault.config.num_local_experts]
        for name in ("grad_fc1", "grad_fc2"):
            assert torch.equal(getattr(got, name)[~met], getattr(clean, name)[~met]), name
            assert all(not grad.isfinite().all() for grad in getattr(got, name)[met])
    fault.check()
    return {}


def held_multiprocessors(job: Job) -> dict[str, Any]:
    """Beside a kernel on the reserved SMs all go on; held beyond them, they are late and right."""
    fault = Fault(job)
    fault.check()
    spinner = Spinner()
    with spinner.hold(2):
        for _ in range(20):
            _, saved = fault.forward()
            fault.backward(saved)
        torch.cuda.current_stream().synchronize()
        assert spinner.is_running, "the layer waited for the other kernel to leave"
    dist.barrier(group=job.gloo)
    if fault.is_faulty:
        with spinner.hold(40, at_most_s=1.0):
            fault.check()
    else:
        fault.check()
    return {}


def no_memory_on_one_rank(job: Job) -> dict[str, Any]:
    """All ranks fail to grow the heap if one of them cannot, and go on once it can."""
    fault = Fault(job)
    fault.check()
    large = make_config(job.num_ranks, hidden=4096, max_tokens=2**16, topk=1)
    backend = _same_memory(fault, large)
    filler = None
    if fault.is_faulty:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        # Whole pages: torch would lend what is left of the last one, and could not give any back.
        size = (free - 2**29) // TORCH_PAGE_BYTES * TORCH_PAGE_BYTES
        filler = torch.empty(size, dtype=torch.uint8, device=job.device)
    inputs = job.inputs(large, cases.uniform, [4] * job.num_ranks)
    weights = job.weights(large, inputs)
    given = inputs.x[job.rank], inputs.probs[job.rank], inputs.routing_map[job.rank]
    try:
        backend.forward(*given, weights, training=True)
    except HeapError as error:
        seen = {"error": str(error)}
    else:
        raise AssertionError("the heap grew into memory that one rank does not have")
    del filler
    torch.cuda.empty_cache()
    dist.barrier()
    backend.forward(*given, weights, training=True)
    fault.check()
    return seen


def _same_memory(fault: Fault, config: MoEConfig) -> KernelBackend:
    backend = fault.job.backend(config, timeout_s=TIMEOUT_S)
    assert backend.memory is fault.backend.memory
    return backend


CASES: dict[str, Callable[[Job], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        killed_in_forward,
        killed_in_backward,
        never_launches_forward,
        never_launches_backward,
        withheld_signals,
        not_a_number,
        held_multiprocessors,
        no_memory_on_one_rank,
    )
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--symmetric", choices=("cuda", "nvshmem"), default="cuda")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args(arguments)

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("nccl", device_id=device, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    job = Job(
        group=group,
        gloo=dist.new_group(backend="gloo", timeout=timeout),
        rank=rank,
        num_ranks=dist.get_world_size(),
        device=device,
        symmetric=options.symmetric,
    )
    try:
        record = {"passed": True, **CASES[options.case](job)}
    except Exception:  # noqa: BLE001 - the test reports it
        record = {"passed": False, "error": traceback.format_exc()}
    write_record(options.out, rank, record)
    return int(not record["passed"])


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # NCCL would wait for the dead
