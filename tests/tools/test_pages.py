"""What pages tell users to write works as it stands there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_megatron.adapters.deepspeed.settings import read_settings
from tests.distributed import PATIENCE_S

pytestmark = pytest.mark.timeout(PATIENCE_S + 20)
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "flashmoe_megatron"
BEFORE_README = """
import torch
import torch.distributed as dist

dist.init_process_group()
x = torch.randn(3, 1024, dtype=torch.bfloat16, requires_grad=True)
"""
BEHIND_README = "out.float().square().mean().backward()\n"
# One file for each rank: what two ranks print to one pipe may come out mixed.
BEHIND_BOTH = """
from pathlib import Path
Path(f"{__file__}.{dist.get_rank()}").write_text(str(x.grad.isfinite().all().item()))
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def check_on_two_ranks(program: Path) -> None:
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(program)),
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stderr
    are_finite = [Path(f"{program}.{rank}").read_text() for rank in range(2)]
    assert are_finite == ["True", "True"]


def test_the_layer_of_the_package_page(tmp_path: Path) -> None:
    source = blocks(PACKAGE / "README.md", "python")[0]
    program = tmp_path / "program.py"
    program.write_text(source.replace("2048", "64") + BEHIND_BOTH)  # fewer tokens, less time
    check_on_two_ranks(program)


def test_the_layer_of_the_readme(tmp_path: Path) -> None:
    (source,) = (text for text in blocks(ROOT / "README.md", "python") if "MoEConfig" in text)
    program = tmp_path / "program.py"
    program.write_text(BEFORE_README + source + BEHIND_README + BEHIND_BOTH)
    check_on_two_ranks(program)


def test_the_configuration_of_the_deepspeed_page() -> None:
    (text,) = blocks(PACKAGE / "adapters" / "deepspeed" / "README.md", "json")
    assert read_settings(json.loads(text)).enabled
