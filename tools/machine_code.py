"""What ptxas made of the kernels where it matters and the sources cannot tell: their machine code.

    python tools/machine_code.py

prints two things for every kernel, and exits with status 1 if there are any.

*Moves to uniform registers* between the products of a stage. wgmma takes its operands' descriptors
from uniform registers. Where ptxas cannot prove that a loop is uniform it keeps them in ordinary
ones, and moves 16 of them at every stage: 5 to 7 % of a layer's time
(tools/bench/results/2026-11-22-uniform-loops.md).

*Lost acquires*. ptxas drops a load whose value nobody uses, also one that acquires: a NOP stays in
its place, and behind it the invalidation of the L1, under a predicate that has meant something else
since. Where that is false, what follows may be read as it was before
(tools/bench/results/2026-11-22-lost-acquires.md).
"""

import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import nvcc_build
import resource_table

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)")
PRODUCT, MOVE, NOTHING, INVALIDATION = "HGMMA", "R2UR", "NOP", "CCTL.IVALL"
Kernels = dict[str, list[tuple[str, str]]]
"""Predicate, or nothing, and operation of each instruction, by the kernels' mangled names."""
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


def instructions(listing: str) -> Kernels:
    """What a listing of :func:`disassemble` has of each kernel."""
    found: Kernels = {}
    of_kernel: list[tuple[str, str]] = []
    for line in listing.splitlines():
        if match := re.search(r"Function : (\S+)", line):
            of_kernel = found.setdefault(match[1], [])
        elif match := INSTRUCTION.match(line):
            of_kernel.append(((match[1] or "").strip(), match[2]))
    return found


def moves_in_loops(kernels: Kernels) -> dict[str, list[int]]:
    """Counts moves to uniform registers between the products of each stage.

    Args:
        kernels: Of :func:`instructions`.

    Returns:
        By the mangled name of each kernel that has products: a number for each place where a stage
        is multiplied.
    """
    found: dict[str, list[int]] = {}
    for kernel, operations in kernels.items():
        stages: list[int] = []
        moves, since = 0, FARTHEST + 1
        for _, operation in operations:
            since += 1
            moves += operation.startswith(MOVE)
            if operation.startswith(PRODUCT):
                if since > FARTHEST:
                    stages.append(0)
                else:
                    stages[-1] += moves
                moves = since = 0
        if stages:
            found[kernel] = stages
    return found


def lost_acquires(kernels: Kernels) -> dict[str, int]:
    """Counts invalidations of the L1 whose load is gone.

    Args:
        kernels: Of :func:`instructions`.

    Returns:
        Their number by the mangled name of each kernel.
    """
    return {
        kernel: sum(
            first == (predicate, NOTHING)
            for first, (predicate, operation) in pairwise(operations)
            if operation == INVALIDATION
        )
        for kernel, operations in kernels.items()
    }


def main() -> int:
    objects = nvcc_build.build_library(nvcc_build.ROOT / "flashmoe_megatron" / "libflashmoe.so")
    kernels = instructions(disassemble(objects))
    moves, acquires = moves_in_loops(kernels), lost_acquires(kernels)
    names = map(resource_table.short_name, resource_table.demangled(list(acquires)))
    for name, kernel in sorted(zip(names, acquires, strict=True)):
        print(
            f"{name}: {acquires[kernel]} acquires lost; moves in main loops: "
            f"{', '.join(map(str, moves.get(kernel, []))) or 'no main loop'}"
        )
    return int(any(acquires.values()) or any(map(any, moves.values())))


if __name__ == "__main__":
    sys.exit(main())
