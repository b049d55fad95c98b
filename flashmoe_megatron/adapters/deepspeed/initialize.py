"""The ways into DeepSpeed: ``initialize``, ``install`` and ``attach``.

Importing this changes nothing and imports no DeepSpeed. A training program calls
:func:`initialize` in place of ``deepspeed.initialize``, or :func:`install` once if something else
calls that (Hugging Face Trainer, accelerate); :func:`attach` serves an engine that exists already.
"""

import base64
import contextlib
import copy
import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmoe_megatron.adapters.deepspeed.settings import (
    SECTION,
    Settings,
    read_settings,
    resolve_alias,
)
from flashmoe_megatron.adapters.patch import original_of, patch
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.releases import DEEPSPEED

if TYPE_CHECKING:  # a program may import the door before torch
    from flashmoe_megatron.repeats import Steps

logger = logging.getLogger("flashmoe_megatron")


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Calls ``deepspeed.initialize`` and fuses the engine's MoE layers if the section says so.

    Collective over all ranks, as ``deepspeed.initialize`` is.

    Args:
        *args: As for ``deepspeed.initialize``.
        **kwargs: As for ``deepspeed.initialize``. The configuration may be a dict, a path or
            base64, in any argument that DeepSpeed takes it from; besides the section,
            ``"expert_parallel": {"comm_backend": "flashmoe"}`` enables flashmoe.

    Returns:
        Engine, optimizer, data loader and learning rate schedule.

    Raises:
        ConfigError: The section is not valid, the ranks disagree on it, or a layer cannot be
            served and ``fallback`` is "error".
    """
    with DEEPSPEED.needed():
        import deepspeed

    return _initialize(original_of(deepspeed.initialize), *args, **kwargs)


def install() -> None:
    """Makes ``deepspeed.initialize`` do what :func:`initialize` does; again, does nothing."""
    with DEEPSPEED.needed():
        import deepspeed

    patch(deepspeed, "initialize", lambda original: functools.partial(_initialize, original))


def uninstall() -> None:
    """Undoes :func:`install`; engines that exist keep their layers."""
    with DEEPSPEED.needed():
        import deepspeed

    deepspeed.initialize = original_of(deepspeed.initialize)


def attach(engine: Any) -> dict[str, str]:
    """Fuses the MoE layers of an engine that exists. Collective over all ranks.

    May be called again, also after :func:`initialize`, to have the report. The section of the
    engine's configuration holds; without one, flashmoe is enabled with the defaults.

    Returns:
        For every MoE layer of this rank, by name, "fused" and its backend, or a sentence why
        it was left alone.

    Raises:
        ConfigError: The same as in :func:`initialize`, or it is no engine.
    """
    import torch.distributed as dist

    from flashmoe_megatron.ranks import Ranks

    def read() -> Settings:
        _check_engine(engine)
        config = engine.config
        return read_settings(config) if SECTION in config else Settings(enabled=True)

    return _attach(engine, Ranks(dist.group.WORLD).each(read))


def repeated_steps(engine: Any) -> "Steps":
    """Makes what runs the steps of an engine, each a second time if its rows did not fit.

    A step is a function that computes the gradients of one whole batch, and ends before the
    engine's own step::

        def train_step(batches):
            for number, batch in enumerate(batches):
                if number:
                    engine.step()  # between two micro-batches
                engine.backward(engine(batch))

        steps = repeated_steps(engine)
        for batches in loader:
            steps.run(train_step, batches)
            engine.step()

    All else is as with :class:`flashmoe_megatron.RepeatedSteps`.

    Raises:
        ConfigError: The engine's gradients cannot be dropped, or it is no engine.
    """
    _check_engine(engine)
    from flashmoe_megatron.adapters.deepspeed.repeats import EngineSteps

    return EngineSteps(engine)


def _check_engine(engine: Any) -> None:
    """Refuses what is no engine, such as all four results of ``deepspeed.initialize``."""
    from torch import nn

    from flashmoe_megatron.config import check_class

    check_class("engine", engine, nn.Module, "the first result of deepspeed.initialize")


def _initialize(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, Any, Any, Any]:
    call = inspect.signature(original).bind(*args, **kwargs)
    config = _load_config(call.arguments)
    settings = Settings()
    if config is not None:
        rewritten = resolve_alias(config)
        if rewritten is not None:
            config = rewritten
            _replace_config(call.arguments, config)
        settings = read_settings(config)
    with contextlib.ExitStack() as stack:
        if settings.enabled:
            from flashmoe_megatron.adapters.deepspeed.metrics import wandb_may_fail

            stack.enter_context(wandb_may_fail())
            if settings.gate != "router":
                from flashmoe_megatron.adapters.deepspeed.gates import put_gates

                put_gates(call.arguments, settings)
        outcome: tuple[Any, Any, Any, Any] = original(*call.args, **call.kwargs)
    _attach(outcome[0], settings)
    return outcome


def _attach(engine: Any, settings: Settings) -> dict[str, str]:
    import deepspeed  # there, since it has made the engine
    import torch.distributed as dist

    from flashmoe_megatron.ranks import Ranks

    # Ranks compare also where flashmoe is not enabled: another rank's configuration may differ.
    values = {f"{SECTION}.{name}": value for name, value in settings.agreed.items()}
    told = Ranks(dist.group.WORLD).all(
        lambda: (values, deepspeed.__version__), alike=lambda one: one[0]
    )
    if not settings.enabled:
        return _left_alone(engine, f"{SECTION}.enabled is false")
    problem = DEEPSPEED.problem_of_ranks([release for _, release in told])
    if problem is not None:
        if settings.fallback == "error":
            raise ConfigError(
                f'{problem}, or set {SECTION}.fallback to "warn" to leave MoE layers to DeepSpeed'
            )
        logger.warning("%s; DeepSpeed runs its MoE layers itself", problem)
        return _left_alone(engine, problem)
    # attach.py knows the insides of the tested releases, so it is imported for these alone.
    from flashmoe_megatron.adapters.deepspeed.attach import attach_engine

    return attach_engine(engine, settings)


def _left_alone(engine: Any, reason: str) -> dict[str, str]:
    """Reports an engine without fused layers, of any release: it knows names alone."""
    return {
        name.removesuffix(".deepspeed_moe"): reason
        for name, module in engine.module.named_modules()
        if any(kind.__name__ in ("MOELayer", "AutoEPMoELayer") for kind in type(module).__mro__)
    }


def _load_config(arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration as DeepSpeed will find it; ``None`` where DeepSpeed will refuse it.

    DeepSpeed's own reader is not asked: where it is differs between releases.
    """
    given = _configs(arguments)
    if len(given) != 1:
        return None
    config = given[0]
    if isinstance(config, str):
        import hjson  # which DeepSpeed needs, too

        try:
            is_file = os.path.exists(config)
            text = Path(config).read_text() if is_file else base64.urlsafe_b64decode(config)
            config = hjson.loads(text, object_pairs_hook=_once_each)
        except (OSError, ValueError):
            return None
    return config if isinstance(config, dict) else None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _configs(arguments: Mapping[str, Any]) -> list[Any]:
    """The configurations that DeepSpeed looks at, in its order: arguments, then ``args``."""
    config = arguments.get("config")
    if config is None:
        config = arguments.get("config_params")
    script = arguments.get("args")
    names = ("deepscale_config", "deepspeed_config")
    found = [config, *(getattr(script, name, None) for name in names)]
    return [value for value in found if value is not None]


def _replace_config(arguments: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Gives DeepSpeed another configuration, without a trace in the caller's objects."""
    arguments["config"] = dict(config)
    arguments.pop("config_params", None)
    if arguments.get("args") is not None:
        script = copy.copy(arguments["args"])
        for name in ("deepscale_config", "deepspeed_config"):
            if getattr(script, name, None) is not None:
                setattr(script, name, None)
        arguments["args"] = script
