"""Checks the kernels' machine code where it matters and the sources do not show it.

    python tools/machine_code.py

prints four things for every kernel, and exits with status 1 if there are any, and with 2 if the
library cannot be built or read.

*Moves to uniform registers* between the products of a stage. wgmma takes its operands' descriptors
from uniform registers. Where ptxas cannot prove that a loop is uniform it keeps them in ordinary
ones, and moves 16 of them at every stage: 5 to 7 % of a layer's time
(tools/bench/results/2026-11-h200-1x.md).

*Lost acquires*. ptxas drops a load whose value is not used, even if it acquires: a NOP stays in its
place, and after it the invalidation of the L1, under a predicate that has meant something else
since. Where that is false, what follows may be read as it was before
(tools/bench/results/2026-11-h200-2x.md).

*Early arrivals*. A warp loads from shared memory and then arrives at another CTA's barrier. The
arrival may be seen before the load is done, unless it depends on the loaded value. Then another
value is written to the place, and the load finds that (tools/bench/results/2026-11-h200-2x.md).

*Missing fences*. Where a tile's rows are read in place, threads copy them to shared memory, and
wgmma reads that by the asynchronous proxy. The main loop for such tiles needs a
``fence.proxy.async`` between the wait for a stage and its products; the others, for what TMA has
copied, need none. In FP8 no rows are read in place.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import nvcc_build
import resource_table

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)")
REGISTER = re.compile(r"\bU?[RP]\d+\b")
PRODUCTS = ("HGMMA", "QGMMA")  # 16 bits', and those in FP8
MOVE, NOTHING, INVALIDATION = "R2UR", "NOP", "CCTL.IVALL"
# The first loads from shared memory, the second arrives at a barrier of any CTA.
LOAD, ARRIVAL = "LDS", "SYNCS.ARRIVE.TRANS64.RED.A1T0"
WAIT, FENCE = "SYNCS.PHASECHK", "FENCE.VIEW.ASYNC"


class Instruction(NamedTuple):
    """One instruction: its predicate, or nothing, its operation and its operands."""

    predicate: str
    operation: str
    operands: str

    @property
    def registers(self) -> list[str]:
        """The registers that are named, the written one first."""
        return REGISTER.findall(self.operands)


Kernels = dict[str, list[Instruction]]
"""The instructions by the kernels' mangled names."""
IN_FP8 = "flashmoe_in_fp8"
"""The namespace of kernels that read no rows in place."""
FARTHEST = 100
"""Instructions between two products of one stage, at most."""
NEAR = 24
"""Instructions between a load and the arrival that tells of it, at most."""


def find_disassembler() -> Path:
    """Finds cuobjdump: next to nvcc, in PATH, or in the package nvidia-cuda-cuobjdump.

    Raises:
        BuildError: There is no cuobjdump.
    """
    folders = [nvcc_build.find_toolchain().nvcc.resolve().parent, *os.get_exec_path()]
    folders += [root / "bin" for root in nvcc_build.packaged_roots()]
    found = shutil.which("cuobjdump", path=os.pathsep.join(map(str, folders)))
    if found is None:
        raise nvcc_build.BuildError("cuobjdump not found: pip install '.[test]'")
    return Path(found)


def disassemble(objects: list[nvcc_build.Object]) -> str:
    """The machine code of all of a library's kernels, as cuobjdump prints it."""
    tool = find_disassembler()
    return "".join(
        subprocess.run([tool, "-sass", one.path], capture_output=True, text=True, check=True).stdout
        for one in objects
    )


def instructions(listing: str) -> Kernels:
    """Returns the instructions of each kernel in a listing of :func:`disassemble`."""
    found: Kernels = {}
    of_kernel: list[Instruction] = []
    for line in listing.splitlines():
        if match := re.search(r"Function : (\S+)", line):
            of_kernel = found.setdefault(match[1], [])
        elif match := INSTRUCTION.match(line):
            of_kernel.append(Instruction((match[1] or "").strip(), match[2], match[3]))
    return found


def moves_in_loops(kernels: Kernels) -> dict[str, list[int]]:
    """Counts moves to uniform registers between the products of each stage.

    Args:
        kernels: What :func:`instructions` gives.

    Returns:
        By the mangled name of each kernel that has products: a number for each place where a stage
        is multiplied.
    """
    found: dict[str, list[int]] = {}
    for kernel, code in kernels.items():
        stages: list[int] = []
        moves, since = 0, FARTHEST + 1
        for _, operation, _ in code:
            since += 1
            moves += operation.startswith(MOVE)
            if operation.startswith(PRODUCTS):
                if since > FARTHEST:
                    stages.append(0)
                else:
                    stages[-1] += moves
                moves = since = 0
        if stages:
            found[kernel] = stages
    return found


def fenced_loops(kernels: Kernels) -> dict[str, list[bool]]:
    """Tells which main loops have a fence between the wait for a stage and its products.

    Args:
        kernels: What :func:`instructions` gives.

    Returns:
        By the mangled name of each kernel that has products: a value for each place where a stage
        is multiplied.
    """
    found: dict[str, list[bool]] = {}
    for kernel, code in kernels.items():
        has_waited = is_fenced = False
        for _, operation, _ in code:
            if operation.startswith(WAIT):
                has_waited, is_fenced = True, False
            elif operation.startswith(FENCE):
                is_fenced = True
            elif operation.startswith(PRODUCTS) and has_waited:
                found.setdefault(kernel, []).append(is_fenced)
                has_waited = False
    return found


def lost_acquires(kernels: Kernels) -> dict[str, int]:
    """Counts invalidations of the L1 whose load is gone, by the kernels' names."""
    return _count(kernels, _is_lost)


def early_arrivals(kernels: Kernels) -> dict[str, int]:
    """Counts arrivals at other CTAs' barriers that overtake a load, by the kernels' names."""
    return _count(kernels, _is_early)


def _count(
    kernels: Kernels, is_bad: Callable[[Instruction, list[Instruction]], bool]
) -> dict[str, int]:
    """Counts the instructions of each kernel that are bad after the few before them."""
    return {
        kernel: sum(is_bad(one, code[max(0, at - NEAR) : at]) for at, one in enumerate(code))
        for kernel, code in kernels.items()
    }


def _is_lost(invalidation: Instruction, before: list[Instruction]) -> bool:
    """Tells whether a load has become nothing where the L1 is invalidated after it."""
    if invalidation.operation != INVALIDATION or not before:
        return False
    return before[-1][:2] == (invalidation.predicate, NOTHING)


def _is_early(arrival: Instruction, before: list[Instruction]) -> bool:
    """Tells whether the last load before an arrival may be done after it."""
    if arrival.operation != ARRIVAL:
        return False
    loaded: set[str] | None = None  # what was computed from it is added
    for one in before:
        if one.operation.startswith(LOAD):
            first = int(one.registers[0][1:])
            words = {"128": 4, "64": 2}.get(one.operation.partition(".")[2], 1)
            loaded = {f"R{first + word}" for word in range(words)}
        elif loaded and loaded.intersection(one.registers[1:]):
            loaded.add(one.registers[0])
        elif loaded and one.registers and not one.predicate:
            loaded.discard(one.registers[0])  # it is written again
    if loaded is None:
        return False
    return not loaded.intersection([arrival.predicate.lstrip("@!"), *arrival.registers])


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        library = nvcc_build.ROOT / "flashmoe_megatron" / "libflashmoe.so"
        kernels = instructions(disassemble(nvcc_build.build_library(library)))
    except nvcc_build.BuildError as error:
        print(error, file=sys.stderr)
        return 2
    moves, acquires = moves_in_loops(kernels), lost_acquires(kernels)
    arrivals, fences = early_arrivals(kernels), fenced_loops(kernels)
    names = map(resource_table.short_name, resource_table.demangled(list(acquires)))
    for name, kernel in sorted(zip(names, acquires, strict=True)):
        print(
            f"{name}: {acquires[kernel]} acquires lost; {arrivals[kernel]} arrivals early; "
            f"{sum(fences.get(kernel, []))} main loops with fences; "
            f"moves in main loops: {', '.join(map(str, moves.get(kernel, []))) or 'no main loop'}"
        )
    bad = [
        *acquires.values(),
        *arrivals.values(),
        *(not any(loops) for kernel, loops in fences.items() if IN_FP8 not in kernel),
        *map(sum, moves.values()),
    ]
    return int(any(bad))


if __name__ == "__main__":
    sys.exit(main())
