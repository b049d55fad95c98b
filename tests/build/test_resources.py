"""The table of what every kernel takes: made from what is built, and kept up to date."""

from pathlib import Path

import pytest

import nvcc_build
import resource_table

SOURCE = """
namespace flashmoe {
struct Args { int* at; };
enum Kind { kZero, kOne };
template <Kind kKind, class T> __global__ void grow(Args args) {
    __shared__ int held[256];
    held[threadIdx.x] = args.at[threadIdx.x];
    __syncthreads();
    args.at[threadIdx.x] = held[255 - threadIdx.x] + int(sizeof(T)) + kKind;
}
template __global__ void grow<kOne, float>(Args);
}
extern "C" __attribute__((visibility("default"))) int flashmoe_answer(void) { return 42; }
"""
PROBE = '#include <cstdio>\n#include "size.cuh"\nint main() { std::printf("grow %d\\n", SIZE); }\n'


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "csrc"
    directory.mkdir()
    (directory / "grow.cu").write_text(SOURCE)
    (directory / "size.cuh").write_text("#define SIZE 4096\n")
    (tmp_path / "probe.cu").write_text(PROBE)
    monkeypatch.setattr(nvcc_build, "CSRC", directory)
    monkeypatch.setattr(nvcc_build, "CACHE", tmp_path / "cache")
    for probe in ("PROBE", "PROBE_IN_FP8", "PROBE_NARROW_TILES"):
        monkeypatch.setattr(resource_table, probe, tmp_path / "probe.cu")
    return directory


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_table_of_one_kernel_also_from_the_cache(csrc: Path, tmp_path: Path) -> None:
    tables = []
    for _ in range(2):
        objects = nvcc_build.build_library(tmp_path / "libflashmoe.so")
        tables.append(resource_table.render(objects))
    assert tables[0] == tables[1]
    assert resource_table.release() in tables[0]
    ((name, registers, static, dynamic, spilled, stack),) = rows(tables[0])
    assert name == "`grow<1, float>`"
    assert 0 < int(registers) < 64
    assert int(static) >= 1024
    assert (dynamic, spilled, stack) == ("4096", "0", "0")

    (csrc / "size.cuh").write_text("#define SIZE 8192\n")
    changed = resource_table.render(nvcc_build.build_library(tmp_path / "libflashmoe.so"))
    assert rows(changed)[0][3] == "8192"


def test_reads_spills() -> None:
    log = (
        "ptxas info    : Compiling entry function '_Z5spillPf' for 'sm_90a'\n"
        "ptxas info    : Function properties for _Z5spillPf\n"
        "    384 bytes stack frame, 632 bytes spill stores, 904 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 1 barriers, 384 bytes cumulative stack size\n"
    )
    (found,) = nvcc_build.resources([nvcc_build.Object("spill.cu", Path("spill.o"), log)])
    assert (found.registers, found.stack_bytes, found.spilled_bytes) == (32, 384, 632 + 904)


def test_refuses_a_probe_that_does_not_compile(csrc: Path) -> None:
    (csrc / "size.cuh").unlink()
    with pytest.raises(nvcc_build.BuildError, match=r"size\.cuh"):
        nvcc_build.run_probe(resource_table.PROBE)


@pytest.mark.timeout(900)  # compiles csrc/ where its objects are not in the cache
def test_committed_table_is_what_is_built(tmp_path: Path) -> None:
    update = "run python tools/build.py --resources"
    if not resource_table.TABLE.is_file():
        pytest.fail(f"{resource_table.TABLE.name} is missing: {update}")
    committed = resource_table.TABLE.read_text()
    if resource_table.release() not in committed:
        pytest.skip(f"the table is of another compiler than {resource_table.release()}")
    built = resource_table.render(nvcc_build.build_library(tmp_path / "libflashmoe.so"))
    assert committed == built, f"{resource_table.TABLE.name} is out of date: {update}"
    for name, _, _, _, spilled, stack in rows(committed):
        # A forward's plan of replicas lacks some registers, and in FP8 finishers lack one.
        most = {"`with_slots": 128, "`in_fp8": 8}.get(name.partition("::")[0], 0)
        assert max(int(spilled), int(stack)) <= most, name
