"""The table of every kernel's resources, ``csrc/RESOURCES.md``, made from the compiler's reports.

``python tools/build.py --resources`` writes it; a test compares it with the objects that are built.
"""

import re
import shutil
import subprocess

import nvcc_build

TABLE = nvcc_build.CSRC / "RESOURCES.md"
PROBE = nvcc_build.ROOT / "tools" / "kernel_smem.cu"
PROBE_IN_FP8 = PROBE.with_name("kernel_smem_in_fp8.cu")
PROBE_NARROW_TILES = PROBE.with_name("kernel_smem_narrow_tiles.cu")

_HEAD = """\
# What every kernel takes

Made by `python tools/build.py --resources` with {release}; a test compares it with the built
library. Registers are those of a launch, per thread, before `setmaxnreg` moves them between warps.
Shared memory is per CTA, in bytes. A spill fails the build, but for kernels with slots and in FP8.

| kernel | registers | static shared | dynamic shared | spilled bytes | stack bytes |
| --- | --- | --- | --- | --- | --- |
"""


def render(objects: list[nvcc_build.Object]) -> str:
    """The table as Markdown, one row for each kernel.

    Args:
        objects: All of the library that is shipped, fresh or from the cache.

    Raises:
        BuildError: The compiler said nothing of any kernel, or the program that asks for shared
            memory does not build.
    """
    kernels = nvcc_build.resources(objects)
    if not kernels:
        raise nvcc_build.BuildError("the compiler's reports name no kernel")
    dynamic = nvcc_build.run_probe(PROBE)
    for namespace, probe in (("in_fp8", PROBE_IN_FP8), ("narrow_tiles", PROBE_NARROW_TILES)):
        found = nvcc_build.run_probe(probe)
        dynamic |= {f"{namespace}::{name}": num_bytes for name, num_bytes in found.items()}
    names = [short_name(name) for name in demangled([one.kernel for one in kernels])]
    rows = []
    for name, one in sorted(zip(names, kernels, strict=True), key=lambda row: row[0]):
        plain = name.partition("<")[0]
        on_launch = dynamic.get(plain, dynamic.get(plain.removeprefix("with_slots::"), 0))
        rows.append(
            f"| `{name}` | {one.registers} | {one.shared_bytes} | {on_launch} | "
            f"{one.spilled_bytes} | {one.stack_bytes} |"
        )
    return _HEAD.format(release=release()) + "\n".join(rows) + "\n"


def release() -> str:
    """The compiler's release as the table names it: "nvcc 13.0, V13.0.88"."""
    found = re.search(r"release ([\d.]+), (V[\d.]+)", nvcc_build.find_toolchain().release)
    return f"nvcc {found[1]}, {found[2]}" if found else "an unknown nvcc"


def demangled(names: list[str]) -> list[str]:
    """Readable names.

    Raises:
        BuildError: There is no c++filt, which comes with the linker that nvcc needs.
    """
    tool = shutil.which("c++filt")
    if tool is None:
        raise nvcc_build.BuildError("c++filt not found: install binutils")
    out = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return out.stdout.splitlines()


def short_name(name: str) -> str:
    """A kernel's name without return type and arguments, and of namespaces the outer alone."""
    name = re.sub(r"\(flashmoe\w*::\w+\)", "", name)  # an enumerator's type in template arguments
    name = name.partition("(")[0].removeprefix("void ")
    outer = re.match(r"flashmoe_(\w+::)", name)
    rest = re.sub(r"flashmoe\w*::", "", name).replace("> >", ">>")
    return (outer[1] if outer else "") + rest
