"""The fuzzing targets on drawn bytes, on the committed inputs, and for seconds under libFuzzer.

Longer: ``python -m tests.fuzz.guided TARGET --seconds 3600``.
"""

import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nvcc_build
from flashmoe_megatron.kernel import bindings
from tests.fuzz import c_interface, seeds
from tests.fuzz.guided import ROOT
from tests.fuzz.seeds import TARGETS

SECONDS = int(os.environ.get("FLASHMOE_FUZZ_SECONDS", "12"))
EXAMPLES = int(os.environ.get("FLASHMOE_FUZZ_EXAMPLES", "400"))


@functools.cache
def target(name: str) -> ModuleType:
    if name == "c_interface" and not bindings.library_path().is_file():
        pytest.fail(f"{bindings.library_path()} is not built: run python tools/build.py")
    return importlib.import_module(f"tests.fuzz.{name}")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is accepted must not reach a GPU: buffers are not on one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.binary(max_size=200))
def test_drawn_bytes(name: str, data: bytes):
    target(name).exercise(data)


@pytest.mark.parametrize("name", TARGETS)
def test_committed_inputs(name: str, capfd: pytest.CaptureFixture[str]):
    """Each once led to code that none before it had led to."""
    outcomes = {target(name).exercise(data).split(":")[0] for data in seeds.read(name)}
    everything = c_interface._CALLS if name == "c_interface" else target(name)._TARGETS
    assert outcomes == set(everything), "some target is reached by none of them"
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", ""), "the library or the parsers print"


@pytest.mark.parametrize("name", TARGETS)
def test_an_archive_is_what_its_inputs_make_it(name: str, tmp_path: Path):
    seeds.unpack(name, tmp_path / "inputs")
    again = tmp_path / "again.zip"
    seeds.pack(again, [path.read_bytes() for path in (tmp_path / "inputs").iterdir()])
    assert again.read_bytes() == seeds.archive_of(name).read_bytes()
    assert len(seeds.read(name)) == len(list((tmp_path / "inputs").iterdir())) > 50


def test_a_good_problem_is_accepted():
    """Else the target would only ever see its first check."""
    assert c_interface.exercise(bytes(300)) == "sizes"
    for function in ("plan", "forward", "gather", "backward"):
        index = list(c_interface._CALLS).index(function)
        outcome = c_interface.exercise(bytes([index]) + bytes(300))
        assert "launch: " in outcome, outcome  # as far as it gets without a GPU
    settle, slots, experts, elements = 16, 15, 16, 17  # the function, and the problem's fields
    with_slots = [settle, 0, 3, slots, 0, 0, 1, experts, 0, 0, 8, elements, 0, 2, 3, 0, 0, 0, 1, 0]
    outcome = c_interface.exercise(bytes(with_slots) + bytes(300))
    assert outcome.startswith("settle: launch that settles on replicas: "), outcome


@pytest.mark.parametrize(
    "changes",
    [{}, c_interface.IN_FP8, c_interface.IN_FP8_DGRAD],
    ids=["as given", "in FP8", "backwards in FP8, too"],
)
@pytest.mark.parametrize(
    "kind", ["overflowing heap", "small plan", "wrong blocks", "other workspace"]
)
def test_the_model_of_sizes_notices(kind: str, changes: dict[str, Any]):
    fields = dict(c_interface.GOOD_PROBLEM) | changes
    problem = bindings.FlashMoEProblem(
        **{name: fields[name] for name, _ in bindings.FlashMoEProblem._fields_[1:]}
    )
    sizes = bindings.FlashMoESizes()
    bindings.call("sizes", problem, sizes)
    c_interface.check_sizes(fields, sizes)
    if kind == "overflowing heap":
        sizes.heap_bytes %= 2**14
    elif kind == "small plan":
        sizes.plan_bytes //= 2
    elif kind == "other workspace":
        sizes.workspace_bytes += 4
    else:
        sizes.max_row_blocks -= 1
    with pytest.raises(c_interface.ContractError):
        c_interface.check_sizes(fields, sizes)


@pytest.fixture(scope="session")
def library_with_coverage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library whose host code tells its branches; only that is compiled anew."""
    if "FLASHMOE_LIBRARY" in os.environ:
        return bindings.library_path()
    variant = nvcc_build.VARIANTS["coverage"]
    path = tmp_path_factory.mktemp("coverage") / variant.library
    nvcc_build.build_library(path, variant=variant)
    return path


@pytest.mark.timeout(SECONDS + 200)
@pytest.mark.parametrize("name", TARGETS)
def test_guided(name: str, request: pytest.FixtureRequest, tmp_path: Path):
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris has no wheel for this Python or platform")
    environment = dict(os.environ)
    if name == "c_interface":
        environment["FLASHMOE_LIBRARY"] = str(request.getfixturevalue("library_with_coverage"))
    run = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.guided", name),
            *("--seconds", str(SECONDS), "--corpus", str(tmp_path)),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS + 120,
        check=False,
    )
    log = run.stdout + run.stderr
    assert run.returncode == 0, log[-4000:]
    if name == "c_interface":
        assert "the library tells its coverage" in log
    inputs = int(re.findall(r"stat::number_of_executed_units:\s*(\d+)", log)[-1])
    assert inputs >= len(seeds.read(name)), "every run begins with the committed inputs"
