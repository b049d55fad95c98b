"""What has a risk is said when flashmoe is attached."""

from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe_megatron.adapters.deepspeed.notices import overlap_notice
from flashmoe_megatron.adapters.deepspeed.settings import Settings


def engine(*, stage: int = 2, overlaps: bool = True) -> Any:
    return SimpleNamespace(
        zero_optimization_stage=lambda: stage, zero_overlap_comm=lambda: overlaps
    )


@pytest.mark.parametrize(
    ("given", "kinds", "ranks", "reserved_sms", "environment", "said"),
    [
        (engine(), {"kernel"}, 2, 4, {}, "set NCCL_MAX_CTAS=4 "),
        (engine(), {"kernel", "scheduled"}, 2, 8, {}, "set NCCL_MAX_CTAS=8 "),
        (engine(), {"kernel"}, 2, 4, {"NCCL_MAX_CTAS": "16"}, "set NCCL_MAX_CTAS=4 "),
        (engine(), {"kernel"}, 2, 4, {"NCCL_MAX_CTAS": "4"}, None),
        (engine(), {"kernel"}, 2, 0, {"NCCL_MAX_CTAS": "1"}, "leave 0 multiprocessors"),
        (engine(), {"kernel"}, 2, 4, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, None),
        (engine(), {"kernel"}, 1, 4, {}, None),
        (engine(), {"scheduled"}, 2, 4, {}, None),
        (engine(overlaps=False), {"kernel"}, 2, 4, {}, None),
        (engine(stage=0), {"kernel"}, 2, 4, {}, None),
    ],
)
def test_a_reduction_that_may_not_fit(
    given: Any,
    kinds: set[str],
    ranks: int,
    reserved_sms: int,
    environment: dict[str, str],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCCL_MAX_CTAS", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    notice = overlap_notice(given, kinds, ranks, Settings(reserved_sms=reserved_sms))
    assert (notice is None) == (said is None)
    assert said is None or said in str(notice)
