"""Runs a framework's own job twice, with our layers and with alltoall, to compare their numbers.

A job is a module that is started again with ``--arm`` and ``--folder``, and leaves its numbers in
the folder as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.external.beside import LAYERS, layers
from tests.external.small_model import EXPERTS

ARMS = ("alltoall", "flashmoe")


def start(module: str, arm: str, folder: Path, ranks: int) -> subprocess.Popen[bytes]:
    """Starts one arm by torchrun, whose output goes to a file."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if arm == "alltoall":
        environment.pop("FLASHMOE_REPLACES", None)
    with open(folder / f"{arm}.log", "wb") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
                *("--nproc_per_node", str(ranks), "-m", module),
                *("--arm", arm, "--folder", str(folder)),
            ],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def numbers_of(arm: str, job: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    """Waits for an arm; returns what it wrote.

    Raises:
        AssertionError: The job failed; its last lines are on stderr.
    """
    if job.wait():
        said = (folder / f"{arm}.log").read_text().splitlines()
        sys.stderr.write("\n".join(said[-80:]) + "\n")
    assert job.returncode == 0, f"{arm}: exit status {job.returncode}"
    found: dict[str, Any] = json.loads((folder / f"{arm}.json").read_text())
    return found


def run(module: str, folder: Path, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs both arms beside each other; returns our numbers and alltoall's."""
    jobs = {arm: start(module, arm, folder, ranks) for arm in ARMS}
    stock, ours = (numbers_of(arm, job, folder) for arm, job in jobs.items())
    return ours, stock


def largest_distance(ours: list[float], stock: list[float]) -> float:
    """Returns the largest relative distance of two lists of as many numbers."""
    pairs = zip(ours, stock, strict=True)
    return max(abs(got - want) / abs(want) for got, want in pairs)


def found_in(models: list[Any], handed: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Describes the layers of a trained model, and the weights that a rollout would get."""
    built = [each for model in models for each in layers(model)]
    return {
        "layers": len(built),
        "ours": sum(hasattr(each, "flashmoe_routed_experts") for each in built),
        "field": built[0].config.moe_token_dispatcher_type,
        "handed": {name: list(each.shape) for name, each in handed.items()},
        "norms": [float(each.float().norm()) for each in handed.values()],
    }


def compare(ours: dict[str, Any], stock: dict[str, Any], tolerances: dict[str, float]) -> str:
    """Compares what both arms found, and their lists by name; returns a line.

    Raises:
        AssertionError: A layer is not ours, a name or a shape is another, the model has not
            learned, or a number is farther from alltoall's than its bound.
    """
    assert (ours["layers"], ours["ours"], stock["ours"]) == (LAYERS, LAYERS, 0), (ours, stock)
    assert list(ours["handed"].items()) == list(stock["handed"].items())
    of_experts = [name for name in ours["handed"] if ".experts." in name]
    assert len(of_experts) == LAYERS * EXPERTS * 3
    worst = {}
    for name, bound in tolerances.items():
        worst[name] = largest_distance(ours[name], stock[name])
        assert worst[name] <= bound, (name, ours[name], stock[name])
    losses = ours["losses"]
    assert losses[-1] < 0.8 * losses[0], losses
    return (
        f"{ours['versions']}: {len(losses)} steps, {LAYERS} layers of ours; the field says "
        f"{ours['field']}; losses {losses[0]:.6f} to {losses[-1]:.6f}, within "
        f"{worst['losses']:.1e} of alltoall's, and norms of gradients within "
        f"{worst['grad_norms']:.1e}; {len(ours['handed'])} tensors for a rollout, "
        f"{len(of_experts)} of experts, with its names and shapes"
    )


def of_command_line(train: Callable[[str, Path], None], both: Callable[[Path], list[str]]) -> None:
    """Trains one arm in a folder if the command line names it, else compares both in a new one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--folder", type=Path, help="where logs and numbers are kept")
    given = parser.parse_args()
    if given.arm:
        train(given.arm, given.folder)
        return
    for line in both(given.folder or Path(tempfile.mkdtemp())):
        sys.stdout.write(f"{line}\n")
