"""Several ranks in one process on one GPU: each has its own heap, stream and share of the SMs.

The kernel cannot tell them from ranks on GPUs of their own; only the addresses of the peers' heaps
differ. A few SMs stay free, so that ordinary kernels of one rank run beside the others' launches.
"""

import contextlib
import functools
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.backend import (
    CLUSTER_SIZE,
    KernelBackend,
    PendingForward,
    count_routes,
)
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.low_rank import NO_FACTORS, Factors
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.weights import ExpertWeights, WeightGrad

# Read when CUDA starts: a hardware queue per stream, or one rank's launch waits behind another's.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

TIMEOUT_S = 10.0
FREE_SMS = 4
GPCS = 8
"""A GPU has at most so many; both CTAs of a cluster are in one."""
BAND_BYTES = 4096  # keeps the alignment of what lies behind it
BAND = 0xA5
POISON = 0xFF  # NaN in every float format, -1 in every integer format


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def streams() -> list[torch.cuda.Stream]:
    """One stream per rank for the whole process: few enough for a hardware queue each."""
    return [torch.cuda.Stream() for _ in range(8)]


@functools.cache
def streams_ahead() -> list[torch.cuda.Stream]:
    """Those on which ranks settle on replicas, which are of another kind: none is both."""
    return [torch.cuda.Stream(priority=-1) for _ in range(8)]


def mispredicted(routing_map: torch.Tensor) -> torch.Tensor:
    """What lookahead may expect of a routing: half of the tokens will choose other experts."""
    half = len(routing_map) // 2
    return torch.cat([routing_map[:half], routing_map[half:].roll(2, dims=1)])


@contextlib.contextmanager
def poisoned_empties() -> Iterator[None]:
    """Makes torch fill every uninitialized tensor with NaN or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class GuardedAllocator:
    """Allocates poisoned buffers between two bands of a pattern that nothing may touch."""

    def __init__(self) -> None:
        self._bases: list[torch.Tensor] = []

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        base = torch.full((num_bytes + 2 * BAND_BYTES,), BAND, dtype=torch.uint8, device=device())
        inside = base[BAND_BYTES : BAND_BYTES + num_bytes].fill_(POISON)
        self._bases.append(base)
        return inside.view(dtype).view(*shape)

    def check(self) -> None:
        """Fails if a band was written to; forgets the buffers."""
        torch.cuda.synchronize()
        for base in self._bases:
            for name, band in (("before", base[:BAND_BYTES]), ("behind", base[-BAND_BYTES:])):
                touched = (band != BAND).nonzero()
                assert not touched.numel(), (
                    f"{len(touched)} bytes {name} a buffer of {len(base) - 2 * BAND_BYTES} bytes "
                    f"were written to, the first at {int(touched[0])} of {BAND_BYTES}"
                )
        self._bases.clear()


class GuardedBackend(KernelBackend):
    """The backend with its row buffers from a :class:`GuardedAllocator`, if it has one."""

    allocator: GuardedAllocator | None = None

    def _empty(self, num_bytes: int) -> torch.Tensor:
        if self.allocator is None:
            return super()._empty(num_bytes)
        return self.allocator((num_bytes,), torch.uint8)


class _Memory(GroupMemory):
    """One virtual rank's memory."""

    peers: Sequence["_Memory"] = ()

    def _make_stream_ahead(self) -> torch.cuda.Stream:
        return streams_ahead()[self.peers.index(self)]

    @property
    def epoch(self) -> int:
        """The last epoch that ended."""
        return int(self._workspace.view(torch.int32)[1]) & 0xFFFFFFFF

    @epoch.setter
    def epoch(self, value: int) -> None:
        words = self._workspace.view(torch.int32)
        words[1] = value - (value >> 31 << 32)

    def open(self) -> bindings.FlashMoEGroup:
        group = super().open()
        for rank, peer in enumerate(self.peers):
            assert peer._heap is not None
            group.heaps[rank] = peer._heap.local.data_ptr()
        return group


@functools.cache
def load_kernels() -> None:
    """Runs one rank through every kernel that a rank may need while another rank's waits for it.

    CUDA loads a kernel at its first launch and may wait for all running ones to do so. On GPUs of
    their own the ranks load side by side; here the first rank's would wait for the second's turn.
    """
    options = BackendOptions(timeout=TIMEOUT_S)
    config = MoEConfig(
        hidden=64,
        intermediate=64,
        num_experts=1,
        topk=1,
        activation=Activation.RELU,
        gated=False,
        num_ranks=1,
        max_tokens=8,
    )
    memory = GroupMemory(None, device(), options)
    backend = GuardedBackend(config, None, device(), memory=memory, rank=0)
    backend.allocator = GuardedAllocator()
    weight = torch.ones(64, 64, dtype=torch.bfloat16, device=device())
    weights = ExpertWeights((weight,), (weight,))
    x, probs = weight[:8].clone(), torch.ones(8, 1, device=device())
    with poisoned_empties():
        for dtype in (torch.float32, torch.bfloat16):
            out, saved = backend.forward(x, probs, probs.bool(), weights, training=True)
            for accumulate in (False, True):
                fc1, fc2 = (
                    [WeightGrad(torch.zeros_like(weight, dtype=dtype), accumulate)]
                    for _ in range(2)
                )
                backend.backward(out, saved, weights, fc1, fc2)
        backend.keep = "preactivations"
        out, saved = backend.forward(x, probs, probs.bool(), weights, training=True)
        backend.backward(out, saved, weights, fc1, fc2)
    torch.cuda.synchronize()


class VirtualGroup:
    """What the layers of one expert-parallel group share, for all of its ranks."""

    def __init__(self, num_ranks: int, *, timeout_s: float = TIMEOUT_S, **options: Any) -> None:
        if num_ranks > 1:
            load_kernels()
        self.num_ranks = num_ranks
        self.options = BackendOptions(timeout=timeout_s, **options)
        self.memories = [_Memory(None, device(), self.options) for _ in range(num_ranks)]
        for memory in self.memories:
            memory.peers = self.memories
        self.num_ctas = self._share_of(FREE_SMS)

    def _share_of(self, num_free: int) -> int:
        sms = torch.cuda.get_device_properties(device()).multi_processor_count
        return (sms - num_free) // self.num_ranks // CLUSTER_SIZE * CLUSTER_SIZE

    def ctas_of(self, config: MoEConfig) -> int:
        """Returns the CTAs of a layer's launches, which leave a rank's last one a place.

        With gradients of tokens in FP8 those of weights are a launch of their own, for which no
        peer waits: the next plan of another rank may run before it, on any SMs, and so leave an odd
        SM in each GPC, where no cluster fits. That plan then waits for this rank's, which is next.
        """
        return self._share_of(FREE_SMS + GPCS) if config.has_fp8_dgrad else self.num_ctas


class VirtualLayer:
    """One layer on all ranks of a group. Lists are by rank."""

    def __init__(
        self,
        config: MoEConfig,
        group: VirtualGroup | None = None,
        *,
        is_guarded: bool = True,
        **group_options: Any,
    ) -> None:
        self.config = config
        self.group = group or VirtualGroup(config.num_ranks, **group_options)
        self.allocator = GuardedAllocator() if is_guarded else None
        self.backends = []
        # Layers of a group may have fewer experts than others have spare slots.
        slots = min(self.group.options.spare_slots, config.num_local_experts)
        options = replace(self.group.options, spare_slots=slots)
        for rank, memory in enumerate(self.group.memories):
            backend = GuardedBackend(
                config,
                None,
                device(),
                memory=memory,
                rank=rank,
                num_ctas=self.group.ctas_of(config),
                options=options,
            )
            backend.allocator = self.allocator
            self.backends.append(backend)

    def prepare(self) -> None:
        """Allocates every rank's memory before any rank takes its peers' addresses."""
        for backend in self.backends:
            backend._prepare()
        torch.cuda.synchronize()

    def begin(
        self,
        x: Sequence[torch.Tensor],
        probs: Sequence[torch.Tensor],
        routing_map: Sequence[torch.Tensor],
        num_row_blocks: int | None = None,
        without_backward: Sequence[int] = (),
    ) -> list[PendingForward]:
        """Begins the forwards of the ranks for which there are tokens in the lists.

        With ``num_row_blocks`` nothing is launched yet; without it, the plans are.
        """
        self.prepare()
        pending = []
        for rank in range(len(x)):
            with self._on_stream(rank):
                pending.append(
                    self.backends[rank].begin(
                        x[rank],
                        probs[rank],
                        routing_map[rank],
                        num_row_blocks,
                        followed=rank not in without_backward,
                    )
                )
        return pending

    def finish(
        self,
        pending: Sequence[PendingForward],
        weights: Sequence[ExpertWeights],
        *,
        training: bool = True,
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Launches the layers. All ranks are tried, then the first rank's error is raised."""
        for rank in range(len(pending)):
            # Tables are allocated, which may wait for a launch that waits for a later rank's.
            backend, share = self.backends[rank], weights[rank]
            for is_backward in (True, False):
                making = backend._making(share, is_backward=is_backward)
                backend._use_weights(share, making, is_backward=is_backward)
        found: list[tuple[torch.Tensor, Any]] = []
        errors = []
        for rank, plan in enumerate(pending):
            with self._on_stream(rank):
                try:
                    found.append(self.backends[rank].finish(plan, weights[rank], training=training))
                except Exception as error:  # noqa: BLE001 - raised below
                    errors.append(error)
        self._join()
        if errors:
            raise errors[0]
        return [out for out, _ in found], [saved for _, saved in found]

    def forward(
        self,
        x: Sequence[torch.Tensor],
        probs: Sequence[torch.Tensor],
        routing_map: Sequence[torch.Tensor],
        weights: Sequence[ExpertWeights],
        *,
        training: bool = True,
        num_row_blocks: int | None = None,
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """One launch per rank with ``num_row_blocks``, else two, as a backend's forward has.

        With lookahead one more, ahead of it, which expects another routing.
        """
        if self.group.options.placement == "lookahead":
            self.settle([*map(mispredicted, routing_map)], weights)
        without = () if training else range(len(x))
        pending = self.begin(x, probs, routing_map, num_row_blocks, without)
        return self.finish(pending, weights, training=training)

    def settle(self, routing_map: Sequence[torch.Tensor], weights: Sequence[ExpertWeights]) -> None:
        """Settles on replicas, on the ranks for which there are maps in the list."""
        self.prepare()
        for backend, share in zip(self.backends, weights, strict=True):
            backend._use_weights(share)  # see finish()
        for expected in routing_map:
            count_routes(expected)  # see load_kernels(); which kernel counts depends on the shape
        for rank, expected in enumerate(routing_map):
            with self._on_stream(rank):
                read = functools.partial(operator.getitem, weights, rank)
                self.backends[rank].settle(expected, read, layer=0)

    def backward(
        self,
        grad_out: Sequence[torch.Tensor],
        saved: Sequence[Any],
        weights: Sequence[ExpertWeights],
        *grads: Sequence[Sequence[WeightGrad]],
        factors: Sequence[Factors] | None = None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Runs the backward; ``grads`` are fc1's, fc2's and, if there are any, both biases'."""
        self.prepare()
        found = []
        for rank, backend in enumerate(self.backends):
            with self._on_stream(rank):
                found.append(
                    backend.backward(
                        grad_out[rank],
                        saved[rank],
                        weights[rank],
                        *(kind[rank] for kind in grads),
                        factors=factors[rank] if factors else NO_FACTORS,
                    )
                )
        self._join()
        return [grad_x for grad_x, _ in found], [grad_probs for _, grad_probs in found]

    def check_guards(self) -> None:
        assert self.allocator is not None
        self.allocator.check()

    @contextlib.contextmanager
    def _on_stream(self, rank: int) -> Iterator[None]:
        stream = streams()[rank]
        stream.wait_stream(torch.cuda.default_stream())
        poison = poisoned_empties() if self.allocator else contextlib.nullcontext()
        with torch.cuda.stream(stream), poison:
            yield

    def _join(self) -> None:
        for rank in range(self.config.num_ranks):
            torch.cuda.default_stream().wait_stream(streams()[rank])
