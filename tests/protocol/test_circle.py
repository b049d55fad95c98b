"""Kernels that wait for peers beside each other: which settings can end in a circle of waits."""

from pathlib import Path

import pytest

from flashmoe_megatron.config import DEFAULT_RESERVED_SMS
from flashmoe_megatron.select import OVERLAP_CTAS
from tests.protocol.programs import build, run

ONE, SEVERAL = 1, 8
"""Hardware queues, as CUDA_DEVICE_MAX_CONNECTIONS says."""


@pytest.fixture(scope="module")
def circle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("circle", tmp_path_factory.mktemp("protocol") / "circle")


@pytest.mark.parametrize(
    ("scenario", "reserved", "ctas", "queues", "is_safe"),
    [
        # What an overlap of exchanges and launches is allowed with.
        ("overlap", 2 * OVERLAP_CTAS, OVERLAP_CTAS, SEVERAL, True),
        # NCCL's own choice of CTAs on as many reserved multiprocessors.
        ("overlap", DEFAULT_RESERVED_SMS, 16, SEVERAL, False),
        ("overlap", DEFAULT_RESERVED_SMS, 16, ONE, True),
        ("overlap", 1, OVERLAP_CTAS, SEVERAL, False),
        # A reduction of gradients, also without hosts.
        ("reduce", DEFAULT_RESERVED_SMS, 16, SEVERAL, False),
        ("reduce", DEFAULT_RESERVED_SMS, 16, ONE, True),
        ("reduce", DEFAULT_RESERVED_SMS, DEFAULT_RESERVED_SMS, SEVERAL, True),
        ("reduce", 16, 16, SEVERAL, True),
        # Both beside a launch, where each of the two fits.
        ("both", DEFAULT_RESERVED_SMS, 16, SEVERAL, False),
        ("both", DEFAULT_RESERVED_SMS, DEFAULT_RESERVED_SMS, SEVERAL, True),
    ],
)
def test_a_circle_of_waits(
    circle: Path, scenario: str, reserved: int, ctas: int, queues: int, is_safe: bool
) -> None:
    outcome = run(circle, scenario, reserved, ctas, queues)
    assert outcome.record["states"], outcome.text
    assert (outcome.code == 0) == is_safe, outcome.text
    assert ("waits for the others" in outcome.text) == (not is_safe)
