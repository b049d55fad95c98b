"""Records of launches whose metrics are worked out by hand in the tests that use them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.telemetry.record import LaunchRecord, Phase
from flashmoe_megatron.telemetry.totals import LayerPlace
from tests.unit import cases

CONFIG: MoEConfig = cases.make_config(num_ranks=2)  # H = F = 64, 8 experts, top-2, gated
NUM_SMS = 132

RECORD = LaunchRecord(
    layer=3,
    direction="forward",
    epoch=1,
    begin_ns=5_000,
    end_ns=1_005_000,
    num_ctas=128,
    num_tokens=256,
    num_rows=500,
    num_row_blocks=6,
    expert_rows=(100, 150, 200, 50),
    rows_pulled=(230, 190),
    results_pushed=(230, 190),
    phase_ns={
        Phase.HEAD: 100_000,
        Phase.ROWS_WAIT: 60_000,
        Phase.ACT_WAIT: 10_000,
        Phase.STAGE_WAIT: 40_000,
        Phase.GEMM: 700_000,
        Phase.EPILOGUE: 80_000,
        Phase.DISPATCH: 200_000,
        Phase.DELIVER: 150_000,
        Phase.REDUCE: 50_000,
        Phase.TAIL: 80_000,
    },
)


def record(**changes: Any) -> LaunchRecord:
    return replace(RECORD, **changes)


def place(rank: int = 0, **changes: Any) -> LayerPlace:
    return LayerPlace(**{"config": CONFIG, "rank": rank, "num_sms": NUM_SMS, **changes})


COUNTED = ("expert_rows", "row_fill", "imbalance", "mib_sent", "deduplication", "dropped_routes")


def counted(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics that the clock is not in."""
    return {key: values[key] for key in values if any(name in key for name in COUNTED)}
