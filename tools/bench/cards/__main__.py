"""The command line; see the package."""

import argparse
import sys
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.bench import cards, common
from tools.bench.cards.arms import arms_of
from tools.bench.cards.card import card_of
from tools.bench.cards.kept import gpus_of, keep, kept_cards
from tools.bench.cards.models import MODELS, Model
from tools.bench.cards.page import markdown
from tools.bench.cards.records import (
    all_todo,
    folder_of,
    is_done,
    read_records,
    tries,
    write_record,
)
from tools.bench.cards.training import Started, command_of

PICTURE = Path(__file__).with_name("end_to_end.svg")
ENDING_S = 25.0
"""Left of the time when an arm's limit is over, for ending it and writing what came of it."""
AHEAD = 8
"""Arms that start together and wait; each rank takes some 3 GiB of the host's memory."""
LEAST_S = 30.0
"""An arm is not begun if less is left: it would not get past its first iterations."""
ARM_S = 150.0
"""An arm is ended after that, so that a hanging arm leaves time for others."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.cards",
        description=cards.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run arms until the time is over")
    pages = commands.add_parser("pages", help="print the cards of what has been run")
    drawing = commands.add_parser("picture", help="draw the README's picture of the kept records")
    drawing.add_argument("--out", type=Path, default=PICTURE, help="the SVG file")
    keeping = commands.add_parser("keep", help="add what has been run to a file of kept records")
    keeping.add_argument("file", type=Path, help="DATE-cards-GPU-Nx.jsonl, need not exist")
    for each in (run, pages, keeping):
        each.add_argument("--out", type=Path, default=Path("runs/cards"))
        each.add_argument("--models", nargs="+", choices=[model.name for model in MODELS])
    for each in (run, pages):
        each.add_argument("--gpus", type=int, default=1)
    run.add_argument("--megatron", type=Path, default=Path(".megatron"), help="has pretrain_gpt.py")
    run.add_argument("--minutes", type=float, default=9.0, help="for all arms together")
    run.add_argument("--arm-seconds", type=float, default=ARM_S, help="for one arm at most")
    run.add_argument(
        "--arms",
        nargs="+",
        help="ARM or MODEL/ARM, in the order to run them; default: all without a result",
    )
    run.add_argument(
        "--ahead", type=int, default=AHEAD, help="arms that start together, and then take turns"
    )
    run.add_argument(
        "--begin",
        type=Path,
        help="a file: arms start, but none trains before it is there, and the minutes count from "
        "then; so programs of others can still use the GPUs",
    )
    run.add_argument(
        "--begin-minutes", type=float, default=60.0, help="how long that file may take to come"
    )
    run.add_argument("--commit", help="what is measured, where the checkout has no git")
    run.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="trainings that run on this host at the same time, each with its own GPUs and cores",
    )
    run.add_argument("--list", action="store_true", help="print the commands, run none")
    options = parser.parse_args(arguments)
    if options.command == "picture":
        from tools.bench.cards.picture import draw  # wants matplotlib, which trainings do not

        options.out.write_text(draw(kept_cards()))
        return 0
    models = [each for each in MODELS if not options.models or each.name in options.models]
    if options.command == "keep":
        gpus = gpus_of(options.file)
        ran = {model.name: read_records(folder_of(options.out, model, gpus)) for model in models}
        for name, added in keep(options.file, ran).items():
            print(f"{name}: {', '.join(added) or 'nothing'}")
        return 0
    if options.command == "pages":
        for model in models:
            records = read_records(folder_of(options.out, model, options.gpus))
            print("\n".join(markdown(card_of(model, records, options.gpus))))
        return 0
    script = options.megatron / "pretrain_gpt.py"
    if options.list:
        for model in models:
            for arm in arms_of(model, options.gpus):
                seen = folder_of(options.out, model, options.gpus) / f"{arm.name}.seen"
                print(" ".join(command_of(model, arm, script, seen, options.gpus)))
        return 0
    arms, arms_of_models = names_of_arms(models, options.gpus)
    unknown = [name for name in options.arms or () if name not in {*arms, *arms_of_models}]
    if unknown:
        parser.error(f"got --arms {', '.join(unknown)}, wanted {', '.join(arms)}, or MODEL/ARM")
    if not common.can_train(script):
        return 2
    return run_all(options, models, script)


def names_of_arms(models: list[Model], gpus: int) -> tuple[list[str], list[str]]:
    """Returns what ``--arms`` may name on so many GPUs: arms of all models, and those of each."""
    arms = [(model, arm) for model in models for arm in arms_of(model, gpus)]
    of_all = dict.fromkeys(arm.name for _, arm in arms)
    return list(of_all), [f"{model.name}/{arm.name}" for model, arm in arms]


def run_all(options: argparse.Namespace, models: list[Model], script: Path) -> int:
    """Runs arms while there is time; the exit status is 1 if any failed."""
    end = None
    todo = all_todo(options.out, models, options.gpus, options.arms)
    failed = False
    waiting: deque[Started] = deque()
    with ExitStack() as stack:
        while todo or waiting:
            # All of a batch start before its first arm counts, so that no start delays another.
            batch = [] if waiting else todo[: options.ahead]
            for model, arm in batch:
                folder = folder_of(options.out, model, options.gpus)
                waiting.append(Started(model, arm, script, folder, options.gpus))
                stack.callback(waiting[-1].leave)
            todo = todo[len(batch) :]
            if end is None:
                if options.begin is not None:
                    wait_for(options.begin, options.begin_minutes)
                end = time.monotonic() + 60 * options.minutes
            started = waiting.popleft()
            limit_s = min(options.arm_seconds, end - time.monotonic() - ENDING_S)
            if limit_s < LEAST_S:
                print(f"{started.model.name} {started.arm.name}: no time is left", flush=True)
                break
            failed |= not is_done(run_one(options, started, limit_s))
    return int(failed)


def wait_for(file: Path, minutes: float) -> None:
    """Waits until a file is there.

    Raises:
        SystemExit: It has not come in that time.
    """
    end = time.monotonic() + 60 * minutes
    while not file.exists():
        if time.monotonic() > end:
            raise SystemExit(f"error: --begin {file} has not come in {minutes:g} minutes")
        time.sleep(0.02)


def run_one(options: argparse.Namespace, started: Started, limit_s: float) -> dict[str, Any]:
    """Runs an arm, and writes its record, which it returns."""
    model, arm = started.model, started.arm
    folder = folder_of(options.out, model, options.gpus)
    before = read_records(folder).get(arm.name)
    said = command_of(model, arm, Path("pretrain_gpt.py"), Path("seen.json"), options.gpus)
    named = options.megatron / "COMMIT"
    record = {
        **started.train(limit_s),
        "tries": tries(before) + 1,
        "megatron": named.read_text().strip() if named.is_file() else "unknown",
        "command": " ".join(["python", *said[1:]]),
        "variables": arm.variables,
        "at_once": options.at_once,
        **common.machine(options.commit),
    }
    write_record(folder, arm, record)
    ms = record["iteration_ms"][-1] if record["iteration_ms"] else float("nan")
    print(
        f"{model.name} {arm.name}: {record['ended']} in {record['seconds']} s, "
        f"{len(record['losses'])} iterations, last {ms:.0f} ms",
        flush=True,
    )
    if not is_done(record):
        log = (folder / f"{arm.name}.log").read_text()
        print("\n".join(end_of(log)), flush=True)
    return record


def end_of(log: str, num_lines: int = 15) -> list[str]:
    """Returns the last lines of a log, after the first lines that name an error."""
    lines = [line[:400] for line in log.splitlines()]
    return [*[line for line in lines if "Error" in line][:4], "...", *lines[-num_lines:]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
