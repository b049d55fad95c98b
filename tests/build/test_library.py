"""The compiled library, on a machine that may have neither a GPU nor a driver."""

import ctypes
import dataclasses
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashmoe_megatron import config
from flashmoe_megatron.kernel import bindings
from tests.unit import native

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "csrc" / "include" / "flashmoe.h"
NUMBERS = {
    "char": ctypes.c_char,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
LOAD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
print(library.flashmoe_abi_version())
"""


@pytest.fixture(scope="module")
def library() -> Path:
    if not bindings.LIBRARY.is_file():
        pytest.fail(f"{bindings.LIBRARY} is not built: run python tools/build.py")
    return bindings.LIBRARY


def run(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True
    ).stdout


def header() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def declared_numbers() -> dict[str, int]:
    """Enumerators and macros, without their prefix."""
    found = re.findall(r"\bFLASHMOE_(\w+)(?: =)? (\d+)\b", header())
    return {name: int(number) for name, number in found}


def declared_fields() -> dict[str, list[tuple[str, type]]]:
    """The fields of every struct, in the form of its mirror's ``_fields_``."""
    numbers = declared_numbers()
    found: dict[str, list[tuple[str, type]]] = {}
    for body, struct in re.findall(r"typedef struct \{(.*?)\} (\w+);", header(), re.DOTALL):
        found[struct] = []
        for kind, name, length in re.findall(r"(\w[^;]*?)\s*(\w+)(?:\[(\w+)\])?;", body):
            mirror = mirror_of(kind)
            if length:
                count = numbers.get(length.removeprefix("FLASHMOE_"))
                mirror = mirror * (int(length) if count is None else count)
            found[struct].append((name, mirror))
    return found


def declared_signatures() -> dict[str, tuple[type, ...]]:
    """The types of every function, in the form of the binding's."""
    found = {}
    for result, name, arguments in re.findall(
        r"FLASHMOE_EXPORT\s+([^;(]*?)\s*flashmoe_(\w+)\((.*?)\);", header(), re.DOTALL
    ):
        kinds = re.findall(r"(\w[^,]*?)\s*\w+(?:,|$)", arguments) if arguments != "void" else []
        found[name] = tuple(map(mirror_of, [result, *kinds]))
    return found


def declared_functions() -> set[str]:
    return {f"flashmoe_{name}" for name in declared_signatures()}


def mirror_of(kind: str) -> type:
    """What the binding has for a type of the header."""
    if kind == "const char*":
        return ctypes.c_char_p
    if kind.endswith("*"):
        return ctypes.c_void_p
    return NUMBERS[kind] if kind in NUMBERS else getattr(bindings, kind)


def other_pythons() -> list[str]:
    """Every Python beside this one that is in PATH or that pyenv has."""
    names = ["python3.10", "python3.11", "python3.12", "python3.13"]
    found = [path for name in names if (path := shutil.which(name))]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return found + [str(path) for path in sorted(pyenv.glob("3.1[0-3].*/bin/python"))]


def test_is_no_older_than_its_sources(library):
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cu", ".cuh", ".h")]
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    assert library.stat().st_mtime >= newest.stat().st_mtime, f"{newest} is newer"


def test_exports_what_the_header_declares_and_nothing_else(library):
    symbols = run("nm", "-D", "--defined-only", library).splitlines()
    assert {line.split()[-1] for line in symbols} == declared_functions()


def test_needs_neither_driver_nor_cuda_nor_torch_nor_python(library):
    dynamic = run("readelf", "-d", library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert needed, dynamic
    system = re.compile(r"(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so\.\d+")
    assert [name for name in needed if not system.fullmatch(name.split("/")[-1])] in (
        [],
        ["ld-linux-x86-64.so.2"],
        ["ld-linux-aarch64.so.1"],
    )
    undefined = run("nm", "-D", "--undefined-only", library)
    assert not re.search(r"\b(cu[A-Z]|cuda|_Py|Py)\w+", undefined), undefined


def test_binding_loads_it_and_agrees_on_every_struct():
    library = bindings.load()
    assert library.flashmoe_abi_version() == bindings.ABI_VERSION
    for mirror in bindings._STRUCTS:
        assert library.flashmoe_sizeof(mirror.__name__.encode()) > 0


def test_binding_has_the_numbers_of_the_header():
    ours = {name: value for name, value in vars(bindings).items() if name.isupper()}
    ours = {name: value for name, value in ours.items() if isinstance(value, int)}
    ours |= {activation.name: number for activation, number in bindings.ACTIVATIONS.items()}
    ours["MAX_TOPK"] = config.MAX_TOPK
    assert ours == declared_numbers()


def test_binding_has_the_fields_of_the_header_in_their_order():
    assert {mirror.__name__: mirror._fields_ for mirror in bindings._STRUCTS} == declared_fields()


def test_binding_has_the_functions_of_the_header():
    assert declared_signatures() == bindings.SIGNATURES


GLU = [
    {"activation": activation, "gated": gated, **terms}
    for activation in config.Activation
    for gated in (True, False)
    for terms in (
        {},
        *({"clamp_value": value} for value in (7.0, -7.0, math.inf, math.nan)),
        *({"linear_offset": value} for value in (1.0, -1.0, math.inf, math.nan)),
        *({"glu_interleave": block} for block in (-8, 1, 2, 8, 32, 48, 64, 128, 192)),
    )
]


def test_it_takes_the_gated_experts_that_a_configuration_may_have():
    sizes = {"hidden": 64, "intermediate": 192, "num_experts": 8, "topk": 2, "num_ranks": 1}
    good = config.MoEConfig(**sizes, activation="silu", gated=True, max_tokens=64)
    accepted = []
    for form in GLU:
        problem = native.problem_of(good)
        problem.activation = bindings.ACTIVATIONS[form["activation"]]
        problem.is_gated = form["gated"]
        for name in form.keys() - {"activation", "gated"}:
            setattr(problem, name, form[name])
        refused_as_config = is_refused(lambda form=form: dataclasses.replace(good, **form))
        sizes_of = bindings.FlashMoESizes()
        refused = is_refused(lambda p=problem, s=sizes_of: bindings.call("sizes", p, s))
        assert refused == refused_as_config, form
        accepted.append(not refused)
    assert len(set(accepted)) == 2


@pytest.mark.parametrize("spare_slots", [0, 2])
def test_it_takes_either_type_alike(spare_slots: int):
    sizes = {"hidden": 64, "intermediate": 192, "num_experts": 8, "topk": 2, "num_ranks": 2}
    good = config.MoEConfig(**sizes, activation="silu", gated=True, max_tokens=64)
    found = []
    for dtype in (bindings.BFLOAT16, bindings.FLOAT16):
        problem = native.problem_of(good, dtype=dtype, spare_slots=spare_slots)
        found.append(native.sizes_of(problem))
    assert bytes(found[0]) == bytes(found[1])


def is_refused(make: Callable[[], object]) -> bool:
    try:
        make()
    except bindings.ConfigError:
        return True
    return False


def test_binding_refuses_another_version(library, tmp_path):
    source = tmp_path / "other.c"
    source.write_text(
        "".join(f"int {name}(void) {{ return 999; }}\n" for name in sorted(declared_functions()))
    )
    other = tmp_path / "libother.so"
    run("cc", "-shared", "-fPIC", source, "-o", other)
    with pytest.raises(bindings.DeviceError, match="999"):
        bindings.load(other)


def test_loads_under_every_python_at_hand(library):
    versions = {}
    for python in [sys.executable, *other_pythons()]:
        probe = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if probe.returncode:  # a shim of pyenv without a version behind it
            continue
        versions[probe.stdout.strip()] = run(python, "-c", LOAD, library).strip()
    assert versions
    assert set(versions.values()) == {str(bindings.ABI_VERSION)}
