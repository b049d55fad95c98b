"""Builds flashmoe_megatron/libflashmoe.so in place and prints what each kernel takes.

Quick after a small change: only the sources that the change reaches are compiled again.
"""

import argparse
import shutil
import subprocess
import sys

import nvcc_build


def demangled(names: list[str]) -> list[str]:
    """Readable names, where c++filt is at hand."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    out = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return out.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: one per core)")
    parser.add_argument("--quiet", action="store_true", help="no table of the kernels")
    parser.add_argument(
        "--trace", action="store_true", help="libflashmoe_trace.so, with time stamps inside"
    )
    args = parser.parse_args()
    name = "libflashmoe_trace.so" if args.trace else "libflashmoe.so"
    target = nvcc_build.ROOT / "flashmoe_megatron" / name
    try:
        objects = nvcc_build.build_library(target, jobs=args.jobs, trace=args.trace)
    except nvcc_build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    if not args.quiet:
        kernels = nvcc_build.resources(objects)
        print(f"{'registers':>9} {'static smem':>11} {'stack':>5}  kernel (source)")
        for one, name in zip(kernels, demangled([k.kernel for k in kernels]), strict=True):
            print(
                f"{one.registers:>9} {one.shared_bytes:>11} {one.stack_bytes:>5}  "
                f"{name} ({one.source})"
            )
    print(f"{target.relative_to(nvcc_build.ROOT)}: {target.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
