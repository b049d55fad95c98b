"""The command line; see the package."""

import argparse
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType

from tools import weak_scaling
from tools.arguments import parser_of, run_command
from tools.weak_scaling import layer, training
from tools.weak_scaling.ranks import UsageError
from tools.weak_scaling.report import write_report


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(weak_scaling.__doc__, "python -m tools.weak_scaling")
    commands = parser.add_subparsers(dest="command", required=True)
    layer.add_arguments(commands.add_parser("run", allow_abbrev=False, help="measure a layer"))
    report = commands.add_parser("report", help="write table and figure of a folder again")
    report.add_argument("folder", type=Path)
    commands.add_parser("training", help="whole training iterations; has a --help of its own")
    options, passed_on = parser.parse_known_args(arguments)
    if passed_on and options.command != "run":
        parser.error(f"unknown arguments: {' '.join(passed_on)}")
    options.bench = passed_on
    return options


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"signal {number}")


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["training"]:
        return training.main(arguments[1:])
    options = parse(arguments)
    if options.command == "run":
        return layer.run(options)
    write_report(options.folder, {})
    return 0


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, _stop)  # a job that runs is ended first
    try:
        return run_command(partial(_run, arguments), UsageError)
    except KeyboardInterrupt:
        print("stopped; what was measured is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
