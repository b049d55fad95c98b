"""The command line; see the package."""

import argparse
import sys
from pathlib import Path

from examples.arguments import count
from flashmoe_megatron.bench.shapes import SHAPES
from tools import timeline
from tools.arguments import parser_of, row_bound, run_command
from tools.timeline.records import LaunchTrace, TraceError


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(timeline.__doc__, "python -m tools.timeline")
    commands = parser.add_subparsers(dest="command", required=True)
    capture = commands.add_parser("capture", help="record on GPUs, under torchrun")
    capture.set_defaults(run=run_capture)
    capture.add_argument(
        "--out",
        type=Path,
        default=Path("runs/timeline"),
        help="folder of the .npz files, which has none of an earlier capture",
    )
    capture.add_argument("--shape", choices=list(SHAPES), default="paper-8k")
    capture.add_argument("--one-of", type=count, default=1, help="1/N of the experts, on one GPU")
    capture.add_argument(
        "--row-bound",
        type=row_bound,
        default=1.5,
        help="so that a forward is one launch, plan and all",
    )
    capture.add_argument("--commit", help="what is recorded, where the checkout has no git")
    draw = commands.add_parser("draw", help="picture and trace of recorded launches")
    draw.set_defaults(run=run_draw)
    draw.add_argument("files", type=Path, nargs="+", help=".npz files")
    draw.add_argument("--out", type=Path, help="folder; default: beside each file")
    summarize = commands.add_parser("summarize", help="tables of recorded launches")
    summarize.set_defaults(run=run_summarize)
    summarize.add_argument("files", type=Path, nargs="+", help=".npz files")
    return parser.parse_args(arguments)


def run_capture(options: argparse.Namespace) -> int:
    """Records launches."""
    from tools.timeline.capture import capture

    return capture(options)


def run_draw(options: argparse.Namespace) -> int:
    """Draws every file."""
    from tools.timeline.chrome import write_chrome_trace
    from tools.timeline.draw import draw_launch

    for file in options.files:
        launch = LaunchTrace.load(file)
        folder = options.out or file.parent
        folder.mkdir(parents=True, exist_ok=True)
        for path in draw_launch(launch, folder / file.stem):
            print(f"wrote {path}")
        trace = folder / f"{file.stem}.trace.json.gz"
        slices = write_chrome_trace(launch, trace)
        print(f"wrote {trace}, {slices} slices")
    return 0


def run_summarize(options: argparse.Namespace) -> int:
    """Prints every file's tables."""
    from tools.timeline.summary import summary

    for file in options.files:
        print("\n".join(summary(LaunchTrace.load(file))))
    return 0


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    return run_command(lambda: options.run(options), TraceError)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
