"""The command line; see the package."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from examples.arguments import count
from flashmoe_megatron.bench.shapes import ALL_SHAPES, shape_of
from tools import simulate
from tools.arguments import add_gated, parser_of, positive, run_command
from tools.bench.common import ROOT
from tools.simulate import figures as figures_file
from tools.simulate.figures import FigureError, Figures, Fitted
from tools.simulate.fit import Comparison, compare, fit
from tools.simulate.fit import table as comparison_table
from tools.simulate.measured import Measurement, PointError, read_points

TOLERANCE = 0.1


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of(simulate.__doc__, "python -m tools.simulate")
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="fit anew, write figures.json, and compare")
    fitting.add_argument("files", type=Path, nargs="+", help="JSON lines of measured times")
    fitting.set_defaults(run=run_fit)
    fitting.add_argument("--dry-run", action="store_true", help="do not write the result")
    comparing = commands.add_parser("compare", help="what is kept, against measured times")
    comparing.set_defaults(run=run_compare)
    comparing.add_argument("files", type=Path, nargs="*", help="default: those of the last fit")
    for command in (fitting, comparing):
        command.add_argument("--tolerance", type=positive, default=TOLERANCE)
    predicting = commands.add_parser("predict", help="weak scaling to 4096 GPUs")
    predicting.set_defaults(run=run_predict)
    predicting.add_argument(
        "--out", type=Path, default=Path("runs/simulate"), help="folder of the plots"
    )
    predicting.add_argument("--domains", type=count, nargs="+", default=[8, 72])
    predicting.add_argument("--nic-gbps", type=positive, default=50.0, help="GB/s of one GPU's NIC")
    predicting.add_argument(
        "--shape",
        default="paper-8k",
        help=f"from {', '.join(ALL_SHAPES)}, or TOKENSxHIDDENxINTERMEDIATExEXPERTSxTOPK",
    )
    add_gated(predicting)
    predicting.add_argument("--backward", action="store_true", help="the backward's launch")
    ablation = commands.add_parser("fsmoe", help="FSMoE's layers, and what its schedule brings")
    ablation.add_argument(
        "--every", type=count, default=1, metavar="N", help="plays one layer of N, for a look"
    )
    ablation.set_defaults(run=run_fsmoe)
    return parser.parse_args(arguments)


def points_of(files: list[Path]) -> list[Measurement]:
    """All points of some files."""
    return [point for file in files for point in read_points(file)]


def judge(comparisons: list[Comparison], options: argparse.Namespace) -> int:
    """Prints the comparison.

    Returns:
        0 if all that was held out is within the tolerance, or all where nothing was; else 1.
    """
    print("\n".join(comparison_table(comparisons, options.tolerance)))
    held_out = [c for c in comparisons if not c.point.is_fitted]
    return int(any(abs(c.error) > options.tolerance for c in held_out or comparisons))


def run_fit(options: argparse.Namespace) -> int:
    """Fits, keeps and compares."""
    files = [file.resolve() for file in options.files]
    outside = [str(file) for file in files if ROOT.resolve() not in file.parents]
    if outside and not options.dry_run:
        raise PointError(
            f"{', '.join(outside)}: not in the checkout, so the fit would name files "
            "that others lack; copy them, or try it by --dry-run"
        )
    figures, _ = figures_file.load()
    points = points_of(files)
    fitted = fit(points, figures)
    if not options.dry_run:
        names = tuple(str(file.relative_to(ROOT.resolve())) for file in files)
        fitted = replace(fitted, files=names)
        figures_file.store(fitted)
        _, fitted = figures_file.load()  # what is kept is what is judged
    return judge(compare(points, figures, fitted), options)


def load_fitted() -> tuple[Figures, Fitted]:
    """Returns the figures and the last fit.

    Raises:
        FigureError: Nothing has been fitted.
    """
    figures, fitted = figures_file.load()
    if not fitted.files:
        raise FigureError("nothing is fitted: run `python -m tools.simulate fit RESULTS.jsonl`")
    return figures, fitted


def run_compare(options: argparse.Namespace) -> int:
    """Compares what is kept with measured times."""
    figures, fitted = load_fitted()
    files = options.files or [ROOT / file for file in fitted.files]
    return judge(compare(points_of(files), figures, fitted), options)


def run_predict(options: argparse.Namespace) -> int:
    """Predicts, prints and draws."""
    from tools.simulate import predict

    figures, fitted = load_fitted()
    shape = shape_of(options.shape, gated=options.gated)
    by_domain = {
        domain: predict.weak_scaling(
            shape, domain, options.nic_gbps, figures, fitted, backward=options.backward
        )
        for domain in options.domains
    }
    measured = [
        point
        for point in points_of([ROOT / file for file in fitted.files])
        if point.shape == shape and point.backward is options.backward
    ]
    print("\n".join(predict.table(by_domain, shape)))
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"weak_scaling_{options.shape}{'_backward' if options.backward else ''}"
    drawn = predict.draw_predictions(
        by_domain,
        measured,
        shape,
        options.nic_gbps,
        options.out / name,
        backward=options.backward,
    )
    for path in drawn:
        print(f"wrote {path}")
    return 0


def run_fsmoe(options: argparse.Namespace) -> int:
    """Plays FSMoE's layers on its authors' machine and on ours, and prints both."""
    from tools.simulate import ablation

    chosen = list(ablation.layers())[:: options.every]
    found = {one.name: ablation.summarize(chosen, one) for one in ablation.MACHINES}
    print("\n".join(ablation.table(found)))
    return 0


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    return run_command(lambda: options.run(options), FigureError, PointError, ValueError, OSError)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
