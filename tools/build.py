"""Builds flashmoe_megatron/libflashmoe.so in place and prints what each kernel takes.

Quick after a small change: only the sources that the change reaches are compiled again.
"""

import argparse
import sys

import nvcc_build
import resource_table


def show_resources(
    objects: list[nvcc_build.Object], variant: nvcc_build.Variant, *, rewrite: bool
) -> None:
    """Prints what the kernels take; writes the table of the checkout, or says if it is another."""
    table, path = resource_table.render(objects, variant), resource_table.TABLE
    print(table)
    if rewrite:
        path.write_text(table)
        print(f"wrote {path.relative_to(nvcc_build.ROOT)}")
    elif variant is nvcc_build.SHIPPED and (not path.is_file() or path.read_text() != table):
        print(f"{path.relative_to(nvcc_build.ROOT)} says otherwise: --resources writes it anew")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: one per core)")
    parser.add_argument("--quiet", action="store_true", help="no table of the kernels")
    parser.add_argument(
        "--resources", action="store_true", help=f"write {resource_table.TABLE.name} anew"
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
    if args.resources and args.variant is not nvcc_build.SHIPPED:
        parser.error("--resources is about the library that is shipped, not about a variant")
    target = nvcc_build.ROOT / "flashmoe_megatron" / args.variant.library
    try:
        objects = nvcc_build.build_library(target, jobs=args.jobs, variant=args.variant)
        if args.resources or not args.quiet:
            show_resources(objects, args.variant, rewrite=args.resources)
    except nvcc_build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{target.relative_to(nvcc_build.ROOT)}: {target.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
