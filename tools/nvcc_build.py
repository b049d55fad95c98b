"""Compiles csrc/ into libflashmoe.so with nvcc; needs neither a GPU, a driver nor torch.

The one owner of the compiler flags. ``setup.py`` calls it for wheels, ``tools/build.py`` for a
quick build in place. Each source is compiled on its own, in a small pool, and its object is kept
under ``build/nvcc`` by the content of everything that went into it.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
CACHE = ROOT / "build" / "nvcc"
TOOLCHAIN = ROOT / "build" / "toolchain"  # where tools/setup_env.sh puts what it fetches

PINS = ROOT / "tools" / "toolchain.txt"
WAYS_OUT = (
    "install the packages of tools/toolchain.txt (pip install -r), or set "
    "FLASHMOE_SKIP_CUDA_BUILD=1 for an install without the kernel"
)

ARCH_FLAGS = ["-gencode=arch=compute_90a,code=sm_90a"]  # wgmma and setmaxnreg need the "a" target
COMPILE_FLAGS = [
    *ARCH_FLAGS,
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "--expt-relaxed-constexpr",  # CuTe calls std::min and its like from device code
    "-Xptxas=-v,--warn-on-spills,--warning-as-error",  # a register spill fails the build
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall",
]
MAY_SPILL = {"with_slots", "in_fp8"}
"""Folders with kernels that may spill some bytes, which csrc/RESOURCES.md lists. A plan has no
register left for spare slots, and in FP8, where processors have two accumulators, finishers lack
one."""
LINK_FLAGS = [
    *ARCH_FLAGS,
    "-shared",
    "-cudart=static",  # no libcudart.so.N at run time, so torch's CUDA may differ from ours
    "-Xlinker=--no-undefined",  # libcuda least of all: loading must not need a driver
]
EXPORTS = "{ global: flashmoe_*; local: *; };\n"  # the C++ runtime's and cudart's are hidden too
PERFORMANCE_LOSS = "Potential Performance Loss"
"""ptxas says it where it ignores setmaxnreg (C7508) or serializes wgmma: never what was meant."""


def _may_spill(flags: Sequence[str]) -> list[str]:
    return [flag.replace(",--warning-as-error", "") for flag in flags]


@dataclass(frozen=True)
class Variant:
    """A build of the library for one purpose.

    Attributes:
        name: Part of the names of the library, ``libflashmoe_NAME.so``, and of its objects; empty
            for the library that is shipped.
        flags: Flags for the sources that it compiles in its own way.
        folders: Folders below csrc/ that have these sources, all if empty; the other objects are
            shared with the library that is shipped.
        hooks: A C source, relative to the checkout, that is linked in.
    """

    name: str = ""
    flags: tuple[str, ...] = tuple(COMPILE_FLAGS)
    folders: tuple[str, ...] = ()
    hooks: str | None = None

    @property
    def library(self) -> str:
        """Name of the file."""
        return f"libflashmoe_{self.name}.so" if self.name else "libflashmoe.so"


SHIPPED = Variant()
VARIANTS = {
    variant.name: variant
    for variant in (
        # Its kernels write time stamps.
        Variant("trace", (*_may_spill(COMPILE_FLAGS), "-DFLASHMOE_TRACE")),
        # Its kernels wait at random before every acquire and release.
        Variant("delays", (*_may_spill(COMPILE_FLAGS), "-DFLASHMOE_DELAYS")),
        # It tells libFuzzer which branches of the host's code an input takes.
        Variant(
            "coverage",
            (
                *COMPILE_FLAGS,
                "-Xcompiler=-fsanitize-coverage=trace-pc,-fsanitize-coverage=trace-cmp",
            ),
            folders=("api", "host"),
            hooks="tests/fuzz/coverage_hooks.c",
        ),
    )
}


class BuildError(RuntimeError):
    """The library cannot be built; the message says what is missing or which source failed."""


@dataclass(frozen=True)
class Toolchain:
    """The places of nvcc and the headers.

    Attributes:
        nvcc: The compiler driver.
        release: What ``nvcc --version`` says, part of the cache's key.
        cutlass: The folder of CUTLASS's and CuTe's headers.
        lib_dir: Holds libcudart_static.a where nvcc would not find it by itself.
    """

    nvcc: Path
    release: str
    cutlass: Path
    lib_dir: Path | None = None

    @property
    def includes(self) -> list[str]:
        """Flags for the headers; CUTLASS's warnings are not ours to mend."""
        return [f"-I{CSRC}", f"-isystem={self.cutlass}"]

    @property
    def libraries(self) -> list[str]:
        """Flags for the linker."""
        return [f"-L{self.lib_dir}"] if self.lib_dir else []

    def make(self, target: Path, arguments: list[str], complaint: str) -> str:
        """Has nvcc write a file, which gets its name once it is whole.

        Args:
            target: The file; a process that has an old one mapped keeps that.
            arguments: What nvcc is called with, but for the output.
            complaint: Begins the error's message.

        Returns:
            What nvcc said.

        Raises:
            BuildError: nvcc fails, or ptxas loses performance by its own word.
        """
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        done = subprocess.run(
            [self.nvcc, *arguments, "-o", partial],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode or PERFORMANCE_LOSS in done.stdout:
            partial.unlink(missing_ok=True)
            said = [line for line in done.stdout.splitlines() if not _is_report(line)]
            raise BuildError("\n".join([complaint, *said]))
        partial.replace(target)
        return done.stdout


@dataclass(frozen=True)
class KernelResources:
    """The resources that ptxas gave one kernel.

    Attributes:
        kernel: Its mangled name.
        registers: Per thread, before any setmaxnreg.
        shared_bytes: Static shared memory; what a launch asks for comes on top.
        stack_bytes: Local memory per thread.
        spilled_bytes: Stored to and loaded from it because registers ran out.
    """

    kernel: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spilled_bytes: int


@dataclass(frozen=True)
class Object:
    """One compiled source and what the compiler said about it."""

    source: str
    path: Path
    log: str


def find_toolchain() -> Toolchain:
    """Finds nvcc in $CUDA_HOME, else among the installed packages, else release 13 in PATH.

    Raises:
        BuildError: There is no nvcc, or no CUTLASS.
    """
    cutlass = _packaged_cutlass()
    if cutlass is None:
        raise BuildError(f"CUTLASS not found: {WAYS_OUT}")
    home = os.environ.get("CUDA_HOME")
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
        if not nvcc.is_file():
            raise BuildError(f"CUDA_HOME={home}: there is no {nvcc}")
        return Toolchain(nvcc, _release(nvcc), cutlass)

    packages = _packaged_cuda()
    if packages is not None:
        nvcc = packages / "bin" / "nvcc"
        # The packages lack the lib64 where nvcc looks.
        return Toolchain(nvcc, _release(nvcc), cutlass, packages / "lib")

    found = _nvcc_in_path()
    if found is not None:
        return Toolchain(found, _release(found), cutlass)
    raise BuildError(f"nvcc of CUDA 13 not found: set CUDA_HOME, {WAYS_OUT}")


def missing_packages() -> list[str]:
    """Returns the pinned packages that a build would need and does not find."""
    pins = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    is_there = {
        True: _packaged_cutlass() is not None,
        False: bool(os.environ.get("CUDA_HOME") or _packaged_cuda() or _nvcc_in_path()),
    }
    return [pin for pin in pins if not is_there[pin.startswith("nvidia-cutlass")]]


def build_library(
    target: Path, *, jobs: int | None = None, variant: Variant = SHIPPED
) -> list[Object]:
    """Compiles every source under csrc/ and links the library.

    Args:
        target: The library to write; replaced only once it is linked.
        jobs: Compilers at a time; $MAX_JOBS, else one for each core, if not given.
        variant: The purpose that it is built for.

    Returns:
        The objects, in the order of their sources.

    Raises:
        BuildError: A source does not compile, spills registers or loses performance by ptxas's
            own word, or the objects do not link.
    """
    toolchain = find_toolchain()
    sources = sorted(p for p in CSRC.rglob("*") if p.suffix in {".cu", ".cpp"})
    if not sources:
        raise BuildError(f"{CSRC}: no .cu or .cpp file in it")
    CACHE.mkdir(parents=True, exist_ok=True)
    print(f"nvcc: {toolchain.nvcc} ({toolchain.release})", flush=True)
    objects: dict[Path, Object] = {}
    failures: list[str] = []
    with ThreadPoolExecutor(jobs or int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        # Kernels take longest: begun last, one of them would keep one core busy and no other.
        begun = sorted(sources, key=lambda source: "instances" not in source.parts)
        running = {pool.submit(_compile, toolchain, source, variant): source for source in begun}
        for done in as_completed(running):
            try:
                objects[running[done]] = done.result()
            except BuildError as error:
                failures.append(str(error))
    if failures:
        raise BuildError("\n\n".join(failures))
    ordered = [objects[source] for source in sources]
    _link(toolchain, [one.path for one in ordered], target, variant)
    return ordered


def resources(objects: list[Object]) -> list[KernelResources]:
    """Reads ptxas's reports of all kernels."""
    pattern = re.compile(
        r"Compiling entry function '(?P<kernel>\w+)'"
        r".*?(?P<stack>\d+) bytes stack frame"
        r", (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
        r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.DOTALL,
    )
    found = []
    for one in objects:
        for match in pattern.finditer(one.log):
            shared = re.search(r"(\d+) bytes smem", match["rest"])
            found.append(
                KernelResources(
                    match["kernel"],
                    int(match["registers"]),
                    int(shared[1]) if shared else 0,
                    int(match["stack"]),
                    int(match["stores"]) + int(match["loads"]),
                )
            )
    return found


def run_probe(source: Path) -> dict[str, int]:
    """Compiles a program that asks the kernels' headers for numbers, and runs it.

    Args:
        source: A .cu file with a ``main`` that prints "name number" lines and needs no GPU.

    Returns:
        The numbers, by name.

    Raises:
        BuildError: It does not compile.
    """
    toolchain = find_toolchain()
    CACHE.mkdir(parents=True, exist_ok=True)
    flags = [flag for flag in COMPILE_FLAGS if "ptxas" not in flag]
    prefix = f"probe-{source.stem}"
    program = CACHE / f"{prefix}-{_key(toolchain, source, flags)}"
    if not program.is_file():
        arguments = [*flags, *toolchain.includes, "-cudart=static", *toolchain.libraries]
        arguments.append(str(source))
        toolchain.make(program, arguments, f"{source.name} does not build:")
        for old in CACHE.glob(f"{prefix}-*"):
            if old != program:
                old.unlink(missing_ok=True)
    out = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in map(str.split, out.splitlines())}


def _release(nvcc: Path) -> str:
    out = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return next(line for line in out.splitlines() if "release" in line)


def _find_package(name: str) -> ModuleSpec | None:
    """Finds an installed package, without importing it."""
    return PathFinder.find_spec(name, [str(TOOLCHAIN), *sys.path])


def packaged_roots() -> list[Path]:
    """Lists the folders in which NVIDIA's packages for CUDA 13 are installed."""
    spec = _find_package("nvidia")
    locations = (spec.submodule_search_locations or []) if spec else []
    return [Path(location) / "cu13" for location in locations]


def _packaged_cuda() -> Path | None:
    """The root of nvidia-cuda-nvcc and its companions, if they are installed here."""
    for root in packaged_roots():
        if (root / "bin" / "nvcc").is_file() and (root / "nvvm" / "bin" / "cicc").is_file():
            return root
    return None


def _packaged_cutlass() -> Path | None:
    """Returns the folder of CUTLASS's headers, if nvidia-cutlass is installed here."""
    spec = _find_package("cutlass_library")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "source" / "include"


def _nvcc_in_path() -> Path | None:
    """Returns the nvcc of $PATH, if it is of CUDA 13."""
    found = shutil.which("nvcc")
    return Path(found) if found and "release 13." in _release(Path(found)) else None


def _project_files(source: Path) -> set[Path]:
    """The source and all headers of csrc/ that it includes, at any depth."""
    found: set[Path] = set()
    left = [source]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M):
            left += [p for p in (CSRC / name, path.parent / name) if p.is_file()]
    return {path.resolve() for path in found}


def _key(toolchain: Toolchain, source: Path, flags: list[str]) -> str:
    digest = hashlib.sha256()
    # The headers of CUTLASS are known by their version, the project's by their content.
    version = (toolchain.cutlass / "cutlass" / "version.h").read_bytes()
    digest.update(repr((toolchain.release, flags, version)).encode())
    for path in sorted(_project_files(source)):
        digest.update(f"{os.path.relpath(path, CSRC)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(toolchain: Toolchain, source: Path, variant: Variant) -> Object:
    name = str(source.relative_to(CSRC))
    if variant.folders and source.relative_to(CSRC).parts[0] not in variant.folders:
        variant = SHIPPED
    flags = _may_spill(variant.flags) if MAY_SPILL & {*source.parts} else list(variant.flags)
    stem = (f"{variant.name}-" if variant.name else "") + name.replace("/", "-")
    target = CACHE / f"{stem}-{_key(toolchain, source, flags)}.o"
    log_path = target.with_suffix(".log")
    if target.is_file() and log_path.is_file():
        return Object(name, target, log_path.read_text())

    started = time.monotonic()
    arguments = [*flags, *toolchain.includes, "-c", str(source)]
    log = toolchain.make(target, arguments, f"csrc/{name} does not build:")
    log_path.write_text(log)
    for old in CACHE.glob(f"{stem}-*"):
        if old.stem != target.stem and old.stem.count(".") == target.stem.count("."):
            old.unlink(missing_ok=True)
    print(f"  csrc/{name}: {time.monotonic() - started:.0f} s", flush=True)
    return Object(name, target, log)


def _is_report(line: str) -> bool:
    """Tells whether a line is ptxas's report of a kernel without a loss of performance."""
    return line.startswith("ptxas info") and PERFORMANCE_LOSS not in line


def _link(toolchain: Toolchain, objects: list[Path], target: Path, variant: Variant) -> None:
    exports = CACHE / "exports.map"
    exports.write_text(EXPORTS)
    target.parent.mkdir(parents=True, exist_ok=True)
    flags, sources = LINK_FLAGS, list(objects)
    if variant.hooks is not None:
        flags = [*LINK_FLAGS, "-Xcompiler=-fPIC,-O2"]
        sources.append(ROOT / variant.hooks)
    arguments = [*flags, f"-Xlinker=--version-script={exports}", *toolchain.libraries]
    toolchain.make(target, [*arguments, *map(str, sources)], f"{target.name} does not link:")
