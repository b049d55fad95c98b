"""One run of wandb for a sweep: its curves over ranks, its table and its figure.

wandb is a convenience: where it is missing or does not answer, one warning is given, and the folder
has all that was found, in wandb's own format if that can be written.
"""

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("flashmoe.weak_scaling")

PROJECT = "flashmoe-weak-scaling"
SERVER_TIMEOUT_S = 20.0
LOCAL_TIMEOUT_S = 90.0  # wandb's own process starts slowly on a busy machine
FINISH_TIMEOUT_S = 30.0  # what was not sent by then stays in the folder


class Sweep(NamedTuple):
    """All that was found in a sweep.

    Attributes:
        name: Names the run; the folder's name is in it.
        config: All that was decided before.
        axis: The key of the number of ranks in ``curves``.
        curves: Metrics of each number of ranks, in order.
        columns: The titles of ``rows``.
        rows: One for each point.
        figure: The PNG, ``None`` where nothing was measured.
        title: The figure's.
        failed: Whether a point has failed.
    """

    name: str
    config: dict[str, Any]
    axis: str
    curves: list[dict[str, float]]
    columns: list[str]
    rows: list[list[Any]]
    figure: Path | None
    title: str
    failed: bool


def wandb_mode() -> str:
    """``WANDB_MODE``; without it "online" if there is a key to log in with, else "offline"."""
    default = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    return os.environ.get("WANDB_MODE") or default


def log_sweep(folder: Path, sweep: Sweep) -> None:
    """Logs a sweep; never raises an error of wandb, but warns once.

    Args:
        folder: wandb writes into it.
        sweep: What was found.
    """
    try:
        import wandb
    except ImportError:
        logger.warning("wandb is not installed: %s alone has the results", folder)
        return
    mode = wandb_mode()
    try:
        _log(folder, sweep, mode)
    except (wandb.Error, OSError) as error:
        logger.warning("wandb cannot be used %s, %s has the results: %s", mode, folder, error)
        if mode == "online":  # what it writes offline can be sent by `wandb sync`
            try:
                _log(folder, sweep, "offline")
            except (wandb.Error, OSError):
                return  # which is as it was said


def _log(folder: Path, sweep: Sweep, mode: str) -> None:
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        group=os.environ.get("WANDB_RUN_GROUP") or None,
        name=sweep.name,
        dir=str(folder),
        mode=mode,
        config=sweep.config,
        settings=wandb.Settings(
            silent=True,
            console="off",
            x_disable_stats=True,
            init_timeout=SERVER_TIMEOUT_S if mode == "online" else LOCAL_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        ),
    )
    run.define_metric(sweep.axis, hidden=True)
    run.define_metric("*", step_metric=sweep.axis)
    for metrics in sweep.curves:
        run.log(metrics)
    shown: dict[str, Any] = {"points": wandb.Table(columns=sweep.columns, data=sweep.rows)}
    if sweep.figure is not None:
        shown["scaling"] = wandb.Image(str(sweep.figure), caption=sweep.title)
    run.log({**shown, "failed": int(sweep.failed)})
    run.finish(exit_code=int(sweep.failed))
