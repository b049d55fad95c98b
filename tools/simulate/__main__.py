"""The command line; see the package."""

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

from examples.arguments import count
from flashmoe_megatron.planner import CARD_BYTES_PER_S
from tools import simulate
from tools.arguments import exponent, positive
from tools.bench.common import ROOT
from tools.bench.shapes import ALL_SHAPES, SHAPES
from tools.simulate import figures as figures_file
from tools.simulate.figures import FigureError, Figures, Fitted
from tools.simulate.fit import Comparison, compare, fit
from tools.simulate.fit import table as comparison_table
from tools.simulate.measured import Measurement, PointError, read_points

TOLERANCE = 0.1


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.simulate",
        description=simulate.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="fit anew, write figures.json, and compare")
    fitting.add_argument("files", type=Path, nargs="+", help="JSON lines of measured times")
    fitting.add_argument("--dry-run", action="store_true", help="do not write the result")
    comparing = commands.add_parser("compare", help="what is kept, against measured times")
    comparing.add_argument("files", type=Path, nargs="*", help="default: those of the last fit")
    for command in (fitting, comparing):
        command.add_argument("--tolerance", type=positive, default=TOLERANCE)
    predicting = commands.add_parser("predict", help="weak scaling to 4096 GPUs")
    predicting.add_argument(
        "--out", type=Path, default=Path("runs/simulate"), help="folder of the plots"
    )
    predicting.add_argument("--domains", type=count, nargs="+", default=[8, 72])
    predicting.add_argument("--nic-gbps", type=positive, default=50.0, help="GB/s of one GPU's NIC")
    predicting.add_argument("--shape", choices=list(SHAPES), default="paper-8k")
    predicting.add_argument("--backward", action="store_true", help="the backward's launch")
    replicas = commands.add_parser("replicas", help="when replicas of hot experts pay")
    replicas.add_argument("--shapes", choices=list(ALL_SHAPES), nargs="+", default=["qwen3-30b"])
    replicas.add_argument("--ranks", type=count, nargs="+", default=[4, 8])
    replicas.add_argument("--zipf", type=exponent, nargs="+", default=[0.25, 0.5, 0.75, 1.0])
    replicas.add_argument("--slots", type=count, default=2, help="spare slots of each rank")
    hosts = commands.add_parser("hosts", help="a layer over hosts, beside what others publish")
    hosts.add_argument("--card-gbps", type=positive, default=CARD_BYTES_PER_S / 1e9, help="GB/s")
    hosts.add_argument("--hosts", type=count, nargs="+", default=[2**n for n in range(1, 10)])
    schedule = commands.add_parser("schedule", help="pictures of the scheduled backend")
    schedule.add_argument("--trace", type=Path, help="of python -m flashmoe_megatron.schedule")
    schedule.add_argument("--fit", type=Path, help="likewise, of several hosts")
    schedule.add_argument("--within", type=Path, help="of one host, if FIT has one rank on each")
    shapes = ["paper-8k", "qwen3-30b", "mixtral-8x7b", "deepseek-v3-e64"]
    schedule.add_argument("--shapes", choices=list(ALL_SHAPES), nargs="+", default=shapes)
    schedule.add_argument("--out", type=Path, default=Path("runs/schedule"), help="without ending")
    options = parser.parse_args(arguments)
    if options.command == "schedule":
        if not options.trace and not options.fit:
            schedule.error("nothing to draw: wanted --trace or --fit, got neither")
        if options.within and not options.fit:
            schedule.error(f"--within {options.within}: wanted --fit, too, which it is put below")
    return options


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
    """The figures with what was fitted last.

    Raises:
        FigureError: Nothing has been fitted.
    """
    figures, fitted = figures_file.load()
    if not fitted.files:
        raise FigureError("nothing is fitted: run `python -m tools.simulate fit RESULTS.jsonl`")
    return figures, fitted


def run_predict(options: argparse.Namespace) -> int:
    """Predicts, prints and draws."""
    from tools.simulate import predict

    figures, fitted = load_fitted()
    shape = SHAPES[options.shape]
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


def run_replicas(options: argparse.Namespace) -> int:
    """Prints when replicas pay."""
    from tools.simulate.replicas import simulate_replicas, table

    figures, fitted = load_fitted()
    cases = itertools.product(options.shapes, options.ranks, options.zipf)
    rows = [
        (*case, simulate_replicas(ALL_SHAPES[case[0]], *case[1:], options.slots, figures, fitted))
        for case in cases
    ]
    print("\n".join(table(rows)))
    return 0


def run_hosts(options: argparse.Namespace) -> int:
    """Prints what a layer over hosts takes."""
    from tools.simulate import hosts

    rate = options.card_gbps
    print("\n".join([*hosts.table(options.hosts, rate), "", *hosts.published_table(rate)]))
    return 0


def run_schedule(options: argparse.Namespace) -> int:
    """Draws what streams did, or what degrees bring."""
    from tools.simulate import schedule

    options.out.parent.mkdir(parents=True, exist_ok=True)
    drawn = []
    if options.trace:
        drawn += schedule.draw_streams(schedule.read_trace(options.trace), options.out)
    if options.fit:
        fit = schedule.read_levels(options.fit, options.within)
        by_layer = {
            name: schedule.speedups(ALL_SHAPES[name].config(1), fit) for name in options.shapes
        }
        for name, found in by_layer.items():
            print(f"{name}: {', '.join(f'{one:.2f}' for one in found)}")
        path = options.out.with_name(f"{options.out.name}_ablation")
        drawn += schedule.draw_ablation(by_layer, fit.machine.device, path)
    for path in drawn:
        print(f"wrote {path}")
    return 0


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        if options.command == "schedule":
            return run_schedule(options)
        if options.command == "hosts":
            return run_hosts(options)
        if options.command == "fit":
            return run_fit(options)
        if options.command == "predict":
            return run_predict(options)
        if options.command == "replicas":
            return run_replicas(options)
        figures, fitted = load_fitted()
        files = options.files or [ROOT / file for file in fitted.files]
        return judge(compare(points_of(files), figures, fitted), options)
    except (FigureError, PointError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
