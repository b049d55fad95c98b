"""What pages tell users to write works as it stands there."""

import json
import re
from pathlib import Path

import pytest

from flashmoe_megatron.adapters.deepspeed.settings import read_settings
from tests.programs import ROOT, run_python

PACKAGE = ROOT / "flashmoe_megatron"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_program_of_the_packages_page(tmp_path: Path) -> None:
    (source,) = (text for text in blocks(PACKAGE / "README.md", "python") if "MoEConfig" in text)
    program = tmp_path / "program.py"
    program.write_text(source.replace("2048", "64"))  # fewer tokens, less time
    ran = run_python(program, ranks=2)
    for rank in range(2):
        said = rf"rank {rank} of 2: out \(64, 1024\), gradient norm of the router (\S+e-\d+)"
        (norm,) = re.findall(said, ran.stdout)
        assert float(norm) > 0
    assert "destroy_process_group" not in ran.stderr


def test_the_program_of_the_deepspeed_page(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    page = PACKAGE / "adapters" / "deepspeed" / "README.md"
    (config,), (program, *_) = blocks(page, "json"), blocks(page, "python")  # then parts of loops
    assert read_settings(json.loads(config)).enabled
    (tmp_path / "ds_config.json").write_text(config)
    (tmp_path / "program.py").write_text(program)
    ran = run_python("program.py", ranks=2, folder=tmp_path, DS_ACCELERATOR="cpu")
    assert ran.stdout.count("flashmoe: backend reference, 1 of 1 MoE layers\n") == 1
    assert ran.stdout.count("{'moe': 'fused, backend reference'}") == 2


@pytest.mark.parametrize("part", ["hosts", "multipath", "replicas", "separate"])
def test_pages_begin_with_when_to_use_a_part_and_end_with_figures(part: str) -> None:
    page = (PACKAGE / part / "README.md").read_text()
    parts = re.split(r"^## (.*)\n", page, flags=re.MULTILINE)
    titles, texts = parts[1::2], parts[2::2]
    wanted = ["When to use it", "What it is", "How to use it", "What it gives", "Figures"]
    assert titles == wanted
    assert [line[:2] for line in texts[0].strip().splitlines()] == 5 * ["- "]
