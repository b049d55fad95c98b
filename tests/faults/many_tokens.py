"""FlashMoE's width over hosts with more ranks and tokens than the tests have time for, over gloo.

    python -m tests.faults.many_tokens --ranks 16 --hosts 4 --tokens 1024 2048 --steps 2

FlashMoE's own run, on 4 hosts of 4, lost messages beyond 2,048 tokens of a GPU. Experts are narrow
here, since what crosses does not depend on it.
"""

# ruff: noqa: T201 - a program: it prints

import argparse

from tests.faults.hosts_job import compute, run_hosts


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--steps", type=int, default=2, help="each with the same bits")
    args = parser.parse_args()
    print("| tokens a rank | rows that crossed, all ranks | largest error | s a step |")
    print("| --- | --- | --- | --- |")
    for tokens in args.tokens:
        found = run_hosts(compute, args.ranks, args.hosts, tokens, args.steps, patience_s=1800.0)
        errors, rows, seconds = zip(*found, strict=True)
        print(
            f"| {tokens:,} | {sum(rows):,} | {max(errors):.1e} | {max(seconds):.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
