"""What is loaded comes from the package or from where it is told to; nothing is written there."""

import ast
import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.kernel import bindings
from tests.distributed import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "flashmoe_megatron"

MARKED = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void loaded(void) {
    FILE* mark = fopen(getenv("MARK"), "w");
    if (mark) fclose(mark);
}
int flashmoe_abi_version(void) { return 4711; }
"""


@pytest.fixture
def library() -> None:
    if not bindings.LIBRARY.is_file():
        pytest.fail(f"{bindings.LIBRARY} is not built: run python tools/build.py")


def load(**changes: str | None) -> str:
    """Loads the library in a process of its own and returns which file it was, or the error."""
    program = """
import sys
from flashmoe_megatron.kernel import bindings
try:
    bindings.load()
except bindings.DeviceError as error:
    print("DeviceError:", error)
else:
    with open("/proc/self/maps") as maps:
        print(*{line.split()[-1] for line in maps if "flashmoe" in line and ".so" in line})
"""
    environment = {name: value for name, value in os.environ.items() if name != "FLASHMOE_LIBRARY"}
    environment["PYTHONPATH"] = str(ROOT)
    directory = changes.pop("directory", None)
    environment.update({name: value for name, value in changes.items() if value is not None})
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Makes a folder with a library of our name that tells when it is loaded."""
    source = tmp_path / "planted.c"
    source.write_text(MARKED)
    subprocess.run(
        ["cc", "-shared", "-fPIC", source, "-o", tmp_path / "libflashmoe.so"], check=True
    )
    return tmp_path


@pytest.mark.usefixtures("library")
def test_only_the_packages_own_library_is_loaded(planted: Path):
    mark = planted / "mark"
    found = load(directory=str(planted), LD_LIBRARY_PATH=str(planted), MARK=str(mark))
    assert found == str(bindings.LIBRARY)
    assert not mark.exists()


def test_a_named_library_is_loaded_and_checked(planted: Path):
    mark, named = planted / "mark", str(planted / "libflashmoe.so")
    found = load(FLASHMOE_LIBRARY=named, MARK=str(mark))
    assert found.startswith("DeviceError: libflashmoe.so has interface version 4711, wanted")
    assert mark.exists()


def test_a_relative_name_is_refused(planted: Path):
    """A relative path would name another file in each folder that a process starts in."""
    mark = planted / "mark"
    found = load(directory=str(planted), FLASHMOE_LIBRARY="libflashmoe.so", MARK=str(mark))
    assert found == "DeviceError: FLASHMOE_LIBRARY=libflashmoe.so: wanted an absolute path"
    assert not mark.exists()


@pytest.mark.parametrize(
    "kind", ["missing", "a folder", "text", "empty", "half", "another library"]
)
def test_what_is_no_library_is_an_error_with_its_name(kind: str, tmp_path: Path):
    path = tmp_path / "libnamed.so"
    if kind == "a folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("not a library\n")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "half":
        path.write_bytes(Path(sys.executable).resolve().read_bytes()[:4096])
    elif kind == "another library":
        (tmp_path / "other.c").write_text("int other(void) { return 1; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "other.c", "-o", path], check=True)
    with pytest.raises(DeviceError, match=r"libnamed\.so is (no libflashmoe|not installed)"):
        bindings.load(path)


def compiled(folder: Path) -> Path:
    """Makes a shared library that asks for a version of glibc."""
    source, path = folder / "other.c", folder / "libother.so"
    source.write_text('#include <stdlib.h>\nint other(void) { return atoi(getenv("HOME")); }\n')
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", path], check=True)
    return path


@pytest.mark.skipif(platform.machine() != "x86_64", reason="patches x86-64's machine code")
def test_another_processors_library_is_named(tmp_path: Path):
    path = compiled(tmp_path)
    content = bytearray(path.read_bytes())
    content[18:20] = (183).to_bytes(2, "little")
    path.write_bytes(content)
    with pytest.raises(DeviceError, match="built for aarch64, wanted x86_64: build it here"):
        bindings.load(path)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's glibc begins with 2.2.5")
def test_a_newer_glibc_than_the_machines_is_named(tmp_path: Path):
    path = compiled(tmp_path)
    content = path.read_bytes()
    assert b"GLIBC_2.2.5" in content
    path.write_bytes(content.replace(b"GLIBC_2.2.5", b"GLIBC_9.9.9"))
    with pytest.raises(DeviceError, match=r"needs glibc 9\.9\.9 or newer, got glibc \d"):
        bindings.load(path)


EXECUTE = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open"),
    *("dill.load", "cloudpickle.load", "yaml.load", "joblib.load"),
    *("eval", "exec", "compile", "os.system", "ctypes.PyDLL", "torch.load", "torch.jit.load"),
}


def calls_of(path: Path) -> set[str]:
    return {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }


def test_nothing_read_can_execute():
    """Files are JSON, or arrays of numpy, which unpickles only if it is asked to."""
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    assert len(sources) > 50
    found = {str(path): bad for path in sources if (bad := calls_of(path) & EXECUTE)}
    assert not found
    assert not [path for path in sources if "allow_pickle=True" in path.read_text()]


TRAINING = """
import os, sys
package = sys.argv[1]
writes = []

def audit(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            writes.append((event, path))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.chmod", "os.truncate"):
        writes.extend((event, argument) for argument in arguments)

sys.addaudithook(audit)
import torch
import flashmoe_megatron
assert flashmoe_megatron.__file__.startswith(package), flashmoe_megatron.__file__
from flashmoe_megatron import Activation, FlashMoELayer, MoEConfig
from flashmoe_megatron.kernel import bindings
if bindings.LIBRARY.exists():
    bindings.load()
config = MoEConfig(hidden=64, intermediate=64, num_experts=4, topk=2, activation=Activation.SILU,
                   gated=True, num_ranks=1, max_tokens=64)
layer = FlashMoELayer(config, router=True, dtype=torch.float32, device="cpu")
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
x = torch.randn(64, 64)
losses = []
for _ in range(20):
    loss = (layer(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss))
assert losses[-1] < losses[0], losses
import flashmoe_megatron.telemetry
inside = [(event, path) for event, path in writes
          if isinstance(path, str) and os.path.abspath(path).startswith(package)]
assert not inside, inside
print("trained")
"""


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.timeout(240)
def test_training_writes_nothing_into_the_package(tmp_path: Path):
    """The package is a read-only copy; an audit hook watches, since a superuser may write there."""
    package = tmp_path / "site" / "flashmoe_megatron"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    writable = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
    everything = [package, *package.rglob("*")]
    for path in everything:
        path.chmod(path.stat().st_mode & ~writable)
    before = snapshot(package)
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRAINING, str(package)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(package.parent),
                "PYTHONDONTWRITEBYTECODE": "1",  # Python's own files are not the package's
            },
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        for path in everything:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("trained")
    assert snapshot(package) == before
