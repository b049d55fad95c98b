"""Prints of the examples, and their verdict on a run, alone and against the framework's own."""

import argparse
import sys

import torch
import torch.distributed as dist
from tqdm import tqdm

HAS_GPU = torch.cuda.is_available()


def log(message: str) -> None:
    """Prints once, above the progress bar if there is one."""
    if dist.get_rank() == 0:
        tqdm.write(message, file=sys.stdout)
        sys.stdout.flush()


def compare(
    losses: list[float], stock: list[float], stock_name: str, args: argparse.Namespace
) -> list[str]:
    """Prints the losses of both runs side by side and returns what does not agree.

    Routing is a step function: once rounding has sent one token to another expert, the runs drift
    apart, as two runs of one dispatcher on different machines do; in bfloat16 on GPUs this happens
    sooner. So the first iterations have to agree one by one, and the last ones in their mean.
    """
    num_first, first_bound = (10, 1e-2) if HAS_GPU else (20, 1e-4)
    differences = [abs(ours - theirs) for ours, theirs in zip(losses, stock, strict=True)]
    log("")
    log(f"{'iteration':>9} {'flashmoe':>10} {stock_name.lower():>10} {'difference':>11}")
    for iteration in [1, *range(args.log_interval, args.train_iters + 1, args.log_interval)]:
        at = iteration - 1
        log(f"{iteration:>9} {losses[at]:>10.5f} {stock[at]:>10.5f} {differences[at]:>11.2e}")
    last = mean_of_last(losses, args) - mean_of_last(stock, args)
    largest = float(torch.tensor(differences[:num_first], dtype=torch.float64).max())  # or NaN
    bounds = (
        (f"first {num_first} iterations, largest", largest, first_bound),
        ("last tenth, of the means", abs(last), 1e-1 if HAS_GPU else 5e-2),
    )
    failures = []
    for name, difference, bound in bounds:
        log(f"difference over the {name}: {difference:.2e} (allowed: {bound})")
        if not difference <= bound:
            failures.append(f"flashmoe and {stock_name} do not agree over the {name}")
    return failures


def judge_reload(saved: float, reloaded: float) -> list[str]:
    """Says what is wrong with a loss of a checkpoint, compared with that of the saved model."""
    if abs(reloaded - saved) <= (1e-2 if HAS_GPU else 1e-4):
        return []
    return ["the checkpoint does not give the loss that the saved model had"]


def verdict(
    losses: list[float], failures: list[str], args: argparse.Namespace, name: str = "loss"
) -> int:
    """Prints how far the loss of a run fell, and what is wrong; returns the exit status.

    Args:
        losses: The loss of each iteration.
        failures: What else is wrong with the run.
        args: Its ``train_iters``.
        name: What the framework calls the loss.
    """
    if not mean_of_last(losses, args) < losses[0]:
        failures = [*failures, f"the {name} did not fall"]
    log(
        f"{name} of flashmoe: {losses[0]:.3f} at the first iteration, "
        f"{mean_of_last(losses, args):.3f} at the end"
    )
    for failure in failures:
        log(f"failed: {failure}")
    return 1 if failures else 0


def mean_of_last(losses: list[float], args: argparse.Namespace) -> float:
    """The mean of the last tenth of the losses."""
    tenth = max(args.train_iters // 10, 1)
    return sum(losses[-tenth:]) / tenth
