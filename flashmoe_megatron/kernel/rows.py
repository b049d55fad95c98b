"""Rows that a backward leaves in its scratch memory, for gradients of low-rank factors."""

from typing import NamedTuple

import torch

from flashmoe_megatron.config import TILE_M, MoEConfig
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.low_rank import ExpertRows, Factors


class BackwardRows(NamedTuple):
    """The memory of one backward, which lives until its rows are used.

    Attributes:
        problem: The layer, as the launch had it.
        grad_out: ``[num_tokens, hidden]``, the gradient of this rank's outputs.
        x: The received rows of the forward; ``None`` where none were wanted.
        plan: The forward's.
        scratch: The launch's scratch memory.
        num_row_blocks: Blocks of rows that the buffers hold.
    """

    problem: bindings.FlashMoEProblem
    grad_out: torch.Tensor
    x: torch.Tensor | None
    plan: torch.Tensor
    scratch: torch.Tensor
    num_row_blocks: int

    def give(self, config: MoEConfig, factors: Factors) -> None:
        """Has factors take their rows. The host does not wait."""
        found, num_rows = self._find(), self.num_row_blocks * TILE_M
        dtype, num_experts = self.grad_out.dtype, config.num_local_experts
        counts = _at(self.plan, found.expert_rows, torch.int32, num_experts)
        blocks = _at(self.plan, found.expert_block, torch.int32, num_experts + 1)
        places = ExpertRows(blocks * TILE_M, counts)
        if factors.fc1 is not None:
            of_outputs = _at(self.scratch, found.grad_preact, dtype, num_rows, config.fc1_rows)
            factors.fc1.take(of_outputs, self._inputs(found, num_rows), places)
        if factors.fc2 is not None:
            act = _at(self.scratch, found.act, dtype, num_rows, config.intermediate)
            factors.fc2.take(self._grads_of_rows(found, num_rows), act, places)
        if config.num_ranks > 1:
            # Ranks may lack this backward: then it has ended at once, and has written no rows.
            header = self.plan[: bindings.PLAN_HEADER_BYTES].view(torch.int32)
            for each in factors.wanted:
                each.spoil(header[-1] != 0)

    def _find(self) -> bindings.FlashMoEBackwardRows:
        launch = bindings.FlashMoELaunch(
            num_row_blocks=self.num_row_blocks,
            num_tokens=len(self.grad_out),
            plan=self.plan.data_ptr(),
            scratch=self.scratch.data_ptr(),
        )
        found = bindings.FlashMoEBackwardRows()
        bindings.call("backward_rows", self.problem, launch, found)
        return found

    def _inputs(self, found: bindings.FlashMoEBackwardRows, num_rows: int) -> torch.Tensor:
        """Returns each row's inputs of fc1, which in FP8 are what its bytes stand for."""
        dtype, width = self.grad_out.dtype, self.grad_out.shape[1]
        if found.x is not None:
            return _at(self.scratch, found.x, dtype, num_rows, width)
        assert self.x is not None, "the forward keeps rows for factors of fc1"
        return self.x.view(dtype).view(num_rows, width)

    def _grads_of_rows(self, found: bindings.FlashMoEBackwardRows, num_rows: int) -> torch.Tensor:
        """Returns the gradient of each row's outputs; a rank that is alone may have no copies."""
        grad_out = self.grad_out
        if found.grad_out is not None or not num_rows:
            width = grad_out.shape[1]
            return _at(self.scratch, found.grad_out, grad_out.dtype, num_rows, width)
        if not len(grad_out):  # then no row is an expert's
            return grad_out.new_zeros(num_rows, grad_out.shape[1])
        tokens = _at(self.plan, found.row_tokens, torch.int32, num_rows, 2)[:, 0]
        # Rows that are no expert's are any token's, and are not used.
        return grad_out.index_select(0, tokens.clamp(0, len(grad_out) - 1))


def _at(memory: torch.Tensor, address: int | None, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns what lies at an address within some bytes."""
    begin = (address or 0) - memory.data_ptr()
    num_bytes = dtype.itemsize
    for length in shape:
        num_bytes *= length
    if not num_bytes:
        return memory.new_empty(shape, dtype=dtype)
    assert 0 <= begin <= memory.nbytes - num_bytes, "the library names memory of the call"
    return memory[begin : begin + num_bytes].view(dtype).view(shape)
