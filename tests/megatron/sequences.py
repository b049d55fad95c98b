"""Sequences that Megatron shares out by length, as its dynamic context parallelism does.

A long sequence has both ranks, which gather keys and values; then each rank has short ones of its
own, of which one rank has more. Only Transformer Engine's attention does so in Megatron; here its
local one does, with keys and values of all ranks.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

LENGTHS = (16, 12, 5, 7)
MOST_TOKENS = 12
"""Most tokens of a sequence that one rank has alone."""
GROUPS = [[[0], [0]], [[1], [2, 3]]]
"""The sequences of each of two ranks, group after group; ranks wait for each other in between."""

SETTINGS = {
    "hybrid_context_parallel": True,
    "max_seqlen_per_dp_cp_rank": MOST_TOKENS,
    "calculate_per_token_loss": True,
}

Batch = tuple[list[dict[str, torch.Tensor]], list[list[list[int]]]]


def shared_batches(iteration: int) -> Iterator[Batch]:
    """The sequences of an iteration, the same on both ranks, and whose they are."""
    generator = torch.Generator().manual_seed(1000 * iteration)
    skewed = [torch.rand(length + 1, generator=generator).pow(3) for length in LENGTHS]
    yield [{"tokens": (tokens * 128).long()} for tokens in skewed], GROUPS


def forward_step(samples: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    """The losses of this rank's part of a sequence, ``[1, tokens]``."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    sample = next(samples)
    tokens, num_ranks = sample["tokens"], int(sample["local_cp_size"])
    length = len(tokens) - 1
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    part = length // num_ranks
    begin = part * dist.get_rank(group) if num_ranks > 1 else 0
    own = slice(begin, begin + part)
    attend = DotProductAttention.forward

    def attend_to_all(
        self: Any, query: Any, key: Any, value: Any, *more: Any, **options: Any
    ) -> Any:
        if num_ranks > 1:
            key, value = (
                gather_from_sequence_parallel_region(each, group=group) for each in (key, value)
            )
        return attend(self, query, key, value, *more, **options)

    with mock.patch.object(DotProductAttention, "forward", attend_to_all):
        losses = model(
            tokens[None, :-1][:, own].contiguous(),
            torch.arange(length)[None, own],
            torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)[:, :, own],
            labels=tokens[None, 1:][:, own].contiguous(),
        )
    return losses, _sum_of_losses


def _sum_of_losses(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    total = losses.float().sum()
    return total, torch.tensor(losses.numel()), {"loss": total.detach() / losses.numel()}
