"""Bytes that a layer takes on the kernel, known before training.

Sizes of memory that the kernel lays out itself are asked of the library, which has the one copy of
that layout; needs neither torch nor a GPU.
"""

import math
from dataclasses import dataclass

from flashmoe_megatron.config import TILE_M, Keep, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.planner import plan_buffer_rows

ELEMENT_BYTES = 2
"""Bytes of an element of tokens and weights, which are bfloat16 or float16."""

TRANSIENT_BYTES = 8 * 2**30
"""A forward that keeps nothing may take this much for the most rows that there can be."""

DEFAULT_CTAS = 128
"""The grid on a GPU of 132 multiprocessors; 4 are left to other kernels."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one rank's GPU; weights, their gradients and the layer's input are not counted.

    Attributes:
        token_buffer: A rank's tokens, ``max_tokens * hidden`` elements; what the rest is measured
            in.
        symmetric: The symmetric heap, one for all layers of a group: the token buffer, a slot for
            each rank that may compute for a token, and the routing of all ranks. No more than
            ``(1 + min(topk, num_ranks))`` token buffers and 16 MiB as long as the group's routes,
            ``num_ranks * max_tokens * topk``, are at most 2**19; independent of the number of
            experts. One rank alone has the routing only.
        workspace: Counters, one for all layers of a group.
        weight_maps: Descriptors of one layer's weights and of where their gradients go.
        weight_copies: Copies of one layer's weights that a pass of experts in FP8 multiplies, one
            for all layers of a shape: as many bytes as the weights have.
        own_copies: Copies that each layer keeps of its weights while the owner promises that these
            stay as they are; none without a promise. With gradients of tokens in FP8 backwards keep
            transposes, too.
        kept: What one forward keeps for its backward: the plan, the received rows and the
            pre-activations; without the rows if it keeps "preactivations", nothing if "inputs".
        forward: The further bytes of a forward that a backward follows, while it runs: activations
            and results of all rows, and rows that are not kept, unless tokens are read in their
            place, as narrow experts of one rank alone do. A forward that keeps the inputs
            alone does not count the rows first: its buffers are for the most that there can be, if
            that is little.
        backward: The same of a backward: received gradients, activations, gradients of fc1's output
            and results of all rows, partial sums of the probabilities' gradient, rows in bfloat16
            that were kept in FP8, and what was not kept. One rank alone receives no gradients of
            narrow experts, but where their weights are transposed, which this does not count, and
            reads their tokens in place of rows.
        forward_out: The forward's output.
        backward_out: The gradients of tokens and of float32 probabilities.
        num_row_blocks: Blocks of 128 received rows, pad rows included, that ``kept``, ``forward``
            and ``backward`` are for.
    """

    token_buffer: int
    symmetric: int
    workspace: int
    weight_maps: int
    weight_copies: int
    own_copies: int
    kept: int
    forward: int
    backward: int
    forward_out: int
    backward_out: int
    num_row_blocks: int


SLOT_BYTES = ELEMENT_BYTES + 4
"""Bytes of spare slots for each element of weights: its replica's, and a float32 gradient."""

MOST_SLOT_SHARE = 0.1
"""Spare slots may take so much of a GPU's memory."""


def check_slots_fit(config: MoEConfig, spare_slots: int, gpu_bytes: int) -> None:
    """Refuses spare slots that take more than ``MOST_SLOT_SHARE`` of this rank's GPU."""
    num_bytes = SLOT_BYTES * bindings.HeapBounds.of(config, spare_slots).slot_elements
    most = int(MOST_SLOT_SHARE * gpu_bytes)
    if num_bytes > most:
        raise ConfigError(
            f"spare_slots={spare_slots}: replicas and their gradients would take "
            f"{num_bytes / 2**20:.0f} MiB of each GPU, wanted at most {most / 2**20:.0f} MiB, a "
            f"tenth of its memory, or spare_slots of {most * spare_slots // num_bytes}"
        )


def transient_blocks(sizes: bindings.FlashMoESizes) -> int | None:
    """Blocks of rows of a forward that keeps nothing and counts none first.

    Its buffers live no longer than the call, so they may be for the most that there can be;
    ``None`` if that is more than ``TRANSIENT_BYTES``.
    """
    most = int(sizes.max_row_blocks)
    return most if most * _transient_block_bytes(sizes) <= TRANSIENT_BYTES else None


def _transient_block_bytes(sizes: bindings.FlashMoESizes) -> int:
    """The bytes of a forward that keeps nothing, for each block of rows."""
    rows = 0 if sizes.reads_tokens[False] else int(sizes.row_block_bytes)
    return rows + int(sizes.scratch_block_bytes[False])


def reads_tokens(config: MoEConfig) -> bool:
    """Tells whether a backward takes rows that were not kept from tokens, in its own launch.

    Raises:
        ConfigError: The kernel cannot run such a layer.
        DeviceError: The library is not there.
    """
    return bool(_sizes_of(config, DEFAULT_CTAS).reads_tokens[True])


def _sizes_of(config: MoEConfig, num_ctas: int) -> bindings.FlashMoESizes:
    sizes = bindings.FlashMoESizes()
    problem = bindings.problem_of(
        config,
        rank=0,
        dtype=bindings.BFLOAT16,
        transposed=False,
        num_ctas=num_ctas,
        heap=bindings.HeapBounds.of(config),
        timeout=1.0,
    )
    bindings.call("sizes", problem, sizes)
    return sizes


def plan_memory(
    config: MoEConfig,
    *,
    keep: Keep = "all",
    num_row_blocks: int | None = None,
    num_ctas: int = DEFAULT_CTAS,
) -> MemoryPlan:
    """Computes the bytes that a layer takes.

    Args:
        config: The layer's shape; every rank has ``config.max_tokens`` tokens.
        keep: What a forward keeps for its backward.
        num_row_blocks: Blocks of 128 rows that this rank receives; ``None`` takes the mean under
            uniform random routing.
        num_ctas: The kernel's grid.

    Raises:
        ConfigError: The kernel cannot run such a layer, or ``keep`` is unknown.
        DeviceError: The library is not there.
    """
    BackendOptions(keep=keep)  # refuses another word
    sizes = _sizes_of(config, num_ctas)
    if num_row_blocks is None:
        num_row_blocks = math.ceil(plan_buffer_rows(config).expected / TILE_M)
    tokens = config.max_tokens
    out = tokens * config.hidden * ELEMENT_BYTES
    grads = out + tokens * config.num_experts * 4
    plan = int(sizes.plan_bytes)
    rows = num_row_blocks * int(sizes.row_block_bytes)
    preact = num_row_blocks * int(sizes.preact_block_bytes)
    forward, backward = (num_row_blocks * int(size) for size in sizes.scratch_block_bytes)
    if keep == "all":
        kept = plan + rows + preact
    elif keep == "preactivations":
        kept = plan + preact
        forward = num_row_blocks * _transient_block_bytes(sizes)
        backward += 0 if sizes.reads_tokens[True] == bindings.READS_TOKENS else rows
    else:
        kept = 0
        again = plan + rows + preact + max(forward + out, backward + grads)
        most = transient_blocks(sizes)
        blocks = num_row_blocks if most is None else most
        forward, backward = plan + blocks * _transient_block_bytes(sizes), again - grads
    return MemoryPlan(
        token_buffer=tokens * config.hidden * ELEMENT_BYTES,
        symmetric=int(sizes.heap_bytes),
        workspace=int(sizes.workspace_bytes),
        weight_maps=int(sizes.weight_map_bytes) + int(sizes.grad_table_bytes),
        weight_copies=max(sizes.weight_copy_bytes),
        own_copies=sum(map(int, sizes.weight_copy_bytes[: 1 + config.has_fp8_dgrad])),
        kept=kept,
        forward=forward,
        backward=backward,
        forward_out=out,
        backward_out=grads,
        num_row_blocks=num_row_blocks,
    )
