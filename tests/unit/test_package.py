"""The package's face: its public names, and what importing it costs."""

import subprocess
import sys

import pytest

import flashmoe_megatron
from flashmoe_megatron import errors


def test_public_names_resolve():
    for name in flashmoe_megatron.__all__:
        assert getattr(flashmoe_megatron, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = flashmoe_megatron.nonsense


def test_dir_shows_the_public_names():
    assert dir(flashmoe_megatron) == flashmoe_megatron.__all__
    assert {"MoEConfig", "FlashMoELayer", "moe_forward", "__version__"} <= set(
        flashmoe_megatron.__all__
    )


def test_every_error_is_public():
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes <= set(flashmoe_megatron.__all__)


def test_import_and_planning_need_no_torch():
    code = (
        "import sys; from flashmoe_megatron import MoEConfig, plan_capacity; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
