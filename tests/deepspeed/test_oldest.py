"""A part of the tests with the oldest release of DeepSpeed that is claimed to work."""

import pytest

from flashmoe_megatron.releases import DEEPSPEED, text_of
from tests.programs import ROOT, run_python

RELEASE = text_of(DEEPSPEED.oldest)
INSTALLED = ROOT / "build" / f"deepspeed-{RELEASE}"
"""Where tools/setup_env.sh installs it, apart from the release of the other tests."""

TESTS = (
    *(
        f"test_training.py::test_two_ranks[{name}]"
        for name in ("zero2", "zero2_overlap", "k1_random_tokens", "k3", "residual")
    ),
    "test_training.py::test_four_ranks[ep2_dp2_zero2_overlap]",
    "test_training.py::test_bfloat16[zero2]",
    "test_training.py::test_float16[zero2]",
    "test_training.py::test_the_loss_scaler_skips_a_step_that_overflows[zero2]",
    *(
        f"test_training.py::test_checkpoints_are_interchangeable[native_zero2-{order}]"
        for order in ("fused_to_stock", "stock_to_fused")
    ),
    "test_attach.py::test_autoep_layers_of_older_releases_are_refused",
    "test_attach.py::test_ranks_have_to_agree",
)
"""Releases differ in ZeRO's hooks, gates and checkpoints; older ones have no AutoEP to serve."""


def test_the_oldest_release() -> None:
    if not INSTALLED.is_dir():
        pytest.skip(f"{INSTALLED} is missing; tools/setup_env.sh makes it")
    tests = [f"tests/deepspeed/{name}" for name in TESTS]
    ran = run_python("-m", "pytest", *tests, "-p", "no:cacheprovider", before=[INSTALLED])
    assert f"deepspeed: {RELEASE}" in ran.stdout
    assert " skipped" not in ran.stdout
