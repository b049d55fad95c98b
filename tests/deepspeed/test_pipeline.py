"""DeepSpeed's PipelineEngine: stages with layers of their own, several micro-batches in flight."""

import pytest

from tests.deepspeed import pipeline
from tests.deepspeed.harness import FUSED
from tests.distributed import run_ranks

ZERO_STAGES = (0, 1)
"""ZeRO stages that PipelineEngine allows."""


def test_pipeline_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    by_rank = run_ranks(pipeline.train_all, 4, ZERO_STAGES)
    for outcomes in zip(*by_rank, strict=True):  # all ranks' for one ZeRO stage
        names = set()
        for (stock, _, no_calls), (fused, report, calls) in outcomes:
            assert fused == pytest.approx(stock, rel=1e-5)
            assert stock[-1] != stock[0]
            assert set(report.values()) == {FUSED}
            assert no_calls == []
            assert calls == [pipeline.STEPS * pipeline.MICRO_BATCHES] * 2
            names |= report.keys()
        assert len(names) == 2 * pipeline.NUM_STAGES  # each stage reports the layers that it has
