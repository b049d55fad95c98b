"""Reports the fused layers' metrics to DeepSpeed's monitor, on its own axis of samples."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.deepspeed.routed import RoutedExperts
from flashmoe_megatron.adapters.deepspeed.routes import RouteCounter, RouteReader
from flashmoe_megatron.adapters.deepspeed.settings import Settings
from flashmoe_megatron.adapters.experts import GroupBackends
from flashmoe_megatron.adapters.metrics import FILE_NAME, Figures, warn_without_wandb
from flashmoe_megatron.eager import eager
from flashmoe_megatron.measured.calibration import Calibration
from flashmoe_megatron.telemetry.registry import choose_metrics
from flashmoe_megatron.telemetry.reporter import Reporter
from flashmoe_megatron.telemetry.sinks import Guarded, JsonLines, Sink
from flashmoe_megatron.telemetry.totals import Totals


class MonitorSink:
    """DeepSpeed's monitor: its wandb, TensorBoard, CSV files and Comet."""

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor

    def write(self, values: Mapping[str, float], *, step: int, now: int) -> None:
        """Writes as every :class:`~flashmoe_megatron.telemetry.sinks.Sink`, by samples."""
        self._monitor.write_events([(key, value, now) for key, value in values.items()])


class EngineMetrics:
    """Reports the fused layers of an engine before the forwards that follow its steps.

    Making one is collective over all ranks: pipeline stages have layers of their own, and one rank
    writes for all.
    """

    def __init__(
        self,
        engine: Any,
        experts: Sequence[RoutedExperts],
        counters: Sequence[RouteCounter],
        backends: Callable[[], Iterable[GroupBackends]],
        settings: Settings,
        calibration: Calibration | None,
    ) -> None:
        self._engine = engine
        self._figures = Figures(
            experts, lambda: (one for group in backends() for one in group.backends())
        )
        self._routes = RouteReader(counters)
        self._last_step = int(engine.global_steps)
        self._reporter = Reporter(
            {one.layer: one.place for one in experts},
            make_group(engine.device),
            engine.device,
            chosen=choose_metrics(settings.metrics),
            take_records=self._figures.take_records,
            annotate=self._annotate,
            calibration=calibration,
            sinks=_sinks(engine),
            interval=settings.metrics_interval,
        )

    @eager  # engine.compile() takes the hooks of a forward along
    def __call__(self) -> None:
        """Ends a step, if one has ended. Collective over all ranks, whose steps agree.

        DeepSpeed has no end that all ranks reach together, so evaluation writes the last report.
        """
        before, step = self._last_step, int(self._engine.global_steps)
        self._last_step = step
        now = int(self._engine.global_samples)
        if step == before + 1:  # any other that is new comes from a checkpoint
            self._reporter.step(step, now=now)
        elif not self._engine.module.training:  # the last step may be over
            self._reporter.write_arrived(now)

    def _annotate(self, totals: Totals) -> None:
        self._figures.annotate(totals)
        totals.routes_chosen, totals.routes_kept = self._routes.read()


def make_group(device: torch.device) -> dist.ProcessGroup:
    """A group of all ranks for the reports of one engine. Collective over all ranks.

    Reports begin in forwards, and one rank may run a forward alone, to evaluate for example. In
    a group that anybody else uses, this rank's report would pair with whatever the others do next.
    """
    world = dist.group.WORLD
    assert world is not None
    # Ranks that wait elsewhere while another evaluates begin their report that much later.
    limit = world._get_backend(device).options._timeout
    group: dist.ProcessGroup = dist.new_group(timeout=limit)
    return group


def _sinks(engine: Any) -> list[Sink]:
    """The file and the monitors, on the rank on which DeepSpeed has its monitors."""
    if dist.get_rank() != 0:
        return []
    kept = str(_folder(engine.monitor.monitor_config) / FILE_NAME)
    return [
        Guarded(JsonLines(Path(kept)), kept),
        Guarded(MonitorSink(engine.monitor), "DeepSpeed's monitor", kept),
    ]


def _folder(config: Any) -> Path:
    for monitor in (config.csv_monitor, config.tensorboard):
        if monitor.enabled and monitor.output_path:
            return Path(str(monitor.output_path), str(monitor.job_name))
    return Path()


@contextlib.contextmanager
def wandb_may_fail() -> Iterator[None]:
    """Lets an engine be made where DeepSpeed cannot start its wandb monitor."""
    from deepspeed.monitor import monitor

    stock = monitor.WandbMonitor

    def start(config: Any) -> Any:
        try:
            return stock(config)
        except Exception as error:  # noqa: BLE001 - a logger's failure is not worth a training run
            warn_without_wandb(error, FILE_NAME)
            return None

    monitor.WandbMonitor = start
    try:
        yield
    finally:
        monitor.WandbMonitor = stock
