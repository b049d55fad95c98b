"""How the library is built and put into a wheel, with small sources in place of csrc/."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import nvcc_build

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


@pytest.mark.timeout(600)  # compiles csrc/ where its objects are not in the cache
@pytest.mark.parametrize(
    ("skip", "tag"), [("0", "py3-none-linux_"), ("1", "py3-none-any")], ids=["library", "python"]
)
def test_wheel(tmp_path, monkeypatch, skip, tag):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(nvcc_build.ROOT / name, source)
    for name in ("csrc", "flashmoe_megatron", "tools"):
        shutil.copytree(
            nvcc_build.ROOT / name,
            source / name,
            ignore=shutil.ignore_patterns("*.so", "__pycache__"),
        )
    if nvcc_build.CACHE.is_dir():
        shutil.copytree(nvcc_build.CACHE, source / "build" / "nvcc")
    monkeypatch.setenv("FLASHMOE_SKIP_CUDA_BUILD", skip)
    monkeypatch.setenv("PYTHONPATH", str(nvcc_build.TOOLCHAIN))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"),
            *("--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, source),
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert tag in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert ("flashmoe_megatron/libflashmoe.so" in names) == (skip == "0")
    assert "flashmoe_megatron/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "tools", "examples", "csrc"))]
