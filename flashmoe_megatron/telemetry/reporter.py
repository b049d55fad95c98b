"""From launches to loggers: takes records, adds up the ranks, writes what has arrived.

No rank waits for another one. A reduction is started at one report and read at a later one. All
that is collective exchanges vectors whose length the ranks agreed on beforehand, so a rank without
records, or without layers, takes part with zeros and no rank can run ahead into another collective.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.measured.calibration import Calibration
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.streams import index_of
from flashmoe_megatron.telemetry.metrics import compute_metrics
from flashmoe_megatron.telemetry.record import LaunchRecord
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

        ``now`` is as for :meth:`step`.
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


def agree_layout(places: Mapping[int, LayerPlace], group: dist.ProcessGroup | None) -> Layout:
    """Tells every rank of every rank's layers. Collective over the group; ranks wait, once.

    A rank may have no layers in ``places``.

    Raises:
        ConfigError: On every rank, if two ranks have different layers of one number.
    """
    known: dict[int, LayerPlace] = {}
    for rank, its_places in enumerate(Ranks(group).gather(dict(places))):
        for layer, place in its_places.items():
            other = known.setdefault(layer, place)
            if other.config != place.config:
                raise ConfigError(
                    f"layer {layer} is {place.config} on rank {rank} and {other.config} on an "
                    "earlier one: wanted one shape, so that their figures can be added"
                )
    return Layout(known)


def agree_calibration(
    calibration: Calibration | None, group: dist.ProcessGroup | None
) -> Calibration | None:
    """Gives every rank the calibration that some have. Collective over the group; ranks wait, once.

    A rank reads the file for its own layers, and the rank that writes metrics may have none.
    Returns the first rank's that has one, ``None`` if no rank has.
    """
    return next((one for one in Ranks(group).gather(calibration) if one is not None), None)


class Reduction:
    """A sum over ranks of each one's totals at one moment, under way.

    Starting one is collective over the group; reading it is not, and any rank may leave it unread.
    Neither waits for a device.

    Args:
        totals: This rank's, of the agreed layout; they are copied.
        group: As for :func:`agree_layout`.
        device: Where the group communicates: the GPU for NCCL, the processor for gloo.
    """

    def __init__(
        self, totals: Totals, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._layout = totals.layout
        self._host = [
            torch.tensor(values, dtype=torch.float64, device="cpu")
            for values in (totals.sums(), totals.maxima())
        ]
        self._works: list[dist.Work] = []
        self._copied: torch.cuda.Event | None = None
        if group is None:
            return
        reduced = [self._move(vector, device) for vector in self._host]
        for vector, operation in zip(reduced, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
            work = dist.all_reduce(vector, operation, group=group, async_op=True)
            assert work is not None
            self._works.append(work)
        if device.type == "cuda":
            self._read_back(reduced, device)
        else:
            self._host = reduced

    def is_done(self) -> bool:
        """Tells whether :meth:`result` would return at once."""
        if self._copied is not None:
            return bool(self._copied.query())  # type: ignore[no-untyped-call]
        return all(work.is_completed() for work in self._works)

    def result(self) -> Totals:
        """The sums and maxima over all ranks; waits if they are not there yet.

        Raises:
            RuntimeError: A rank was lost meanwhile.
        """
        if self._copied is not None:
            self._copied.synchronize()
        else:
            for work in self._works:
                work.wait()
        sums, maxima = (vector.tolist() for vector in self._host)
        return Totals.from_vectors(self._layout, sums, maxima)

    @staticmethod
    def _move(vector: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type != "cuda":
            return vector
        return vector.pin_memory().to(device, non_blocking=True)

    def _read_back(self, reduced: list[torch.Tensor], device: torch.device) -> None:
        """Copies to the host after the collective, on a stream of its own."""
        stream = _stream_for_reading(index_of(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for work in self._works:
                work.wait()  # makes this stream wait, not the host
            self._host = [
                torch.empty(vector.shape, dtype=vector.dtype, device="cpu", pin_memory=True).copy_(
                    vector, non_blocking=True
                )
                for vector in reduced
            ]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(stream)
        for vector in reduced:
            vector.record_stream(stream)


@functools.cache
def _stream_for_reading(index: int) -> torch.cuda.Stream:
    """Returns a GPU's stream for copies to the host.

    There is one for all: torch hands out the same 32 streams in turn, so that with a new one each
    time these copies would soon wait for transfers, and transfers for them.
    """
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
