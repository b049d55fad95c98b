"""Runs of wandb, all of a sweep in one group.

wandb is a convenience: where it is missing or does not answer, one warning is given, the
measurements go on, and what they found stays in the folder, in wandb's own format if it is there.
"""

import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger("flashmoe.weak_scaling")

PROJECT = "flashmoe-weak-scaling"
SERVER_TIMEOUT_S = 20.0
LOCAL_TIMEOUT_S = 90.0  # wandb's own process starts slowly on a busy machine
FINISH_TIMEOUT_S = 30.0  # what was not sent by then stays in the folder


def wandb_mode() -> str:
    """``WANDB_MODE``; without it "online" if there is a key to log in with, else "offline"."""
    default = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    return os.environ.get("WANDB_MODE") or default


class RunLog:
    """Logs finished runs of one group.

    Args:
        folder: wandb writes into it.
        group: All runs are in it, unless ``WANDB_RUN_GROUP`` names one.
    """

    def __init__(self, folder: Path, group: str) -> None:
        self._folder = folder
        self._group = os.environ.get("WANDB_RUN_GROUP") or group
        self._mode: str | None = wandb_mode()

    def add(
        self, name: str, config: dict[str, Any], metrics: dict[str, Any], *, failed: bool = False
    ) -> None:
        """Logs one run; never raises an error of wandb, but warns once."""
        if self._mode is None:
            return
        try:
            import wandb
        except ImportError:
            self._mode = None
            logger.warning("wandb is not installed: %s alone has the results", self._folder)
            return
        try:
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                group=self._group,
                name=name,
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
            run.log({"failed": int(failed), **metrics})
            run.finish(exit_code=int(failed))
        except (wandb.Error, OSError) as error:
            failed_mode, self._mode = self._mode, None
            logger.warning(
                "wandb cannot be used %s, %s has the results: %s", failed_mode, self._folder, error
            )
            if failed_mode == "online":
                self._mode = "offline"  # what it writes then can be sent by `wandb sync`
                self.add(name, config, metrics, failed=failed)
