"""Puts the metrics of all MoE layers where a Megatron run keeps its own: wandb and TensorBoard.

Works with either alone. Megatron's own script is wrapped at two places: where it ends an iteration,
which every rank does, and where it starts wandb, whose absence must not end a training run. A
training loop of one's own makes a :class:`MoEMetrics` and calls it after each iteration.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron.buckets.links import take_link_totals
from flashmoe_megatron.adapters.megatron.config.asked import has_logger, is_served
from flashmoe_megatron.adapters.megatron.repeat.iteration import ITERATIONS
from flashmoe_megatron.adapters.megatron.routed import RoutedExperts, live_experts
from flashmoe_megatron.adapters.megatron.settings import Settings, current_settings, megatron_args
from flashmoe_megatron.adapters.megatron.shape import ROUTED
from flashmoe_megatron.adapters.metrics import FILE_NAME, Figures, warn_without_wandb
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.telemetry.registry import choose_metrics
from flashmoe_megatron.telemetry.reporter import Reporter
from flashmoe_megatron.telemetry.sinks import Guarded, JsonLines, Sink, TensorBoardSink, WandbSink
from flashmoe_megatron.telemetry.totals import Totals

logger = logging.getLogger("flashmoe_megatron")


class MoEMetrics:
    """Reports the flashmoe layers of this process, together with those of all ranks.

    Args:
        sinks: Where this rank writes; none on ranks that do not.
        model: This rank's model, or its chunks; by default all layers of this process.
        interval: Iterations between reports.
        settings: Say which metrics; by default the current settings.
    """

    def __init__(
        self,
        sinks: Sequence[Sink] = (),
        *,
        model: Iterable[torch.nn.Module] | None = None,
        interval: int = 1,
        settings: Settings | None = None,
    ) -> None:
        self._names = (settings or current_settings()).metrics
        self._chosen = choose_metrics(self._names)
        self._sinks = sinks
        self._model = None if model is None else tuple(model)
        self._interval = interval
        self._reporter: Reporter | None = None
        self._has_begun = False
        self._world: dist.ProcessGroup | None = None

    def __call__(self, iteration: int, *, is_last: bool = False) -> None:
        """Ends an iteration, before anything else is logged of it.

        Collective over all ranks, which make the same calls.

        The first call only looks at what layers there are; metrics begin with the next iteration.
        So it is with the first call after torch.distributed has been initialized again.

        Raises:
            ConfigError: On every rank, in the first call, if ranks were given different metrics or
                intervals.
        """
        if not self._has_begun or self._world is not dist.group.WORLD:
            self._reporter = self._start()
            self._has_begun, self._world = True, dist.group.WORLD
        elif self._reporter is not None:
            self._reporter.step(iteration, now=iteration - 1, is_last=is_last)

    def _start(self) -> Reporter | None:
        """Makes the reporter, ``None`` if no metric is wanted. Collective over all ranks."""
        world = dist.group.WORLD if dist.is_initialized() else None
        Ranks(world).check_same({"metrics": self._names, "interval": self._interval})
        if not self._chosen:
            return None
        found = live_experts()
        if self._model is not None:
            modules = (module for chunk in self._model for module in chunk.modules())
            found = [getattr(module, ROUTED) for module in modules if hasattr(module, ROUTED)]
        layers = _one_of_each_number(_trained(found, world))
        device = torch.empty(0, device=torch.cuda.current_device()).device
        figures = Figures(layers)

        def annotate(totals: Totals) -> None:
            figures.annotate(totals)
            totals.watched = float(ITERATIONS.num_watched)
            totals.repeats = float(ITERATIONS.num_repeats)
            for name, one in take_link_totals().items():
                totals.link_bytes[name] += one.nbytes
                totals.link_timed_bytes[name] += one.timed_bytes
                totals.link_seconds[name] += one.seconds

        return Reporter(
            {routed.layer: routed.place for routed in layers},
            world,
            device,
            chosen=self._chosen,
            take_records=figures.take_records,
            annotate=annotate,
            calibration=next((routed.calibration for routed in layers), None),
            sinks=self._sinks,
            interval=self._interval,
        )


def _trained(
    layers: Sequence[RoutedExperts], group: dist.ProcessGroup | None
) -> list[RoutedExperts]:
    """Leaves out frozen layers where any rank trains some: a teacher's, say. Collective."""
    trained = [routed for routed in layers if routed.is_trained]
    return trained if any(Ranks(group).gather(bool(trained))) else list(layers)


def _one_of_each_number(layers: Iterable[RoutedExperts]) -> list[RoutedExperts]:
    """Leaves one layer of each number, where there are several the same one on every rank.

    Layers of one shape differ in when each was made, and all ranks make them in one order.
    """

    def place(routed: RoutedExperts) -> tuple[int, str, int]:
        return routed.layer, repr(routed.backend.config), -routed.owner

    by_shape = sorted(layers, key=place)
    chosen: dict[int, RoutedExperts] = {}
    for routed in by_shape:
        chosen.setdefault(routed.layer, routed)
    return list(chosen.values())


def patch_training(training: ModuleType) -> None:
    """Reports each iteration of ``megatron.training.training`` before that logs it itself.

    A report is ready one iteration later; wandb then still has the row of its own iteration open.
    """

    def make(original: Function) -> Function:
        signature = inspect.signature(original)
        report = _ScriptMetrics(training)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            report(signature.bind(*args, **kwargs).arguments["iteration"])
            return original(*args, **kwargs)

        return training_log

    _patch_if_there(training, "training_log", make)


def _patch_if_there(module: ModuleType, name: str, make: Callable[[Function], Function]) -> None:
    """Patches a function, or says that a release of Megatron does not have it."""
    if hasattr(module, name):
        patch(module, name, make)
    else:
        logger.warning("%s has no %s: no metrics of flashmoe are logged", module.__name__, name)


class _ScriptMetrics:
    """The metrics of Megatron's own training script, as its arguments say; made when needed."""

    def __init__(self, training: ModuleType) -> None:
        self._training = training
        self._metrics: MoEMetrics | None = None
        self._world: dist.ProcessGroup | None = None
        self._last = -1

    def __call__(self, iteration: int) -> None:
        args = megatron_args()
        if self._world is not dist.group.WORLD:
            # --inprocess-restart makes all groups again, and may go back to an iteration.
            self._world, self._metrics, self._last = dist.group.WORLD, None, -1
        if iteration == self._last or not is_served(args) or not has_logger(args):
            return
        self._last = iteration
        if self._metrics is None:
            interval = getattr(args, "tensorboard_log_interval", None) or 1
            self._metrics = MoEMetrics(self._sinks(args), interval=interval)
        last, exits = getattr(args, "train_iters", None), getattr(args, "exit_interval", None)
        is_last = last is not None and iteration >= last
        self._metrics(iteration, is_last=is_last or bool(exits and iteration % exits == 0))

    def _sinks(self, args: Any) -> list[Sink]:
        """The file and Megatron's writers, on the rank on which Megatron has these."""
        if dist.get_rank() != dist.get_world_size() - 1:
            return []
        kept = str(_folder(args) / FILE_NAME)
        sinks: list[Sink] = [Guarded(JsonLines(Path(kept)), kept)]
        wandb = self._training.get_wandb_writer()
        if wandb is not None:
            sinks.append(Guarded(WandbSink(wandb), "wandb", kept))
        tensorboard = self._training.get_tensorboard_writer()
        if tensorboard is not None:
            sinks.append(Guarded(TensorBoardSink(tensorboard), "TensorBoard", kept))
        return sinks


def _folder(args: Any) -> Path:
    names = ("wandb_save_dir", "save", "tensorboard_dir")
    given = (getattr(args, name, None) for name in names)
    return Path(next((folder for folder in given if folder), "."))


def patch_wandb(global_vars: ModuleType) -> None:
    """Lets training go on where ``megatron.training`` cannot start wandb.

    The run also gets a name and a folder where the user gave none, without which Megatron ends.
    """

    def make(original: Function) -> Function:
        def set_wandb_writer(args: Any) -> None:
            if not is_served(args) or not getattr(args, "wandb_project", None):
                original(args)
                return
            args.wandb_exp_name = args.wandb_exp_name or "flashmoe"
            if not args.wandb_save_dir and not args.save:
                args.wandb_save_dir = os.curdir
            try:
                original(args)
            except Exception as error:  # noqa: BLE001 - a logger is not worth a training run
                warn_without_wandb(error, _folder(args) / FILE_NAME)

        return set_wandb_writer

    _patch_if_there(global_vars, "_set_wandb_writer", make)
