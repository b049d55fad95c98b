"""Checks the kernel on this machine's GPUs, whatever their number, and records the result.

One command runs, each in bounded time: the single-GPU tests (up to 8 virtual ranks on one GPU), in
several processes on each GPU where pytest-xdist is installed, and after them alone the tests that
judge times; the multi-GPU tests where there are 2 or 4 GPUs, faults of ranks there, DeepSpeed
compared with its own layers where it is installed, and NVIDIA's compute-sanitizer on a small case
where it is installed. The library has to be built (``tools/build.py``); the package is used from
the checkout.

``--stress`` runs nothing of this but the layer, again and again, in random order, with random
lateness and in poisoned memory, on virtual ranks and on several GPUs, for ``--stress-seconds``
together; every result has to repeat its bits. Where ``libflashmoe_delays.so`` is built
(``tools/build.py --delays``) half of the runs are its, whose kernels are late at random, too.

Run: ``python tools/gpu_check.py [--stress] [--out DIR]``. The record is a JSON file
``DIR/DATE-gpu-check-Nx.json``, for a stress ``DIR/DATE-gpu-stress-Nx.json``, in ``runs`` unless
``--out`` names another folder, with ``-2``, ``-3`` and so on for the later ones of a day; what was
asked for and not run is in it as skipped, with the reason. The exit status is 0 if nothing failed,
1 if something did or nothing ran, which leaves no record, and 2 if there is no GPU to check.
"""

import argparse
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs"

SHARED_GPUS = "FLASHMOE_TEST_GPUS"
"""Environment variable with GPUs, as "0,1": processes of xdist take one each, in turn."""
SINGLE_LIMIT_S = 480
SINGLE_PROCESSES = 3
ALONE_LIMIT_S = 90
MULTI_LIMIT_S = 260
DEEPSPEED_LIMIT_S = 250
FAULTS_LIMIT_S = 400
SANITIZER_LIMIT_S = 75
STRESS_MARGIN_S = 90  # a run also has to load kernels and to end
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_ERROR = 86  # compute-sanitizer ends so where it finds something

PARTS = ("single", "multi", "faults", "deepspeed", "sanitizer")


@dataclass(frozen=True)
class Tests:
    """Tests that pytest runs together.

    Attributes:
        part: One of ``PARTS``.
        name: What they check.
        path: Their file or folder.
        limit_s: They are ended then.
        marks: An expression of pytest's markers that chooses among them.
        chosen: An expression of names that chooses further.
        processes: How many share them where pytest-xdist is installed; else one takes all of them,
            and has as many times the limit.
        gpus: How many GPUs these processes share.
        why_not: Why they cannot run here.
    """

    part: str
    name: str
    path: str
    limit_s: float
    marks: str = "gpu or multi_gpu"
    chosen: str = ""
    processes: int = 1
    gpus: int = 1
    why_not: str = ""


@dataclass
class Check:
    """One part of the record.

    Attributes:
        name: What was checked.
        status: "passed", "failed", "timed out" or "skipped".
        command: As it can be run again.
        seconds: How long it took.
        reason: Why it was skipped or what went wrong, if not in ``failures``.
        counts: Tests passed, failed and skipped.
        failures: Each failed test's name and the first line of its message.
        report: What else the part tells of itself.
    """

    name: str
    status: str
    command: str = ""
    seconds: float = 0.0
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


def torchrun(ranks: int) -> list[str]:
    """The command that starts ranks on this host, without the program that they run."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks)]


def run_bounded(
    command: list[str], limit_s: float, *, tail: int = 0, variables: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Runs a command in the checkout.

    Args:
        command: Program and arguments.
        limit_s: Then it is ended.
        tail: Keep this many characters of its output and print none; 0 prints as it comes.
        variables: Environment variables of its own.

    Returns:
        Its exit status, ``None`` if it ran out of time; and the end of its output.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = spawn(command, output if tail else None, variables=variables)
        status = wait_bounded(process, limit_s)
        output.seek(0)
        return status, output.read()[-tail:] if tail else ""


def spawn(
    command: list[str], output: TextIO | None, *, variables: dict[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Starts a command in the checkout, with a session of its own.

    Args:
        command: Program and arguments.
        output: Takes what it prints; ``None`` prints as it comes.
        variables: Environment variables of its own.
    """
    environment = dict(os.environ, PYTHONUNBUFFERED="1", **(variables or {}))
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part
    )
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
    )


def wait_bounded(process: "subprocess.Popen[bytes]", limit_s: float) -> int | None:
    """Returns a process's exit status, ``None`` if it was ended after so many seconds."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        end(process)
        return None
    except KeyboardInterrupt:  # it reaches this process alone
        end(process)
        raise


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process and what it started: politely first, so that torchrun ends its ranks."""
    # torchrun kills ranks that live 30 s on; it alone can, since each has a session of its own.
    for how, patience_s in ((signal.SIGTERM, 45), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, how)
            process.wait(patience_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return


def checked(
    name: str,
    command: list[str],
    limit_s: float,
    *,
    tail: int = 0,
    variables: dict[str, str] | None = None,
) -> tuple[Check, str]:
    """Runs a command by :func:`run_bounded`; its exit status is the result of a check.

    Returns:
        The check, whose command names no path of this machine's interpreter; and the output's end.
    """
    start = time.monotonic()
    status, output = run_bounded(command, limit_s, tail=tail, variables=variables)
    check = Check(
        name,
        status="timed out" if status is None else "failed" if status else "passed",
        command=" ".join(["python" if word == sys.executable else word for word in command]),
        seconds=round(time.monotonic() - start, 1),
    )
    if status is None:
        check.reason = f"not done after {limit_s:.0f} s"
    elif status:
        check.reason = f"ended with status {status}"
    return check, output


def run_tests(tests: Tests) -> Check:
    """Runs tests with pytest, which prints a failure when it happens, and reads its report."""
    shared = tests.processes > 1 and importlib.util.find_spec("xdist") is not None
    processes = tests.processes if shared else 1
    limit_s = tests.limit_s * tests.processes / processes
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", tests.path, "-m", tests.marks]
        command += ["-k", tests.chosen, "-q", "--tb=short"]
        variables: dict[str, str] = {}
        if shared:
            command += ["-n", str(processes), "--dist", "worksteal"]
            # The oracle of each takes every core otherwise.
            variables[SHARED_GPUS] = visible_gpus(tests.gpus)
            variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (processes + 1)))
        # The project's own options are left out: a GPU machine may lack their plugins.
        options = ["-o", "addopts=", "-p", "no:cacheprovider", f"--junitxml={report}"]
        options += ["--durations=8", "--maxfail=30", "--at-once"]
        check, _ = checked(tests.name, [*command, *options], limit_s, variables=variables)
        check.command = shlex.join(["python", *command[1:]])
        if report.exists():
            _read_report(report, check)
    if check.status == "passed" and not check.counts.get("passed"):
        check.status, check.reason = "failed", "no test ran"
    check.report["processes"] = processes
    return check


def visible_gpus(count: int) -> str:
    """Returns the first so many GPUs of those that CUDA is to see, as "0,1"."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(visible.split(",")[:count] if visible else map(str, range(count)))


def _read_report(report: Path, check: Check) -> None:
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(report).iter("testcase"):
        problem = case.find("failure")
        if problem is None:
            problem = case.find("error")
        if problem is not None:
            counts["failed"] += 1
            lines = problem.get("message", "").splitlines()
            check.failures[f"{case.get('classname')}::{case.get('name')}"] = (lines or [""])[0]
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    check.counts = counts


def find_sanitizer() -> str | None:
    """Finds compute-sanitizer: on the path, in a CUDA toolkit or in a wheel."""
    homes = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    homes += sorted(Path("/usr/local").glob("cuda*"))
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += [home / folder for folder in ("bin", "compute-sanitizer") for home in homes]
    for entry in map(Path, sys.path):
        folders += [found.parent for found in sorted(entry.glob("nvidia/**/compute-sanitizer"))]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, folders)))


def run_sanitizer(tool: str) -> Check:
    """Runs one tool of compute-sanitizer on a small forward and backward."""
    name = f"compute-sanitizer {tool}"
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return Check(name, "skipped", reason="compute-sanitizer is not installed")
    _, output = run_bounded([sanitizer, "--require-cuda-init", "no", "/bin/true"], 30, tail=2000)
    if "Error" in output or not output:
        reason = next((line for line in output.splitlines() if "Error" in line), "no output")
        return Check(name, "skipped", reason=f"compute-sanitizer does not run here: {reason}")
    command = [sanitizer, "--tool", tool, f"--error-exitcode={SANITIZER_ERROR}"]
    command += [sys.executable, "-m", "tests.gpu.sanitized"]
    if tool == "initcheck":
        command += ["--zeroed", "--ranks", "1"]  # it runs one launch at a time
    check, output = checked(
        name,
        command,
        SANITIZER_LIMIT_S,
        tail=6000,
        # torch's cache would hide accesses past the end of an allocation.
        variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    print(output)
    check.command = check.command.replace(sanitizer, "compute-sanitizer")
    told = [line for line in output.splitlines() if line.startswith("ranks ") or "SUMMARY" in line]
    check.reason = "; ".join([*told, *([check.reason] if check.reason else [])])
    return check


def run_stress(num_hopper: int, seconds: float, wanted_launches: int) -> list[Check]:
    """Shares the time among numbers of virtual ranks and of GPUs, each with all libraries."""
    package = ROOT / "flashmoe_megatron"
    libraries = [package / "libflashmoe.so"]
    checks = []
    delays = package / "libflashmoe_delays.so"
    if delays.exists():
        libraries.append(delays)
    else:
        reason = "libflashmoe_delays.so is not built: python tools/build.py --delays"
        checks.append(Check("stress with delays", "skipped", reason=reason))
    virtual = [
        [sys.executable, "-m", "tests.gpu.stress", "--ranks", str(ranks)] for ranks in (1, 2, 4, 8)
    ]
    real = [
        [*torchrun(ranks), "-m", "tests.multi_gpu.stress"]
        for ranks in (2, 4, 8)
        if ranks <= num_hopper
    ]
    runs = list(itertools.product(virtual + real, libraries))
    for seed, (command, library) in enumerate(runs):
        checks.append(_run_stress(command, library, seconds / len(runs), seed))
    launches = sum(check.report.get("launches", 0) for check in checks)
    total = Check(
        "launches stressed",
        "passed" if launches >= wanted_launches else "failed",
        reason=f"{launches} launches, wanted at least {wanted_launches}",
        report={
            what: sum(check.report.get(what, 0) for check in checks)
            for what in ("launches", "steps", "scenarios", "compared", "differences")
        },
    )
    return [*checks, total]


def _run_stress(command: list[str], library: Path, seconds: float, seed: int) -> Check:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "report.json")
        arguments = ["--seconds", str(round(seconds)), "--seed", str(seed), "--out", str(out)]
        check, _ = checked(
            f"stress, {' '.join(command[2:])}, {library.name}",
            [*command, *arguments],
            seconds + STRESS_MARGIN_S,
            variables={"FLASHMOE_LIBRARY": str(library)},
        )
        if out.exists():
            check.report = json.loads(out.read_text())
    if report := check.report:
        check.name = f"stress, {report['num_ranks']} {report['mode']} ranks, {library.name}"
        told = f"{report['launches']} launches, {report['differences']} differences"
        check.reason = "; ".join(part for part in (told, check.reason) if part)
        if report["failure"]:
            check.failures["first"] = report["failure"].strip().splitlines()[-1]
    elif check.status == "passed":
        check.status, check.reason = "failed", "there is no report"
    return check


def run_parts(only: list[str], num_hopper: int) -> list[Check]:
    """Runs the parts that are asked for; a part that cannot run here is skipped and says why."""
    one_gpu = "this machine has one Hopper GPU" if num_hopper < 2 else ""
    missing = "" if importlib.util.find_spec("deepspeed") else "deepspeed is not installed"
    several = "tests/multi_gpu"
    tests = [
        Tests(
            "single",
            "one GPU",
            "tests/gpu",
            SINGLE_LIMIT_S,
            marks="gpu and not alone",
            processes=SINGLE_PROCESSES * max(1, num_hopper),
            gpus=max(1, num_hopper),
        ),
        Tests("single", "times on one GPU", "tests/gpu", ALONE_LIMIT_S, marks="gpu and alone"),
        Tests(
            "multi",
            "several GPUs",
            several,
            MULTI_LIMIT_S,
            chosen="not deepspeed and not faults",
            why_not=one_gpu,
        ),
        Tests(
            "faults",
            "faults of ranks",
            f"{several}/test_faults.py",
            FAULTS_LIMIT_S,
            why_not=one_gpu,
        ),
        Tests(
            "deepspeed",
            "DeepSpeed",
            f"{several}/test_deepspeed.py",
            DEEPSPEED_LIMIT_S,
            why_not=one_gpu or missing,
        ),
    ]
    checks = []
    for each in tests:
        if each.part in only and each.why_not:
            checks.append(Check(each.name, "skipped", reason=each.why_not))
        elif each.part in only:
            checks.append(run_tests(each))
    if "sanitizer" in only:
        checks += [run_sanitizer(tool) for tool in SANITIZER_TOOLS]
    return checks


def describe_machine() -> dict[str, Any]:
    """Asks a process of its own, so that no context is held while the checks run."""
    status, output = run_bounded([sys.executable, "-m", "tools.bench.common"], 60, tail=20_000)
    if status != 0:
        raise SystemExit(f"the machine could not be described:\n{output}")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def unused(path: Path) -> Path:
    """A path, or the first numbered one in its folder that does not exist yet."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], numbered) if not one.exists())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--stress", action="store_true", help="repeat launches, and nothing else")
    parser.add_argument("--stress-seconds", type=float, default=900, help="of all its parts")
    parser.add_argument("--stress-launches", type=int, default=20_000, help="that it has to reach")
    parser.add_argument("--out", type=Path, default=RUNS, help="folder of the record")
    parser.add_argument("--commit", help="what is checked, where the checkout has no git")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run"
    )
    options = parser.parse_args()
    if not options.stress_seconds > 0:
        parser.error(f"--stress-seconds {options.stress_seconds}: wanted more than 0")

    machine = describe_machine()
    if options.commit:
        machine["commit"] = options.commit
    num_hopper = machine["compute_capabilities"].count("9.0")
    print(f"GPUs: {', '.join(machine['gpus']) or 'none'}", flush=True)
    if not num_hopper:
        print("no Hopper GPU is usable here: nothing can be checked", file=sys.stderr)
        return 2
    if not (ROOT / "flashmoe_megatron" / "libflashmoe.so").exists():
        print(
            "flashmoe_megatron/libflashmoe.so is missing: build it with `python tools/build.py`",
            file=sys.stderr,
        )
        return 2

    start = time.monotonic()
    if options.stress:
        checks = run_stress(num_hopper, options.stress_seconds, options.stress_launches)
    else:
        checks = run_parts(options.only, num_hopper)
    record = {
        **machine,
        "command": " ".join(["python", "tools/gpu_check.py", *sys.argv[1:]]),
        "seconds": round(time.monotonic() - start, 1),
        "checks": [asdict(check) for check in checks],
    }
    what = "stress" if options.stress else "check"
    path = unused(options.out / f"{machine['date'][:10]}-gpu-{what}-{num_hopper}x.json")
    has_run = any(check.status != "skipped" for check in checks)
    if has_run:
        options.out.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(path)
    print()
    for check in checks:
        counts = ", ".join(f"{number} {what}" for what, number in check.counts.items())
        details = "; ".join(part for part in (counts, check.reason) if part)
        print(f"{check.status:>9}  {check.name} ({details}) in {check.seconds} s")
        for test, message in check.failures.items():
            print(f"           {test}: {message}")
    if not has_run:
        print("nothing ran: there is no record", file=sys.stderr)
        return 1
    print(f"recorded in {path}")
    return int(any(check.status in ("failed", "timed out") for check in checks))


if __name__ == "__main__":
    sys.exit(main())
