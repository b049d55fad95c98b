"""The command line; see the package."""

import importlib
import sys

from tools.bench import bench_training

COMMANDS = ("megatron", "deepspeed", "logs")


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        print(bench_training.__doc__)
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        got = arguments[0] if arguments else "nothing"
        print(f"error: got {got}, wanted one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    # Each prepares its framework when it is imported, and only one can be in a process.
    command = importlib.import_module(f"{bench_training.__name__}.{arguments[0]}")
    return int(command.main(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
