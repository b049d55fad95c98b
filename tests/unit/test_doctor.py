"""The doctor: its screen, its JSON and its exit status, on machines of many kinds."""

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_megatron import __main__ as doctor
from flashmoe_megatron.autoload import VARIABLE
from flashmoe_megatron.doctor import attention, installed, machine, trial
from flashmoe_megatron.doctor.fact import WIDTH, Fact, as_json, as_screen
from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.hosts.grid import HOST_VARIABLE
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.measured import reach
from flashmoe_megatron.releases import DEEPSPEED, FRAMEWORKS, MEGATRON, TORCH, Project
from tests.distributed import PATIENCE_S
from tests.ending.stand_in import FORKED_FROM

ROOT = Path(__file__).parents[2]
PROGRAM = ("-m", "flashmoe_megatron")
WITHOUT_TORCH = """
import sys
sys.path.insert(0, {root!r})
from flashmoe_megatron.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_layer_runs_without_a_gpu() -> None:
    done = run(*PROGRAM, "--json", "--require", "kernel")
    answer = json.loads(done.stdout)
    assert answer["bf16_layer"]["backend"] == "reference"
    assert 0 < answer["bf16_layer"]["rel_l2"] < trial.REL_L2
    assert answer["gpus"] == []
    assert answer["software"]["torch"] == torch.__version__
    assert (done.returncode, answer["status"]) == (doctor.NO_KERNEL, doctor.NO_KERNEL)
    sentence = "wanted the kernel: the layer ran on the backend reference, since the kernel needs"
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_two_ranks_run_a_layer_and_one_prints(with_torch: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(*launcher, *PROGRAM, **{FORKED_FROM: str(with_torch)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bf16 layer") == 1
    assert "forward and backward on 2 ranks by the backend reference" in done.stdout
    assert "hosts compute" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= WIDTH


ON_TWO_HOSTS = """
import os, runpy
os.environ["FLASHMOE_HOST_ID"] = os.environ["RANK"]
runpy.run_module("flashmoe_megatron", run_name="__main__")
"""


def test_rows_of_two_hosts_are_told(tmp_path: Path, with_torch: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    program = tmp_path / "on_two_hosts.py"
    program.write_text(ON_TWO_HOSTS)
    path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    done = run(*launcher, str(program), PYTHONPATH=path, **{FORKED_FROM: str(with_torch)})
    assert done.returncode == 0, done.stderr
    said = re.search(r"2 hosts compute (\d+), (\d+) rows; the busiest has (1\.\d\d)", done.stdout)
    assert said is not None, done.stdout
    rows = [int(said[1]), int(said[2])]
    assert sum(rows) == 2 * trial.TOKENS * trial.TOPK
    assert float(said[3]) == pytest.approx(max(rows) / (sum(rows) / 2), abs=0.01)


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["screen", "json"])
def test_torch_is_missing(form: list[str]) -> None:
    done = run("-S", "-c", WITHOUT_TORCH.format(root=str(ROOT)), *form)
    assert done.returncode == doctor.BROKEN, done.stderr
    assert "torch is not installed: wanted 2.11 and newer" in done.stdout
    assert "Traceback" not in done.stderr


def test_torch_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    done = run(*PROGRAM, PYTHONPATH=str(tmp_path))
    assert done.returncode == doctor.BROKEN, done.stderr
    assert "its import fails: libcudart.so.13: cannot open" in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("broken.so", b"no library", "it is no shared library"),
        ("cut.so", b"\x7fELF" + bytes(36) + b"\xff" + bytes(60), "bytes of 255 are there"),
    ],
)
def test_a_broken_library_is_a_broken_installation(
    name: str,
    content: bytes,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(content)
    monkeypatch.setenv(bindings.LIBRARY_VARIABLE, str(tmp_path / name))
    bindings.load.cache_clear()
    try:
        assert doctor.main([]) == doctor.BROKEN
    finally:
        bindings.load.cache_clear()
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("path", "is_broken"), [("/nowhere/libflashmoe.so", False), ("relative.so", True)]
)
def test_a_missing_library_is_no_broken_one(
    path: str, is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(bindings.LIBRARY_VARIABLE, path)
    bindings.load.cache_clear()
    fact = machine.library()
    bindings.load.cache_clear()
    assert fact.is_broken == is_broken
    assert fact.value["loads"] is False


def test_a_wrong_result_is_a_broken_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "REL_L2", 1e-9)
    fact = trial.layer()
    assert fact.is_broken
    assert "a bf16 layer computes wrong values: the output: relative L2 error" in fact.problem


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch report two GPUs, of which the second cannot reach the first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: one < two)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fact = machine.peer_access()
    sentence = "GPU 1 cannot reach the memory of GPU 0: layers over both cannot run on the kernel"
    assert fact.value == {"unreachable": [[1, 0]]}
    assert fact.problem.startswith(sentence)
    layer = Fact("bf16_layer", {"backend": "kernel"}, "")
    assert doctor._lack_of_kernel([fact, layer]).startswith(sentence)
    with pytest.raises(DeviceError, match=sentence):
        reach.check_peers("kernel", 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    assert machine.peer_access().problem == ""
    reach.check_peers("kernel", 2)
    assert doctor._lack_of_kernel([machine.peer_access(), layer]) == ""


class Driver:
    """Stands for libcuda and NVML of some driver."""

    def __init__(self, cuda: int, release: bytes) -> None:
        self.cuda, self.release = cuda, release

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.cuda
        return 0

    def nvmlInit_v2(self) -> int:
        return 0 if self.release else 9

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self, name: Any, size: object) -> int:
        name.value = self.release
        return 0


@pytest.mark.parametrize(
    ("cuda", "release", "problem"),
    [
        (13000, b"580.65.06", ""),
        (13010, b"", ""),
        (12080, b"570.86.15", "the driver 570.86.15 runs CUDA up to 12.8: the kernel needs CUDA "),
    ],
)
def test_a_driver_is_new_enough(
    cuda: int, release: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(cuda, release))
    fact = installed.driver()
    assert fact.value["release"] == (release.decode() or None)
    assert fact.value["cuda"] == f"{cuda // 1000}.{cuda % 1000 // 10}"
    assert fact.problem.startswith(problem)
    assert bool(fact.problem) == bool(problem)


ANSWER = 'import sys; print("noise\\n{mark}" + {answer!r}); sys.exit(1)'


@pytest.mark.parametrize(
    ("chosen", "cudnn", "problem"),
    [
        (["cudnn"], ["/a"], ""),
        (["cudnn"], ["/a", "/b"], ""),
        (["unfused"], ["/a", "/b"], "unfused: cuDNN is loaded from /a and /b, wanted one cuDNN"),
        (["unfused"], ["/a"], "wanted one cuDNN, and fused attention; it says: no such plan"),
        ([], ["/a"], "unknown: wanted one cuDNN"),
    ],
)
def test_attention_that_is_unfused_is_a_problem(
    chosen: list[str],
    cudnn: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasons = ["no such plan"] if chosen == ["unfused"] else []
    answer = json.dumps({"chosen": chosen, "reasons": reasons, "cudnn": cudnn})
    (tmp_path / "asked.py").write_text(ANSWER.format(mark=attention.MARK, answer=answer))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(installed.metadata, "version", lambda name: "2.9.0")
    ask = attention.ask
    monkeypatch.setattr(attention, "ask", lambda: ask("asked"))
    fact = attention.attention(has_gpu=True)
    assert (fact.value["chosen"], fact.value["cudnn"]) == (chosen, cudnn)
    assert fact.value["is_fused"] == (not problem)
    assert fact.text.endswith("cuDNN is loaded from /a and /b") == (len(cudnn) > 1)
    assert problem in fact.problem
    assert bool(fact.problem) == bool(problem)


def test_transformer_engine_that_crashes_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asked.py").write_text("import os; os.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert attention.ask("asked") == (None, "it ended with status -6")


TRANSFORMER_ENGINE = """
import importlib
import logging
import os

import torch

def get_attention_backend(shapes):
    # Transformer Engine's logger speaks at this level if both variables are set.
    logging.getLogger("DotProductAttention").setLevel(
        10 if (os.environ["NVTE_DEBUG"], os.environ["NVTE_DEBUG_LEVEL"]) == ("1", "2") else 30
    )
    logging.getLogger("DotProductAttention").debug("Disabling FusedAttention: got %s", shapes)
    return False, None, False, None, True, []

class DotProductAttention(torch.nn.Module):
    def __init__(self, heads, width, *, num_gqa_groups, attn_mask_type, qkv_format):
        super().__init__()
        assert (attn_mask_type, qkv_format) == ("causal", "sbhd")
        self.shapes = [[heads, width], [num_gqa_groups, width], [num_gqa_groups, width]]

    def forward(self, *rows):
        utils = importlib.import_module(f"{__name__}.attention.dot_product_attention.utils")
        for _ in range(2):
            utils.get_attention_backend([list(row.shape) for row in rows])
        assert all(row.dtype == torch.bfloat16 for row in rows)
        assert [list(row.shape[2:]) for row in rows] == self.shapes
        return rows[0] * sum(row.mean() for row in rows[1:])
"""


def test_the_call_is_one_of_a_training(tmp_path: Path) -> None:
    """It has long rows and groups of heads, goes forward and backward, and tells reasons."""
    folder = tmp_path / "transformer_engine" / "pytorch"
    module = folder / "attention" / "dot_product_attention" / "utils.py"
    module.parent.mkdir(parents=True)
    (folder / "__init__.py").write_text(TRANSFORMER_ENGINE)
    module.write_text("from transformer_engine.pytorch import get_attention_backend\n")
    program = f"from {attention.__name__} import call_attention; print(call_attention('cpu'))"
    done = run("-c", program, PYTHONPATH=f"{tmp_path}:{ROOT}", **attention.REASONS)
    rows = [4096, 1, 8, 128], [4096, 1, 2, 128], [4096, 1, 2, 128]
    wanted = {"chosen": ["unfused"], "reasons": [f"Disabling FusedAttention: got {list(rows)}"]}
    assert (done.stdout, done.stderr) == (f"{wanted}\n", "")


def test_folders_of_cudnn() -> None:
    maps = "\n".join(
        f"7f00-7f01 r-xp 00000000 08:01 12 {path}"
        for path in ("/a/libcudnn.so.9", "/a/libcudnn_ops.so.9", "/my b/libcudnn.so.9", "/a/libc")
    )
    assert attention.folders_of_cudnn(maps) == ["/a", "/my b"]


def test_variables_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {VARIABLE, HOST_VARIABLE, bindings.LIBRARY_VARIABLE} <= set(installed.VARIABLES)
    for name in installed.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    fact = installed.environment()
    assert fact.value == {"NCCL_MAX_CTAS": "8"}
    assert fact.text.startswith("NCCL_MAX_CTAS=8: ")


@pytest.mark.parametrize(
    ("project", "version", "words"),
    [
        (
            TORCH,
            "2.7.0+cu126",
            "torch 2.7.0+cu126 is older than the tested releases 2.11 and",
        ),
        (TORCH, "2.11.0a0+nv", ""),
        (TORCH, "3.0", ""),
        (MEGATRON, "0.16.0", "Megatron-Core 0.16.0 is older than the tested releases 0.16.1 to 0."),
        (MEGATRON, "0.20.0rc1", ""),
        (MEGATRON, "0.21.0", "Megatron-Core 0.21.0 is newer than the tested releases 0.16.1 to 0."),
        (DEEPSPEED, "0.19.9", "DeepSpeed 0.19.9 is newer than the tested releases 0.19.5 to 0.19."),
    ],
)
def test_releases_outside_of_the_range_are_named(
    project: Project, version: str, words: str
) -> None:
    problem = project.problem(version) or ""
    assert problem.startswith(words)
    assert bool(problem) == bool(words)


def test_ranges_are_those_of_the_extras() -> None:
    """What pip installs for an extra lies within the tried range."""
    metadata = (ROOT / "pyproject.toml").read_text()
    (torch_wanted,) = re.findall(r'^dependencies = .*"torch>=([\d.]+)"', metadata, re.M)
    assert TORCH.problem(torch_wanted) is None
    for project in FRAMEWORKS:
        found = re.search(
            rf'^{project.extra} = \[\s*"{project.distribution}>=([\d.]+),<([\d.]+)"', metadata, re.M
        )
        assert found is not None
        oldest, too_new = found.groups()
        assert tuple(map(int, oldest.split("."))) == project.oldest
        *same, last = project.newest or ()
        assert tuple(map(int, too_new.split("."))) == (*same, last + 1)


def test_a_screen_shows_what_is_wrong_last(capsys: pytest.CaptureFixture[str]) -> None:
    facts = [Fact("one", 1, "first\nsecond"), Fact("longer_name", 2, "x " * 100, "It is wrong.")]
    lines = as_screen(facts).splitlines()
    assert lines[:2] == ["one          first", "             second"]
    assert lines[2].startswith("longer name  x x")
    assert lines[-2:] == ["", "! It is wrong."]
    assert max(map(len, lines)) <= WIDTH
    assert as_json(facts) == {"one": 1, "longer_name": 2, "problems": ["It is wrong."]}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: None, "the driver shows none to this process"),
        (lambda: 1 / 0, ""),
    ],
)
def test_a_torch_that_sees_no_gpu_says_why(
    make: Callable[[], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.gpus(has_driver=False).problem == ""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in machine.gpus(has_driver=True).problem
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if words:
        monkeypatch.setattr(torch.cuda, "init", make)
        assert words in machine.gpus(has_driver=True).problem


def make_installation(folder: Path, version: str, url: str | None = None) -> Path:
    info = folder / f"flashmoe_megatron-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: flashmoe-megatron\nVersion: {version}\n")
    if url is not None:
        said = {"url": url, "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(said))
    return folder


def test_two_installations_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_installation(tmp_path / "one", "0.2.0", ROOT.as_uri())
    monkeypatch.setattr(sys, "path", [str(one)])
    fact = installed.installation()
    assert (fact.value, fact.problem) == (str(ROOT / "flashmoe_megatron"), "")
    two = make_installation(tmp_path / "two", "0.1.0")
    monkeypatch.setattr(sys, "path", [str(one), str(two)])
    problem = installed.installation().problem
    assert problem.startswith(f"2 installations are found: 0.2.0 of {ROOT}, 0.1.0 of {two}; pip")
    monkeypatch.setattr(sys, "path", [str(two)])
    hidden = f"{ROOT / 'flashmoe_megatron'} is loaded, which hides the installation 0.1.0 of {two}"
    assert installed.installation().problem.startswith(hidden)
