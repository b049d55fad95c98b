"""The command line; see the package."""

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.arguments import parser_of
from tools.bench import common, fp8_losses
from tools.bench.bench_training.logs import read_log
from tools.bench.cards.watched import TURN
from tools.bench.fp8_losses.judge import judge, table
from tools.bench.fp8_losses.runs import MODEL, RUNS, Run, write_text
from tools.gpu_check import end, spawn, wait_bounded

VARIABLES = {
    "OMP_NUM_THREADS": "2",
    # Several trainings that compile at the same time would start a worker for each core, each.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def main(arguments: list[str]) -> int:
    parser = parser_of(fp8_losses.__doc__, "python -m tools.bench.fp8_losses")
    parser.add_argument("--megatron", type=Path, default=Path(".megatron"))
    parser.add_argument("--out", type=Path, default=Path("runs/fp8_losses"))
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--megabytes", type=int, default=24, help="of text, at most")
    parser.add_argument("--at-once", type=int, default=2, help="runs that share the GPU")
    parser.add_argument("--limit-s", type=float, default=400, help="for all of it")
    parser.add_argument("--commit", help="what is measured, where the checkout has no git")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    parser.add_argument("--judge", type=Path, metavar="RECORD", help="judge a record, run nothing")
    parser.add_argument(
        "--picture", type=Path, metavar="PATH", help="with --judge: draw PATH.png and PATH.svg"
    )
    options = parser.parse_args(arguments)
    if options.picture and not options.judge:
        parser.error("--picture draws a record, wanted --judge RECORD with it")
    if options.judge:
        records = {line["run"]: line for line in common.read_record(options.judge)}
        status = say(records)
        if options.picture and not status:
            from tools.bench.fp8_losses.picture import draw  # needs matplotlib

            print("wrote", *draw(records, options.picture))
        return status
    script, text = options.megatron / "pretrain_gpt.py", options.out.resolve() / "text" / "text"
    if options.list:
        for run in RUNS:
            seen = options.out / f"{run.name}.json"
            print(" ".join(run.command(script, seen, text, options.iterations)))
        return 0
    if not common.can_train(script):
        return 2
    kept = options.out / "fp8_losses.jsonl"
    found = {line["run"]: line for line in common.read_record(kept)} if kept.is_file() else {}
    write_text(text, options.megabytes)
    record = common.Record(
        kept,
        model=" ".join(MODEL.split()),
        megabytes=options.megabytes,
        **common.machine(options.commit),
    )
    todo = [run for run in RUNS if run.name not in found]
    for line in train_all(todo, script.resolve(), text, options):
        if line["status"] == 0:
            record.write(**line)
        found[line["run"]] = line
    return say(found)


def train_all(todo: list[Run], script: Path, text: Path, options: Any) -> Iterator[dict[str, Any]]:
    """Trains by several ways, a few at the same time, which share a GPU without long waits.

    All import at the same time, and then wait for their turn.

    Args:
        todo: The ways.
        script: ``pretrain_gpt.py``.
        text: What :func:`.write_text` wrote.
        options: ``out``, ``iterations``, ``at_once``, and ``limit_s``, after which those that still
            run are ended.

    Yields:
        What is known of each run, as soon as it has ended.
    """
    deadline, out = time.monotonic() + options.limit_s, options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        processes, turns = {}, {}
        for run in todo:
            log = stack.enter_context((out / f"{run.name}.log").open("w"))
            seen, turns[run] = (out / f"{run.name}.{kind}" for kind in ("json", "turn"))
            for left_over in (seen, turns[run]):
                left_over.unlink(missing_ok=True)
            command = run.command(script, seen, text, options.iterations)
            variables = {**VARIABLES, TURN: str(turns[run])}
            processes[run] = spawn(command, log, variables=variables)
            stack.callback(end, processes[run])
        waiting = deque(todo)
        while processes:
            while waiting and len(processes) - len(waiting) < options.at_once:
                turns[waiting.popleft()].touch()
            time.sleep(0.2)
            is_over = time.monotonic() > deadline
            for run, process in list(processes.items()):
                status = wait_bounded(process, 0) if is_over else process.poll()
                if status is not None or is_over:
                    del processes[run]
                    waiting = deque(each for each in waiting if each is not run)
                    turns[run].unlink(missing_ok=True)
                    yield outcome(run, out, status, options.iterations)


def outcome(run: Run, out: Path, status: int | None, wanted: int) -> dict[str, Any]:
    """What a run's log and its file say."""
    seen = out / f"{run.name}.json"
    iterations = [each for _, each in sorted(read_log(out / f"{run.name}.log").items())]
    return {
        "run": run.name,
        "flags": f"--moe-token-dispatcher-type {run.dispatcher} {run.flags}".strip(),
        "status": status,
        "wanted": wanted,
        "losses": [each.loss for each in iterations],
        "iteration_ms": [each.ms for each in iterations],
        **(json.loads(seen.read_text()) if seen.is_file() else {}),
    }


def say(records: dict[str, dict[str, Any]]) -> int:
    """Prints tables and what is wrong; the exit status."""
    print(*table(records), sep="\n")
    failures = judge(records)
    for failure in failures:
        print(f"failed: {failure}", flush=True)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
