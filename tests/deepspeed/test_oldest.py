"""A part of the tests with the oldest release of DeepSpeed that is claimed to work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_megatron.releases import DEEPSPEED, text_of

REPOSITORY = Path(__file__).parents[2]
RELEASE = text_of(DEEPSPEED.oldest)
INSTALLED = REPOSITORY / "build" / f"deepspeed-{RELEASE}"
"""Where tools/setup_env.sh installs it, apart from the release of the other tests."""

TIMEOUT_S = 300


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_the_oldest_release() -> None:
    if not INSTALLED.is_dir():
        pytest.skip(f"{INSTALLED} is missing; tools/setup_env.sh makes it")
    tests = [f"tests/deepspeed/test_{name}.py" for name in ("training", "attach")]
    some = "zero2 or k3 or residual or random or native_zero2 or older or agree"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *tests, "-k", some, "-p", "no:cacheprovider"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(INSTALLED)},
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-20_000:]
    assert f"deepspeed: {RELEASE}" in ran.stdout
