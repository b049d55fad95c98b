"""How the library is built and put into a wheel, with small sources in place of csrc/."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import nvcc_build
from flashmoe_megatron import __version__
from tools.release.environments import STEP
from tools.release.wheel import ReleaseError, check

GOOD = """
#include "add.cuh"
__global__ void grow(int* value) { *value = add(*value, 1); }
extern "C" __attribute__((visibility("default"))) int flashmoe_answer(void) {
    grow<<<1, 1>>>(nullptr);
    return 42;
}
int hidden_from_the_outside(void) { return 0; }
"""
SPILLING = """
__global__ __launch_bounds__(1024, 2) void spill(float* x) {
    float held[96];
    for (int i = 0; i < 96; ++i) held[i] = x[i * 1024 + threadIdx.x];
    for (int k = 0; k < 96; ++k)
#pragma unroll
        for (int i = 0; i < 96; ++i) held[i] = held[i] * held[(i * 7 + 3) % 96] + x[k];
    for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = held[i];
}
"""
# Without launch bounds ptxas does not know how many registers there are to give away.
IGNORED_SETMAXNREG = """
__global__ void give(float* x) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    *x += 1;
}
"""


@pytest.fixture(scope="module", autouse=True)
def toolchain() -> None:
    try:
        nvcc_build.find_toolchain()
    except nvcc_build.BuildError as error:
        pytest.fail(str(error))


@pytest.fixture
def csrc(tmp_path, monkeypatch) -> Path:
    directory = tmp_path / "csrc"
    directory.mkdir()
    (directory / "add.cuh").write_text("__device__ int add(int a, int b) { return a + b; }\n")
    (directory / "good.cu").write_text(GOOD)
    monkeypatch.setattr(nvcc_build, "CSRC", directory)
    monkeypatch.setattr(nvcc_build, "CACHE", tmp_path / "cache")
    return directory


def built(directory: Path) -> set[str]:
    """The sources compiled by a build, not taken from the cache."""
    before = {path: path.stat().st_mtime_ns for path in nvcc_build.CACHE.glob("*.o")}
    objects = nvcc_build.build_library(directory / "libflashmoe.so")
    return {one.source for one in objects if one.path not in before}


def test_exports_only_the_c_interface(csrc, tmp_path):
    nvcc_build.build_library(tmp_path / "libflashmoe.so")
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", tmp_path / "libflashmoe.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["flashmoe_answer"]


def test_compiles_again_only_what_a_change_reaches(csrc, tmp_path):
    (csrc / "apart.cu").write_text("__global__ void apart() {}\n")
    assert built(tmp_path) == {"apart.cu", "good.cu"}
    assert built(tmp_path) == set()
    (csrc / "add.cuh").write_text("__device__ int add(int a, int b) { return b + a; }\n")
    assert built(tmp_path) == {"good.cu"}


def test_reports_resources_also_from_the_cache(csrc, tmp_path):
    for _ in range(2):
        objects = nvcc_build.build_library(tmp_path / "libflashmoe.so")
        (grow,) = nvcc_build.resources(objects)
        assert "grow" in grow.kernel
        assert grow.registers > 0
        assert grow.stack_bytes == 0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (SPILLING, "spill"),
        (IGNORED_SETMAXNREG, nvcc_build.PERFORMANCE_LOSS),
        ("this is not C++\n", "error"),
        ('extern "C" int cuInit(unsigned);\nint use() { return cuInit(0); }\n', "cuInit"),
    ],
    ids=["spill", "setmaxnreg", "syntax", "libcuda"],
)
def test_refuses(csrc, tmp_path, source, said):
    (csrc / "bad.cu").write_text(source)
    target = tmp_path / "libflashmoe.so"
    with pytest.raises(nvcc_build.BuildError) as caught:
        nvcc_build.build_library(target)
    assert said in str(caught.value)
    assert not target.exists()


def test_names_the_way_out_when_there_is_no_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(nvcc_build.BuildError, match=f"CUDA_HOME={tmp_path}"):
        nvcc_build.find_toolchain()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nvcc_build, "_packaged_cuda", lambda: None)
    with pytest.raises(nvcc_build.BuildError, match="FLASHMOE_SKIP_CUDA_BUILD"):
        nvcc_build.find_toolchain()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Makes a copy of the files that a build reads."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in"):
        shutil.copy(nvcc_build.ROOT / name, folder)
    for name in ("README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(nvcc_build.ROOT / name, folder)
    for name in ("csrc", "flashmoe_megatron", "tools"):
        shutil.copytree(
            nvcc_build.ROOT / name,
            folder / name,
            ignore=shutil.ignore_patterns("*.so", "__pycache__"),
        )
    return folder


def make_wheel(source: Path, out: Path) -> Path:
    """Builds a wheel of a folder or of a source distribution, with what is installed here."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"),
            *("--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", out, source),
        ],
        check=True,
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return {name for name in opened.namelist() if ".dist-info/" not in name}


@pytest.mark.timeout(600)  # compiles csrc/ where its objects are not in the cache
def test_one_wheel_for_every_python(source, tmp_path, monkeypatch):
    if nvcc_build.CACHE.is_dir():
        shutil.copytree(nvcc_build.CACHE, source / "build" / "nvcc")
    monkeypatch.setenv("FLASHMOE_SKIP_CUDA_BUILD", "0")
    monkeypatch.setenv("PYTHONPATH", str(nvcc_build.TOOLCHAIN))
    wheel = make_wheel(source, tmp_path)
    assert wheel.name.startswith(f"flashmoe_megatron-{__version__}-py3-none-linux_")
    names = names_in(wheel)
    assert {"flashmoe_megatron/libflashmoe.so", "flashmoe_megatron/py.typed"} <= names
    assert all(name.startswith("flashmoe_megatron/") for name in names)
    check(wheel)
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (glibc,) = re.findall(r'is consistent with\s+the following platform tag:\s+"(\w+)"', shown)
    assert glibc in ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64"), shown
    use_wheel(wheel, tmp_path / "used")


def use_wheel(wheel: Path, folder: Path) -> None:
    """Trains a layer with a wheel's package in an environment that has the tests' torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    here = Path(torch.__file__).parents[1]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
            *("--no-deps", "--no-cache-dir", "--target", packages, wheel),
        ],
        check=True,
    )
    # Folders on PYTHONPATH come before those of .pth files, where the checkout is named.
    environment = {**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{here}"}
    done = subprocess.run(
        [python, "-c", STEP], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert str(packages) in done.stdout


def test_a_build_without_the_kernel_says_so_in_its_version(source, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHMOE_SKIP_CUDA_BUILD", "1")
    wheel = make_wheel(source, tmp_path)
    assert wheel.name == f"flashmoe_megatron-{__version__}+nokernel-py3-none-any.whl"
    with pytest.raises(ReleaseError, match=r"has no flashmoe_megatron/libflashmoe\.so"):
        check(wheel)


def test_wheel_and_sources_give_the_same_files(source, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHMOE_SKIP_CUDA_BUILD", "1")
    from_checkout = make_wheel(source, tmp_path / "checkout")
    command = "from setuptools import build_meta; build_meta.build_sdist('made')"
    (source / "made").mkdir()
    subprocess.run([sys.executable, "-c", command], cwd=source, check=True, capture_output=True)
    (sources,) = (source / "made").glob("*.tar.gz")
    assert sources.name == f"flashmoe_megatron-{__version__}.tar.gz"
    assert names_in(make_wheel(sources, tmp_path / "sources")) == names_in(from_checkout)
    with tarfile.open(sources) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    compiled = {
        str(path.relative_to(nvcc_build.ROOT))
        for path in nvcc_build.CSRC.rglob("*")
        if path.is_file()
    }
    assert compiled <= held
    assert {"CHANGELOG.md", "LICENSE", "tools/nvcc_build.py", "tools/toolchain.txt"} <= held


@pytest.mark.parametrize("skip", ["0", "1"])
def test_a_compiler_is_fetched_only_where_it_is_used(source, monkeypatch, skip):
    shutil.rmtree(source / "build", ignore_errors=True)
    monkeypatch.setenv("FLASHMOE_SKIP_CUDA_BUILD", skip)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name in ("CUDA_HOME", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    program = """
import json, sys
sys.path = [each for each in sys.path if "site-packages" in each or "python3" in each]
from importlib.machinery import PathFinder
found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: (
    None if name in ("nvidia", "cutlass_library") else found(name, *rest)
)
from setuptools import build_meta
json.dump(build_meta.get_requires_for_build_wheel(), open("asked.json", "w"))
"""
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    asked = json.loads((source / "asked.json").read_text())
    pins = [line for line in nvcc_build.PINS.read_text().splitlines() if "==" in line]
    assert len(pins) == 6
    assert asked == ([] if skip == "1" else pins)


def test_an_index_gets_no_link_into_the_checkout(source, monkeypatch):
    monkeypatch.setenv("FLASHMOE_SKIP_CUDA_BUILD", "1")
    command = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('.')"
    subprocess.run([sys.executable, "-c", command], cwd=source, check=True, capture_output=True)
    (metadata,) = source.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    assert "pip install" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert all(link.startswith(("https://", "#")) for link in links), links
