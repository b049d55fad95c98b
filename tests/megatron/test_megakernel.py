"""FlashMoE behind Megatron's megakernel interface; its outputs are compared in test_layer."""

import torch
import torch.distributed as dist

from tests.distributed import RankPool
from tests.megatron.harness import MICRO_BATCH, SEQ_LENGTH, Layout, prepare, transformer_config
from tests.megatron.layers import make_layer, megakernel_of

STAGES = Layout(expert=2, pipeline=2)


def layer_numbers(group: dist.ProcessGroup, given: list[int | None]) -> tuple[int, list[int]]:
    """This rank's stage, and the numbers in its records."""
    prepare(STAGES)
    from megatron.core import parallel_state

    config = transformer_config(STAGES, "flashmoe")
    numbers = []
    for number in given:
        layer = make_layer(config)
        backend = megakernel_of(layer, **({} if number is None else {"layer_number": number}))
        x = torch.randn(SEQ_LENGTH, MICRO_BATCH, 64)
        computes = backend._routed.backend
        computes.take_records()
        backend(x, *layer.route(x))
        numbers += [record.layer for record in computes.take_records()]
    return parallel_state.get_pipeline_model_parallel_rank(), numbers


def test_layers_are_told_apart(four_ranks: RankPool) -> None:
    by_stage: dict[int, list[int]] = {}
    for stage, numbers in four_ranks.run(layer_numbers, [None, None, None]):
        assert by_stage.setdefault(stage, numbers) == numbers  # the same on ranks of one stage
        assert sorted(set(numbers)) == numbers
        assert len(numbers) == 3
    first, second = by_stage[0], by_stage[1]
    assert not set(first) & set(second)
    assert min(first) == 0


def test_a_number_that_is_known_is_taken(four_ranks: RankPool) -> None:
    for _, numbers in four_ranks.run(layer_numbers, [7, 5]):
        assert numbers == [6, 4]
