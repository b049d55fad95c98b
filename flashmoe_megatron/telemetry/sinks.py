"""Writes metrics; training goes on after any error of a sink."""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from flashmoe_megatron.telemetry.registry import PREFIX

logger = logging.getLogger("flashmoe_megatron")

STEP_KEY = f"{PREFIX}step"
"""The key of the values' own step, in loggers whose step is that of the call."""


class Sink(Protocol):
    """Takes the metrics of one report."""

    def write(self, values: Mapping[str, float], *, step: int, now: int) -> None:
        """Writes them.

        Args:
            values: By key.
            step: That the values are of.
            now: The framework's step, which for loggers with one clock must not go back.
        """
        ...


class JsonLines:
    """One line of JSON for every report, in a file that grows; its folder is made.

    A line is complete once it is written, so a run that dies keeps all but the last report; a run
    that resumes goes on in the same file, on a line of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, values: Mapping[str, float], *, step: int, now: int) -> None:
        """See :class:`Sink`."""
        line = json.dumps({"step": step, "time": time.time(), **values}) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the run before was ended within a line
                    line = "\n" + line
            file.write(line.encode())


class WandbSink:
    """A wandb run, or the module after ``init``, with our steps as the axis of our charts."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._is_defined = False

    def write(self, values: Mapping[str, float], *, step: int, now: int) -> None:
        """See :class:`Sink`."""
        if not self._is_defined:
            self._run.define_metric(STEP_KEY, hidden=True)
            self._run.define_metric(f"{PREFIX}*", step_metric=STEP_KEY)
            self._is_defined = True
        self._run.log({**values, STEP_KEY: step}, step=now)


class TensorBoardSink:
    """A writer such as ``torch.utils.tensorboard.SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, values: Mapping[str, float], *, step: int, now: int) -> None:
        """See :class:`Sink`."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)


class Guarded:
    """Another sink, given up with one warning when it fails.

    The warning has its name, and where values are ``kept`` all the same.
    """

    def __init__(self, sink: Sink, name: str, kept: str = "") -> None:
        self._sink: Sink | None = sink
        self._name = name
        self._kept = kept

    def write(self, values: Mapping[str, float], *, step: int, now: int) -> None:
        """See :class:`Sink`."""
        if self._sink is None:
            return
        try:
            self._sink.write(values, step=step, now=now)
        except Exception as error:  # noqa: BLE001 - no logger's failure is worth a training run
            self._sink = None
            logger.warning(
                "%s takes no more metrics of flashmoe: %s: %s; training goes on%s",
                self._name,
                type(error).__name__,
                error,
                self._kept and f", and {self._kept} has them",
            )
