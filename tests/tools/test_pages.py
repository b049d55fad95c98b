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


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_program_of_the_packages_page(tmp_path: Path) -> None:
    (source,) = (text for text in blocks(PACKAGE / "README.md", "python") if "MoEConfig" in text)
    program = tmp_path / "program.py"
    program.write_text(source.replace("2048", "64"))  # fewer tokens, less time
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
    for rank in range(2):
        said = rf"rank {rank} of 2: out \(64, 1024\), gradient norm of the router (\S+e-\d+)"
        (norm,) = re.findall(said, ran.stdout)
        assert float(norm) > 0
    assert "destroy_process_group" not in ran.stderr


def test_the_configuration_of_the_deepspeed_page() -> None:
    (text,) = blocks(PACKAGE / "adapters" / "deepspeed" / "README.md", "json")
    assert read_settings(json.loads(text)).enabled
