"""Adds up the ranks' totals without making anyone wait.

A reduction is started at one report and read at a later one. Everything here that is collective
exchanges vectors whose length the ranks agreed on beforehand, so a rank without records, or without
layers, takes part with zeros and no rank can run ahead into another collective.
"""

import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist

from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.measured.calibration import Calibration
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.streams import index_of
from flashmoe_megatron.telemetry.totals import LayerPlace, Layout, Totals


def agree_layout(places: Mapping[int, LayerPlace], group: dist.ProcessGroup | None) -> Layout:
    """Tells every rank of every rank's layers. Collective over the group; ranks wait, once.

    Args:
        places: This rank's layers by number; none is fine.
        group: All ranks whose figures are reduced; ``None`` for this rank alone.

    Returns:
        The same on every rank.

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

    Args:
        calibration: This rank's; all are of one file.
        group: As for :func:`agree_layout`.

    Returns:
        The first rank's that has one, ``None`` if no rank has.
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
