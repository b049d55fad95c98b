"""From launches to loggers: takes records, adds up the ranks, writes what has arrived."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.measured.calibration import Calibration
from flashmoe_megatron.telemetry.metrics import compute_metrics
from flashmoe_megatron.telemetry.record import LaunchRecord
from flashmoe_megatron.telemetry.reduce import Reduction, agree_calibration, agree_layout
from flashmoe_megatron.telemetry.sinks import Sink
from flashmoe_megatron.telemetry.totals import LayerPlace, Layout, Totals

logger = logging.getLogger("flashmoe_megatron")

TakeRecords = Callable[[], Iterable[LaunchRecord]]
Annotate = Callable[[Totals], None]


class Reporter:
    """Reports a rank's launches together with all others', one report late.

    No step waits for a device or a peer: launches that have not finished belong to the next report,
    and a report is written by the step that finds its reduction done. Making one is collective over
    the group, and so is every step that is a multiple of the interval; ranks make the same steps.

    Records of evaluation are dropped; a layer that is trained in evaluation mode gets a warning.

    Where ranks have different layers of one number there are no metrics: a rank with sinks says so,
    and training goes on.

    Args:
        places: This rank's layers by number; none is fine.
        group: All ranks; ``None`` for this one alone.
        device: Where the group communicates.
        chosen: Names of metrics.
        take_records: Gives what has finished since it was last asked.
        annotate: Adds to this rank's totals what no record has, such as the heap's size.
        calibration: For the overlap efficiency; one rank's is every rank's.
        sinks: Where this rank writes; none on ranks that write nothing.
        interval: Steps between reports.
    """

    def __init__(
        self,
        places: Mapping[int, LayerPlace],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        chosen: frozenset[str],
        take_records: TakeRecords,
        annotate: Annotate = lambda _: None,
        calibration: Calibration | None = None,
        sinks: Sequence[Sink] = (),
        interval: int = 1,
    ) -> None:
        self._places = dict(places)
        self._group = group
        self._device = device
        self._chosen = chosen
        self._take_records = take_records
        self._annotate = annotate
        self._sinks = tuple(sinks)
        self._interval = interval
        self._pending: deque[tuple[int, Reduction]] = deque()
        self._told: set[str] = set()
        self._is_on = True
        try:
            self._layout = agree_layout(places, group)
        except ConfigError as error:  # on every rank alike
            self._is_on = False
            self._layout = Layout({})
            if self._sinks:
                self._tell(f"no metrics of flashmoe: {error}")
        self._calibration = agree_calibration(calibration, group)
        self._take_records()  # what was before belongs to no step
        self._totals = Totals(self._layout, self._places)
        self._since = time.monotonic()

    def step(self, step: int, *, now: int | None = None, is_last: bool = False) -> None:
        """Ends a step of training.

        Args:
            step: Its number.
            now: The step that loggers receive with earlier ones, by default this one; has not
                gone back since the last call.
            is_last: No further step comes: waits for this step's report, and writes it.
        """
        if not self._is_on:
            return
        self._write(step if now is None else now)
        if step % self._interval == 0:
            self._collect()
            self._annotate(self._totals)
            began, self._since = self._since, time.monotonic()
            self._totals.seconds = self._since - began
            self._pending.append((step, Reduction(self._totals, self._group, self._device)))
            self._totals = Totals(self._layout, self._places)
        if is_last:
            self._write(step, wait=True)

    def write_arrived(self, now: int) -> None:
        """Writes reports whose reductions are done, between steps or after the last one.

        Args:
            now: As for :meth:`step`.
        """
        self._write(now)

    def _collect(self) -> None:
        for record in self._take_records():
            if record.is_evaluation:
                if record.direction == "backward":
                    self._tell(
                        "launches of layers in evaluation mode are in no metric, although some "
                        "have a backward: call train() on what is trained"
                    )
                continue
            try:
                self._totals.add(record)
            except ConfigError as error:  # another model in this process has launched, say
                self._tell(f"some launches are in no metric: {error}")

    def _write(self, now: int, *, wait: bool = False) -> None:
        while self._pending and (wait or self._pending[0][1].is_done()):
            step, reduction = self._pending.popleft()
            totals = reduction.result()  # without sinks, too: a rank that leaves early is missed
            if not self._sinks:
                continue
            values = compute_metrics(totals, self._chosen, self._calibration)
            self._check_overlap(values)
            for sink in self._sinks:
                sink.write(values, step=step, now=now)

    def _check_overlap(self, values: Mapping[str, float]) -> None:
        if self._calibration is None or "overlap_efficiency" not in self._chosen:
            return
        if not any(key.endswith("/overlap_efficiency") for key in values):
            self._tell(
                "no overlap efficiency: the calibration file has no time for the numbers of "
                "tokens that the layers are called with"
            )

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning("%s", message)
