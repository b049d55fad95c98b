"""DeepSpeed's PipelineEngine: stages with layers of their own, several micro-batches in flight."""

import pytest

from tests.deepspeed.pipeline import MICRO_BATCHES, NUM_STAGES, PIPELINE, Case
from tests.distributed import RankPool


@pytest.mark.parametrize("zero", [0, 1])  # what PipelineEngine allows
def test_pipeline_engine(zero: int, four_ranks: RankPool) -> None:
    case = Case(zero)
    names = set[str]()
    for stock, fused in PIPELINE.compare(four_ranks, case):
        assert stock.losses[-1] != stock.losses[0]
        assert fused.calls == [case.steps * MICRO_BATCHES] * 2
        names |= fused.layers.keys()
    assert len(names) == 2 * NUM_STAGES  # each stage reports the layers that it has
