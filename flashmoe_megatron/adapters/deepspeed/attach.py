"""Puts flashmoe into a DeepSpeed engine: finds the layers, has all ranks agree, swaps classes.

Imported after DeepSpeed. The swap comes after DeepSpeed has prepared the model, so that names of
parameters, optimizer state and checkpoints are its own.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn

from flashmoe_megatron.adapters.deepspeed import autoep, native
from flashmoe_megatron.adapters.deepspeed.gates import gate_problem
from flashmoe_megatron.adapters.deepspeed.layers import LayerInfo, Served, fuse
from flashmoe_megatron.adapters.deepspeed.metrics import EngineMetrics
from flashmoe_megatron.adapters.deepspeed.notices import overlap_notice
from flashmoe_megatron.adapters.deepspeed.refusals import (
    engine_problem,
    hosts_problem,
    layer_problem,
    replicas_problem,
)
from flashmoe_megatron.adapters.deepspeed.routed import RoutedExperts
from flashmoe_megatron.adapters.deepspeed.routes import RouteCounter
from flashmoe_megatron.adapters.deepspeed.settings import SECTION, Settings
from flashmoe_megatron.adapters.deepspeed.slices import size_buckets
from flashmoe_megatron.adapters.deepspeed.unchanged import Batches, promise_problem
from flashmoe_megatron.adapters.experts import GroupBackends, read_calibration
from flashmoe_megatron.adapters.indexed import facts_of
from flashmoe_megatron.eager import eager
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.hosts.grid import host_name
from flashmoe_megatron.measured.calibration import Calibration
from flashmoe_megatron.promise import Promise
from flashmoe_megatron.ranks import Ranks, check_alike
from flashmoe_megatron.telemetry.registry import choose_metrics

logger = logging.getLogger("flashmoe_megatron")

FUSED = "fused"
"""The word of a report for a layer that runs on flashmoe; its user learns the backend, too."""

_STATE = "_flashmoe_state"
"""Attribute of an engine that has been attached to."""


@dataclass(frozen=True)
class _Layer:
    """A MoE layer of a model, by the name of the module that the model's author wrote.

    DeepSpeed's layer is below that module in the native family; the family is the module that knows
    its class.
    """

    name: str
    module: Any
    family: ModuleType

    @property
    def is_fused(self) -> bool:
        return isinstance(self.module, self.family.FUSED_CLASS)


@dataclass
class _State:
    backends: dict[dist.ProcessGroup, GroupBackends]
    report: dict[str, str]
    promises: list[Promise] = field(default_factory=list)
    """The promises of all fused layers."""


def attach_engine(engine: Any, settings: Settings) -> dict[str, str]:
    """Fuses an engine's MoE layers. Collective over all ranks; a second call adds nothing.

    Returns what ``initialize.attach`` does.

    Raises:
        ConfigError: Unless ``fallback`` is "warn": a layer of any rank cannot be served, or no rank
            has a layer. The calibration file is not of these layers.
    """
    layers = list(_find_layers(engine.module))
    infos: dict[str, LayerInfo] = {}
    outcomes: dict[str, str] = {}
    for layer in layers:
        outcomes[layer.name] = FUSED
        if layer.is_fused:
            continue
        try:
            info = infos[layer.name] = layer.family.inspect(layer.module)
            problem = (
                engine_problem(engine)
                or promise_problem(engine, settings)
                or gate_problem(layer.module, settings)
                or replicas_problem(info, engine.zero_optimization_stage(), settings)
                or layer_problem(info, settings, engine.device)
            )
        except ConfigError as error:
            problem = str(error)
        if "forward" in vars(layer.module):
            problem = "its forward method was replaced, and the replacement would be lost"
        outcomes[layer.name] = problem or FUSED
    report = _agree(outcomes, infos, settings)
    _speak_up(report, settings)
    # A pipeline's layers get the model's numbers: the lower of two ranks has the earlier stage.
    numbers = {name: number for number, name in enumerate(report)}
    any_fused = FUSED in report.values()
    report = {layer.name: report[layer.name] for layer in layers}

    state: _State = getattr(engine, _STATE, None) or _State({}, {})
    fusing = {
        numbers[layer.name]: layer
        for layer in layers
        if report[layer.name] == FUSED and not layer.is_fused
    }
    # Over the world: a stage of a pipeline may have no layers.
    calibration = read_calibration(
        settings,
        [infos[layer.name].shape for layer in fusing.values()],
        engine.device,
        next((infos[layer.name].dtype for layer in fusing.values()), None),
        grads="own",
        group=dist.group.WORLD,
    )
    for number, layer in fusing.items():
        info = infos[layer.name]
        served = _serve(info, layer.module, number, state, engine, settings)
        fuse(layer.module, layer.family.FUSED_CLASS, info, served)
        state.promises.append(served.experts.promise)
    if settings.slice_gradients and any_fused and not hasattr(engine, _STATE):
        fused_layers = [layer.module.flashmoe.experts for layer in layers if layer.is_fused]
        groups = [infos[layer.name].group for layer in fusing.values()]
        size_buckets(engine, fused_layers, groups[0] if groups else None, settings)
    if not hasattr(engine, _STATE):
        _watch(engine, settings, state, calibration, any_fused=any_fused)
    state.report = report
    setattr(engine, _STATE, state)
    kinds = {
        layer.name: layer.module.flashmoe.experts.backend.within.kind
        for layer in _find_layers(engine.module)
        if layer.is_fused
    }
    if fusing and dist.get_rank() == 0:
        named = " and ".join(sorted(set(kinds.values())))
        sys.stdout.write(f"flashmoe: backend {named}, {len(kinds)} of {len(report)} MoE layers\n")
        sys.stdout.flush()
        ranks = max(infos[layer.name].group.size() for layer in fusing.values())
        notice = overlap_notice(engine, set(kinds.values()), ranks, settings)
        if notice:
            logger.warning("%s", notice)
    return {
        name: f"{FUSED}, backend {kinds[name]}" if outcome == FUSED else outcome
        for name, outcome in report.items()
    }


def _find_layers(model: nn.Module) -> Iterator[_Layer]:
    for name, module in model.named_modules():
        for family in (native, autoep):
            if isinstance(module, family.STOCK_CLASS):
                yield _Layer(name.removesuffix(family.SUFFIX), module, family)


def _agree(
    outcomes: Mapping[str, str], infos: Mapping[str, LayerInfo], settings: Settings
) -> dict[str, str]:
    """One outcome for every layer of any rank, the same on every rank. Collective.

    Layers of one name on several ranks are one layer: it is fused on all of them or on none.
    """
    groups = {name: dist.get_process_group_ranks(info.group) for name, info in infos.items()}
    facts = {name: facts_of(info.shape) for name, info in infos.items()}
    everyone = Ranks(dist.group.WORLD).gather((host_name(), dict(outcomes), groups, facts))
    hosts = {rank: host for rank, (host, *_) in enumerate(everyone)}
    by_layer: dict[str, dict[int, str]] = {}
    for rank, (_, its_outcomes, its_groups, _) in enumerate(everyone):
        for name, outcome in its_outcomes.items():
            if outcome == FUSED and name in its_groups:
                outcome = hosts_problem(its_groups[name], hosts, settings) or FUSED
            by_layer.setdefault(name, {})[rank] = outcome
    report = {}
    for name, by_rank in by_layer.items():
        refused = {rank: outcome for rank, outcome in by_rank.items() if outcome != FUSED}
        report[name] = _difference(name, [its_facts for *_, its_facts in everyone]) or FUSED
        if refused:
            rank, outcome = min(refused.items())
            everywhere = len(refused) == len(by_rank)
            report[name] = outcome if everywhere else f"{outcome} (on rank {rank})"
    return report


def _difference(name: str, everyone: Sequence[Mapping[str, Any]]) -> str | None:
    """Says in what a layer's experts differ between the ranks that have it, if in anything."""
    first = next((facts[name] for facts in everyone if name in facts), None)
    if first is None:
        return None
    try:
        check_alike([facts.get(name, first) for facts in everyone])
    except ConfigError as error:
        return str(error)
    return None


def _speak_up(report: Mapping[str, str], settings: Settings) -> None:
    """Raises or warns, on every rank alike, if flashmoe does not serve all layers."""
    refused = {name: outcome for name, outcome in report.items() if outcome != FUSED}
    if report and not refused:
        return
    if not report:
        message = (
            f"{SECTION}.enabled is true, but the model has no MoE layer of DeepSpeed: neither "
            "deepspeed.moe.layer.MoE nor one made by AutoEP (expert_parallel in the configuration)"
        )
    else:
        listed = "; ".join(f"{name}: {outcome}" for name, outcome in refused.items())
        message = f"flashmoe cannot serve {len(refused)} of {len(report)} MoE layers: {listed}"
    if settings.fallback == "error":
        raise ConfigError(f'{message}. Set {SECTION}.fallback to "warn" to leave them to DeepSpeed')
    if dist.get_rank() == 0:
        logger.warning("%s; DeepSpeed runs them", message)


def _serve(
    info: LayerInfo, module: Any, number: int, state: _State, engine: Any, settings: Settings
) -> Served:
    """Makes what a layer needs. Collective over the layer's group."""
    if info.group not in state.backends:
        state.backends[info.group] = GroupBackends(
            info.group, engine.device, settings, settings.max_tokens
        )
    factor = float(getattr(getattr(module, "gate", None), "capacity_factor", 1.0))
    experts = RoutedExperts(
        info.shape,
        state.backends[info.group],
        info.dtype,
        layer=number,
        capacity_factor=factor if factor > 0 else 1.0,
        is_promised=settings.quantize == "step",
    )
    return Served(experts=experts, routes=RouteCounter(engine.device))


def _watch(
    engine: Any,
    settings: Settings,
    state: _State,
    calibration: Calibration | None,
    *,
    any_fused: bool,
) -> None:
    """Has the model looked at before its forwards: once for later layers, always for metrics.

    Collective over all ranks if any has a fused layer: one without takes part in the metrics.
    """

    @eager
    def refuse_late_layers(*_: Any) -> None:
        handle.remove()
        late = {
            layer.name: "it was added after flashmoe was attached; call attach(engine) again"
            for layer in _find_layers(engine.module)
            if layer.name not in state.report
        }
        if late:
            _speak_up({**state.report, **late}, settings)

    handle = engine.module.register_forward_pre_hook(refuse_late_layers)
    served = [layer.module.flashmoe for layer in _find_layers(engine.module) if layer.is_fused]
    if settings.quantize == "step":
        batches = Batches(engine, state.promises)
        engine.module.register_forward_pre_hook(lambda *_: batches())
    if not any_fused or not settings.metrics_interval or not choose_metrics(settings.metrics):
        return
    # DeepSpeed has its monitors on rank 0, whatever other ranks' configurations say.
    has_monitor, *_ = Ranks(dist.group.WORLD).all(lambda: bool(engine.monitor.enabled))
    if not has_monitor:
        _say_without_monitor(settings)
        return
    report = EngineMetrics(
        engine,
        [one.experts for one in served],
        [one.routes for one in served],
        state.backends.values,
        settings,
        calibration,
    )
    engine.module.register_forward_pre_hook(lambda *_: report())


def _say_without_monitor(settings: Settings) -> None:
    """Says once, on rank 0, which settings of metrics were given in vain."""
    defaults = Settings()
    keys = ("metrics", "metrics_interval", "calibration")
    given = [key for key in keys if getattr(settings, key) != getattr(defaults, key)]
    if given and dist.get_rank() == 0:
        logger.warning(
            "%s %s without effect: DeepSpeed has no monitor, wanted csv_monitor, tensorboard, "
            "wandb or comet in its configuration",
            ", ".join(f"{SECTION}.{key}" for key in given),
            "is" if len(given) == 1 else "are",
        )
