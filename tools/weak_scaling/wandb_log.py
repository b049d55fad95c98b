"""Every point as a run of wandb, all in one group.

wandb is a convenience: where it is missing or does not answer, one warning is given, the
measurements go on, and what they found stays in the folder, in wandb's own format if it is there.
"""

import logging
import os
from pathlib import Path
from typing import Any

from tools.weak_scaling.points import Settings

logger = logging.getLogger("flashmoe.weak_scaling")

PROJECT = "flashmoe-weak-scaling"
INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 30.0  # what was not sent by then stays in the folder


def metrics_of(row: dict[str, Any]) -> dict[str, Any]:
    """A line of ``results.jsonl`` as metrics.

    Keys: ``PASS/IMPLEMENTATION_ms`` (median), ``PASS/IMPLEMENTATION_mtokens_per_s`` (of all GPUs),
    ``PASS/speedup`` (unfused over fused; above 1 the kernel is faster), ``memory/...`` in bytes,
    ``error/IMPLEMENTATION`` (largest relative L2 error), ``floor_ms``.
    """
    if row["status"] != "ok":
        return {"failed": 1}
    result, point = row["result"], row["point"]
    found: dict[str, Any] = {"failed": 0, "imbalance": result["imbalance"]}
    for name, passes in result["times"].items():
        for what, timing in passes.items():
            median = timing["median_ms"]
            found[f"{what}/{name}_ms"] = median
            tokens = point["tokens"] * point["num_gpus"]
            found[f"{what}/{name}_mtokens_per_s"] = tokens / median / 1e3
    for what in result["times"]["fused"]:
        found[f"{what}/speedup"] = found[f"{what}/unfused_ms"] / found[f"{what}/fused_ms"]
    for name, errors in result["errors"].items():
        found[f"error/{name}"] = max(errors.values())
    for name, value in result["memory"].items():
        if isinstance(value, dict):
            found.update({f"memory/{name}/{what}": peak for what, peak in value.items()})
        else:
            found[f"memory/{name}"] = value
    if "floor_ms" in result:
        found["floor_ms"] = result["floor_ms"]
    return found


def wandb_mode() -> str:
    """``WANDB_MODE``; without it "online" if there is a key to log in with, else "offline"."""
    default = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    return os.environ.get("WANDB_MODE") or default


class ExperimentLog:
    """Logs points.

    Args:
        folder: Of the run; wandb writes into it.
        settings: Of all points.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self._mode: str | None = wandb_mode()
        self._group = os.environ.get("WANDB_RUN_GROUP") or f"weak-scaling-{folder.resolve().name}"

    def add(self, row: dict[str, Any]) -> None:
        """Logs one line of ``results.jsonl``; never raises for what wandb cannot do."""
        if self._mode is None:
            return
        try:
            import wandb
        except ImportError:
            self._mode = None
            logger.warning(
                "wandb is not installed: the points are kept in results.jsonl alone; "
                "`python -m tools.weak_scaling log %s` logs them where it is",
                self._folder,
            )
            return
        try:
            self._log(wandb, row)
        except (wandb.Error, OSError) as error:
            if self._mode == "offline":
                self._mode = None
                logger.warning("wandb cannot be used, results.jsonl has all: %s", error)
                return
            self._mode = "offline"
            logger.warning(
                "wandb's server cannot be used, its runs are kept in %s for `wandb sync`: %s",
                self._folder / "wandb",
                error,
            )
            self.add(row)

    def _log(self, wandb: Any, row: dict[str, Any]) -> None:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            group=self._group,
            name=row["key"],
            job_type="point",
            dir=str(self._folder),
            mode=self._mode,
            config={
                **row["point"],
                "settings": self._settings.as_dict(),
                "machine": row["machine"],
                **({"reason": row["reason"]} if "reason" in row else {}),
            },
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
            ),
        )
        run.log(metrics_of(row))
        run.finish(exit_code=int(row["status"] != "ok"))
