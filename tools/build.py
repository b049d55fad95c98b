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
    for name, what in (
        ("trace", "with time stamps inside"),
        ("delays", "whose kernels wait at random before every acquire and release"),
        ("coverage", "whose host code tells libFuzzer what it runs"),
    ):
        variant = nvcc_build.VARIANTS[name]
        parser.add_argument(
            f"--{name}",
            dest="variant",
            action="store_const",
            const=variant,
            default=nvcc_build.SHIPPED,
            help=f"{variant.library}, {what}",
        )
    args = parser.parse_args()
    target = nvcc_build.ROOT / "flashmoe_megatron" / args.variant.library
    try:
        objects = nvcc_build.build_library(target, jobs=args.jobs, variant=args.variant)
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
