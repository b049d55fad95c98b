"""Several hosts in one process on one GPU: a thread and a stream for each of their ranks.

The ranks of a host share heaps as virtual ranks do; of other hosts' heaps they have no address, so
that an access between hosts would fault. What crosses is copied between the ranks' tensors.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.hosts.backend import HostsBackend
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.ranks import Ranks, Value
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps
from tests.gpu.expected import Results
from tests.gpu.spinner import Wait
from tests.gpu.virtual import (
    CLUSTER_SIZE,
    FREE_SMS,
    TIMEOUT_S,
    GuardedAllocator,
    GuardedBackend,
    VirtualGroup,
    _Memory,
    device,
    streams,
)
from tests.unit import cases
from tests.unit.rails import LocalRail

PATIENCE_S = 60.0
_Result = TypeVar("_Result")


@dataclass
class Switchboard:
    """Where the ranks of a grid leave what others take; one slot for each rank and step."""

    num_ranks: int
    given: dict[int, Any] = field(default_factory=dict)
    done: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.num_ranks, timeout=PATIENCE_S)

    def swap(self, slots: dict[int, Any], rank: int, value: Any) -> dict[int, Any]:
        """Leaves a value and takes all ranks'."""
        slots[rank] = value
        self.barrier.wait()
        return dict(slots)


class LocalRanks(Ranks):
    """The ranks of a grid within one process."""

    def __init__(self, grid: HostGrid, board: Switchboard) -> None:
        super().__init__(None)
        self.rank, self.num_ranks = grid.rank, board.num_ranks
        self._board = board

    def gather(self, value: Value) -> list[Value]:
        given = self._board.swap(self._board.given, self.rank, value)
        self._board.barrier.wait()
        return [given[rank] for rank in range(self.num_ranks)]


class SwitchedRail(LocalRail):
    """A rail whose every exchange is one of the whole grid."""

    def __init__(self, grid: HostGrid, board: Switchboard) -> None:
        super().__init__(grid, LocalRanks(grid, board))
        self._board = board

    def gather(self, words: torch.Tensor) -> torch.Tensor:
        return self._take(words, lambda given: torch.stack([given[r] for r in sorted(given)]))

    def exchange(
        self,
        send: torch.Tensor,
        received: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        *,
        is_rows: bool,
    ) -> Callable[[], None]:
        leaving = sum(send_counts) - send_counts[self.grid.host]
        self.crossed.add(leaving, send, is_rows=is_rows)
        parts = torch.split(send, list(send_counts))

        def take(given: dict[int, Any]) -> None:
            targets = torch.split(received, list(receive_counts))
            for target, peer in zip(targets, self.grid.ranks_of_rail, strict=True):
                target.copy_(given[peer][self.grid.host])

        self._take(parts, take)
        return lambda: None

    def spread(self, send: torch.Tensor, received: torch.Tensor) -> None:
        self.crossed.add(len(send) * (self.grid.num_hosts - 1), send, is_rows=True)

        def take(given: dict[int, Any]) -> None:
            targets = torch.chunk(received, self.grid.num_hosts)
            for target, peer in zip(targets, self.grid.ranks_of_rail, strict=True):
                target.copy_(given[peer])

        self._take(send, take)

    def _take(self, value: Any, take: Callable[[dict[int, Any]], _Result]) -> _Result:
        """Gives a value to all ranks of the grid, and takes from theirs on this rank's stream."""
        board, rank = self._board, self.grid.rank
        stream = torch.cuda.current_stream()
        given = board.swap(board.given, rank, (value, stream.record_event()))
        for _, event in given.values():
            stream.wait_event(event)
        result = take({peer: each for peer, (each, _) in given.items()})
        for event in board.swap(board.done, rank, stream.record_event()).values():
            stream.wait_event(event)  # what was given may be freed now
        return result


class _HostMemory(_Memory):
    """A virtual rank's memory, made by all ranks of all hosts at once."""

    board: Switchboard
    num_ranks: int

    def allocate(self, sizes: bindings.FlashMoESizes) -> None:
        super().allocate(sizes)
        if threading.current_thread() is not threading.main_thread():
            self.board.barrier.wait()

    def open(self) -> bindings.FlashMoEGroup:
        group = super().open()
        assert not any(group.heaps[self.num_ranks :]), "a heap of another host has an address"
        return group


class VirtualHosts:
    """A layer over hosts; lists are by rank of the whole group."""

    def __init__(
        self,
        config: MoEConfig,
        num_hosts: int,
        *,
        is_guarded: bool = True,
        **options: Any,
    ) -> None:
        VirtualGroup(2)  # loads kernels
        self.config = config
        self.allocator = GuardedAllocator() if is_guarded else None
        per_host = config.num_ranks // num_hosts
        board = Switchboard(config.num_ranks)
        sms = torch.cuda.get_device_properties(device()).multi_processor_count
        num_ctas = (sms - FREE_SMS) // config.num_ranks // CLUSTER_SIZE * CLUSTER_SIZE
        chosen = BackendOptions(timeout=TIMEOUT_S, **options)
        memories = [_HostMemory(None, device(), chosen) for _ in range(config.num_ranks)]
        self.backends: list[HostsBackend] = []
        for rank, memory in enumerate(memories):
            grid = HostGrid(num_hosts, per_host, rank)
            memory.peers = [memories[peer] for peer in grid.ranks_within]
            memory.board, memory.num_ranks = board, per_host

            def make(
                part: MoEConfig,
                within: BackendOptions,
                memory: _HostMemory = memory,
                grid: HostGrid = grid,
            ) -> GuardedBackend:
                backend = GuardedBackend(
                    part,
                    None,
                    device(),
                    memory=memory,
                    rank=grid.place,
                    num_ctas=num_ctas,
                    options=within,
                )
                backend.allocator = self.allocator
                return backend

            self.backends.append(
                HostsBackend(
                    config, SwitchedRail(grid, board), make, device=device(), options=chosen
                )
            )
        self._board = board

    def run(self, call: Callable[[HostsBackend], _Result]) -> list[_Result]:
        """Calls every rank's backend in a thread and on a stream of its own; raises all errors."""
        found: dict[int, Any] = {}
        current = torch.cuda.current_device()
        before = torch.cuda.current_stream().record_event()

        def work(rank: int) -> None:
            torch.cuda.set_device(current)
            try:
                with torch.cuda.stream(streams()[rank]):
                    streams()[rank].wait_event(before)
                    found[rank] = call(self.backends[rank])
            except Exception as error:  # noqa: BLE001 - raised by the caller
                found[rank] = error
                if isinstance(error, threading.BrokenBarrierError):
                    self._board.barrier.abort()

        threads = [threading.Thread(target=work, args=(r,)) for r in range(len(self.backends))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for stream in streams():
            torch.cuda.current_stream().wait_stream(stream)
        return [found[rank] for rank in range(len(self.backends))]

    def prepare(self, weights: Sequence[ExpertWeights]) -> None:
        """Makes memory and tables before any launch could have to wait for them."""
        for backend in self.backends:
            backend.within._prepare()  # type: ignore[attr-defined]
        for backend, own in zip(self.backends, weights, strict=True):
            share = own if backend._guests is None else backend._guests.with_own(own)
            backend.within._use_weights(share)  # type: ignore[attr-defined]
        torch.cuda.synchronize()

    def step(self, inputs: cases.Inputs, weights: list[ExpertWeights]) -> Results:
        """One forward and its backward of all ranks."""
        self.prepare(weights)
        fc1, fc2 = steps.make_grads(self, weights)  # type: ignore[arg-type]
        torch.cuda.synchronize()

        def call(backend: HostsBackend) -> tuple[torch.Tensor, ...]:
            rank = backend.rank
            out, saved = backend.forward(
                inputs.x[rank],
                inputs.probs[rank],
                inputs.routing_map[rank],
                weights[rank],
                training=True,
            )
            grads = backend.backward(
                inputs.grad_out[rank], saved, weights[rank], fc1[rank], fc2[rank]
            )
            return out, *grads

        found = self.run(call)
        for one in found:
            if isinstance(one, Exception):
                raise one
        out, grad_x, grad_probs = (list(column) for column in zip(*found, strict=True))
        torch.cuda.synchronize()
        for backend in self.backends:
            backend.raise_pending_fault()
        return steps.collect(out, grad_x, grad_probs, fc1, fc2, transposed=weights[0].transposed)


class MirrorRail(LocalRail):
    """A rail to one host that sends and asks what this one does: both ways in one process."""

    def __init__(self) -> None:
        super().__init__(HostGrid(2, 1, 0))

    def gather(self, words: torch.Tensor) -> torch.Tensor:
        status, tokens, _, leaving = words.unbind()
        none = torch.zeros_like(status)
        return torch.stack([words, torch.stack([status, tokens, leaving, none])])

    def exchange(
        self,
        send: torch.Tensor,
        received: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        *,
        is_rows: bool,
    ) -> Callable[[], None]:
        assert list(send_counts) == list(receive_counts)
        self.crossed.add(send_counts[1], send, is_rows=is_rows)
        received.copy_(send)
        return lambda: None

    def spread(self, send: torch.Tensor, received: torch.Tensor) -> None:
        self.crossed.add(len(send), send, is_rows=True)
        received[: len(send)] = send
        received[len(send) :] = send


class ThrottledRail(MirrorRail):
    """A mirror with a card of its own: exchanges take a time by their bytes.

    They follow one another on a stream of their own, as NCCL's on one communicator do, beside
    launches. What is copied is copied meanwhile.

    Attributes:
        us_per_byte: What a byte takes that goes to the other host, both ways at once.
        spans: Exchanges since it was emptied: bytes, and events of begin and end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.us_per_byte = 0.0
        self.spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._wait = Wait()
        self._stream, self._copies = torch.cuda.Stream(), torch.cuda.Stream()

    def exchange(
        self,
        send: torch.Tensor,
        received: torch.Tensor,
        *counts: Sequence[int],
        is_rows: bool,
    ) -> Callable[[], None]:
        before = self.crossed.bytes
        begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(torch.cuda.current_stream())
        begin.record(self._stream)
        self._copies.wait_stream(self._stream)
        with torch.cuda.stream(self._copies):
            super().exchange(send, received, *counts, is_rows=is_rows)
        sent = self.crossed.bytes - before
        with torch.cuda.stream(self._stream):
            self._wait(sent * self.us_per_byte)
            self._stream.wait_stream(self._copies)
            done.record()
        self.spans.append((f"exchange of {sent / 2**20:.1f} MiB", begin, done))
        for tensor in (send, received):
            tensor.record_stream(self._copies)
        return lambda: torch.cuda.current_stream().wait_event(done)
