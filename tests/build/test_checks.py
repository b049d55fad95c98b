"""The project's own checks find what they are there to find."""

import re

import pytest

import check_layers
import nvcc_build

ROOT = nvcc_build.ROOT


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"flashmoe/tile/gemm.cuh": '#include "flashmoe/ptx/wgmma.cuh"\n'}, []),
        ({"flashmoe/ptx/wgmma.cuh": '#include "flashmoe/tile/gemm.cuh"\n'}, ["'ptx'", "'tile'"]),
        ({"flashmoe/comm/heap.cuh": "#include <flashmoe/api.h>\n"}, []),  # no file of ours
        ({"flashmoe/base/shape.cuh": '#include "api/flashmoe.h"\n'}, []),
        ({"flashmoe/base/shape.cuh": '#include "../ptx/wgmma.cuh"\n'}, ["'base'", "'ptx'"]),
        ({"flashmoe/news/x.cuh": '#include "flashmoe/ptx/wgmma.cuh"\n'}, ["'news'", "no layer"]),
    ],
)
def test_layers_of_csrc(tmp_path, files, found):
    rest = {"flashmoe/ptx/wgmma.cuh": "", "flashmoe/tile/gemm.cuh": "", "api/flashmoe.h": ""}
    write(tmp_path, rest | files)
    lines = list(check_layers.violations(check_layers.csrc_edges(tmp_path), check_layers.CSRC))
    assert bool(lines) == bool(found)
    assert all(part in lines[0] for part in found)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"layer.py": "from flashmoe_megatron.config import MoEConfig\n"}, []),
        ({"__init__.py": "from flashmoe_megatron.layer import FlashMoELayer\n"}, []),
        ({"config.py": "import flashmoe_megatron.layer\n"}, ["'config'", "'layer'"]),
        (
            {"config.py": "def late():\n    from flashmoe_megatron import layer\n"},
            ["'config'", "'layer'"],
        ),
        (
            {"kernel/ops.py": "from flashmoe_megatron.reference import rows\n"},
            ["'kernel'", "'reference'"],
        ),
        ({"kernel/ops.py": "from flashmoe_megatron.kernel import tables\n"}, ["'ops'", "'tables'"]),
        ({"kernel/ops.py": "from flashmoe_megatron.kernel import bindings\n"}, []),
        ({"news.py": "from flashmoe_megatron import config\n"}, ["'news'", "no layer"]),
    ],
)
def test_layers_of_the_package(tmp_path, files, found):
    root = tmp_path / "flashmoe_megatron"
    write(root, files)
    lines = [
        *check_layers.violations(check_layers.python_edges(root), check_layers.PYTHON),
        *check_layers.violations(check_layers.python_edges(root, "kernel"), check_layers.KERNEL),
    ]
    assert bool(lines) == bool(found)
    assert all(part in lines[0] for part in found)


def test_hooks_use_the_versions_of_the_extra_dev():
    pins = r"(ruff|clang-format|codespell)==([\d.]+)"
    hooks = set(re.findall(pins, (ROOT / ".pre-commit-config.yaml").read_text()))
    assert hooks == set(re.findall(pins, (ROOT / "pyproject.toml").read_text()))
    assert len(hooks) == 3


def test_readme_begins_with_the_two_commands():
    blocks = re.findall(r"```\w*\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks[:2] == ["bash examples/pretrain_moe.sh\n", "bash tests/run.sh\n"]
