"""Builds flashmoe_megatron/libflashmoe.so in place.

Quick after a small change: only the sources that the change reaches are compiled again.
"""

import argparse
import sys

import nvcc_build
import resource_table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: one per core)")
    table = resource_table.TABLE.relative_to(nvcc_build.ROOT)
    parser.add_argument(
        "--resources", action="store_true", help=f"print what each kernel takes, and write {table}"
    )
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
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: wanted at least 1")
    if args.resources and args.variant is not nvcc_build.SHIPPED:
        parser.error("--resources is about the library that is shipped, not about a variant")
    target = nvcc_build.ROOT / "flashmoe_megatron" / args.variant.library
    try:
        objects = nvcc_build.build_library(target, jobs=args.jobs, variant=args.variant)
        if args.resources:
            text = resource_table.render(objects)
            resource_table.TABLE.write_text(text)
            print(f"{text}wrote {table}")
    except nvcc_build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{target.relative_to(nvcc_build.ROOT)}: {target.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
