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
SERVER_TIMEOUT_S = 20.0
LOCAL_TIMEOUT_S = 90.0  # wandb's own process starts slowly on a busy machine
FINISH_TIMEOUT_S = 30.0  # what was not sent by then stays in the folder


def metrics_of(row: dict[str, Any]) -> dict[str, Any]:
    """A line of ``results.jsonl`` as metrics.

    Keys: ``PASS/IMPLEMENTATION_ms`` (median), ``PASS/IMPLEMENTATION_mtokens_per_s`` (of all GPUs),
    ``PASS/speedup`` (unfused over fused; above 1 the kernel is faster), ``memory/...`` in bytes,
    ``error/IMPLEMENTATION`` (largest relative L2 error), ``kernel/DIRECTION_ms``, ``floor_ms``.
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
    for direction, timing in result.get("kernels", {}).items():
        found[f"kernel/{direction}_ms"] = timing["median_ms"]
    if "floor_ms" in result:
        found["floor_ms"] = result["floor_ms"]
    return found


def wandb_mode() -> str:
    """``WANDB_MODE``; without it "online" if there is a key to log in with, else "offline"."""
    default = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    return os.environ.get("WANDB_MODE") or default


class RunLog:
    """Logs finished runs of one group.

    Args:
        folder: wandb writes into it.
        group: All runs are in it, unless ``WANDB_RUN_GROUP`` names one.
        way_out: What to do where wandb is missing, for the warning.
    """

    def __init__(self, folder: Path, group: str, way_out: str = "install it to have runs") -> None:
        self._folder = folder
        self._group = os.environ.get("WANDB_RUN_GROUP") or group
        self._way_out = way_out
        self._mode: str | None = wandb_mode()

    def add(
        self, name: str, config: dict[str, Any], metrics: dict[str, Any], *, failed: bool = False
    ) -> None:
        """Logs one run; never raises for what wandb cannot do, but warns once."""
        if self._mode is None:
            return
        try:
            import wandb
        except ImportError:
            self._mode = None
            logger.warning(
                "wandb is not installed: results are kept in %s alone; %s",
                self._folder,
                self._way_out,
            )
            return
        try:
            self._log(wandb, name, config, metrics, failed=failed)
        except (wandb.Error, OSError) as error:
            if self._mode == "offline":
                self._mode = None
                logger.warning("wandb cannot be used, %s has all: %s", self._folder, error)
                return
            self._mode = "offline"
            logger.warning(
                "wandb's server cannot be used, its runs are kept in %s for `wandb sync`: %s",
                self._folder / "wandb",
                error,
            )
            self.add(name, config, metrics, failed=failed)

    def _log(
        self,
        wandb: Any,
        name: str,
        config: dict[str, Any],
        metrics: dict[str, Any],
        *,
        failed: bool,
    ) -> None:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            group=self._group,
            name=name,
            job_type="point",
            dir=str(self._folder),
            mode=self._mode,
            config=config,
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                init_timeout=SERVER_TIMEOUT_S if self._mode == "online" else LOCAL_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
            ),
        )
        run.log(metrics)
        run.finish(exit_code=int(failed))


class ExperimentLog:
    """Logs points of the experiments.

    Args:
        folder: The run's folder.
        settings: What all points share.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._settings = settings
        self._log = RunLog(
            folder,
            f"weak-scaling-{folder.resolve().name}",
            f"`python -m tools.weak_scaling log {folder}` logs them where it is",
        )

    def add(self, row: dict[str, Any]) -> None:
        """Logs one line of ``results.jsonl``."""
        config = {
            **row["point"],
            "settings": self._settings.as_dict(),
            "machine": row["machine"],
            **({"reason": row["reason"]} if "reason" in row else {}),
        }
        self._log.add(row["key"], config, metrics_of(row), failed=row["status"] != "ok")
