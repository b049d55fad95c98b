"""Whether ptxas took the kernels' main loops for uniform, read in their machine code.

    python tools/main_loops.py

prints, for every kernel, the moves to uniform registers that stand between the products of a
stage. wgmma takes its operands' descriptors from uniform registers. Where ptxas cannot prove that a
loop is uniform it keeps them in ordinary ones, and moves 16 of them at every stage: 5 to 7 % of a
layer's time (tools/bench/results/2026-11-22-uniform-loops.md). The exit status is 1 if there are
any.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nvcc_build
import resource_table

PRODUCT, MOVE = "HGMMA", "R2UR"
FARTHEST = 100
"""Instructions between two products of one stage, at most."""


def find_disassembler() -> Path:
    """cuobjdump: beside nvcc, in PATH, or of the package nvidia-cuda-cuobjdump.

    Raises:
        BuildError: There is none.
    """
    beside = nvcc_build.find_toolchain().nvcc.resolve().with_name("cuobjdump")
    in_path = shutil.which("cuobjdump")
    candidates = [beside, *([Path(in_path)] if in_path else [])]
    candidates += [root / "bin" / "cuobjdump" for root in nvcc_build.packaged_roots()]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise nvcc_build.BuildError("cuobjdump not found: pip install '.[test]'")


def disassemble(objects: list[nvcc_build.Object]) -> str:
    """The machine code of all of a library's kernels, as cuobjdump prints it."""
    tool = find_disassembler()
    return "".join(
        subprocess.run([tool, "-sass", one.path], capture_output=True, text=True, check=True).stdout
        for one in objects
    )


def moves_in_loops(listing: str) -> dict[str, list[int]]:
    """Counts moves to uniform registers between the products of each stage.

    Args:
        listing: Of :func:`disassemble`.

    Returns:
        By the mangled name of each kernel that has products: a number for each place where a stage
        is multiplied.
    """
    found: dict[str, list[int]] = {}
    stages: list[int] = []
    moves = since = 0
    for line in listing.splitlines():
        if match := re.search(r"Function : (\S+)", line):
            stages, since = [], FARTHEST + 1
            found[match[1]] = stages
        elif match := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", line):
            since += 1
            if match[1] == MOVE:
                moves += 1
            elif match[1] == PRODUCT:
                if since > FARTHEST:
                    stages.append(0)
                else:
                    stages[-1] += moves
                moves = since = 0
    return {kernel: counts for kernel, counts in found.items() if counts}


def main() -> int:
    objects = nvcc_build.build_library(nvcc_build.ROOT / "flashmoe_megatron" / "libflashmoe.so")
    found = moves_in_loops(disassemble(objects))
    names = map(resource_table.short_name, resource_table.demangled(list(found)))
    for name, counts in sorted(zip(names, found.values(), strict=True)):
        print(f"{name}: {', '.join(map(str, counts))}")
    return int(any(map(any, found.values())))


if __name__ == "__main__":
    sys.exit(main())
