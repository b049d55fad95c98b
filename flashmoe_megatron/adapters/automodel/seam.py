"""Makes "flashmoe" a dispatcher of Automodel's backend configuration.

Automodel writes the dispatchers' names as a ``Literal``, which nothing checks at run time, and
takes any other name for its ``torch`` dispatcher: its ``MoE`` then makes ``GroupedExperts``, whose
parameters, initialization, sharding and conversion to Hugging Face's names stay as they are. Only
the forward of these is ours. Methods are wrapped in place, so that each ``isinstance`` of
Automodel's parallelizer, checkpoints and adapters keeps seeing its own class.
"""

import inspect
import logging
from importlib import metadata
from types import ModuleType
from typing import Any

from flashmoe_megatron.adapters.automodel.experts import run_experts
from flashmoe_megatron.adapters.automodel.form import FUNCTION
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.adapters.patch import Function, patch
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.releases import AUTOMODEL

DISPATCHER = "flashmoe"
OPTIONS = "flashmoe"
"""The field of our backend configuration that holds the options."""

SERVED = "flashmoe_options"
"""The attribute that experts have if their forward is ours."""

_EXPERTS = ("torch", "torch_mm")
_WAY_OUT = "take dispatcher: torch"


def patch_backend(module: ModuleType) -> None:
    """Has a configuration with our dispatcher checked where it is made."""
    if hasattr(module.BackendConfig, "__post_init__"):
        patch(module.BackendConfig, "__post_init__", _checked)


def patch_experts(module: ModuleType) -> None:
    """Gives ``GroupedExperts`` of our dispatcher a forward of ours."""
    experts = getattr(module, "GroupedExperts", None)
    if experts is not None and not _missing(experts):
        patch(experts, "__init__", _noting_options)
        patch(experts, "forward", _fused)


def patch_lora(module: ModuleType) -> None:
    """Refuses adapters on experts, whose class has a forward of its own."""
    patch(module.GroupedExpertsLoRA, "__init__", _refusing("LoRA on experts"))


def patch_quantized(module: ModuleType) -> None:
    """Refuses experts in MXFP4, whose class has a forward of its own."""
    patch(module.GroupedExpertsMXFP4, "__init__", _refusing("MXFP4 storage of experts"))


def _missing(experts: Any) -> str:
    """Names what the seam needs and a release's ``GroupedExperts`` does not have."""
    init = inspect.signature(experts.__init__).parameters
    forward = inspect.signature(experts.forward).parameters
    wanted = ("x", "token_mask", "weights", "indices")
    if "backend" not in init:
        return "an argument backend of GroupedExperts"
    if tuple(forward)[1:] != wanted:
        return f"a forward of GroupedExperts that takes {', '.join(wanted)}"
    return ""


def _checked(original: Function) -> Function:
    def post_init(self: Any) -> None:
        if self.dispatcher == DISPATCHER:
            _check_release()
            if self.experts not in _EXPERTS:  # Automodel would change the dispatcher without a word
                raise ConfigError(
                    f"backend.experts={self.experts!r} with dispatcher={DISPATCHER!r}, which "
                    f"computes the experts itself: wanted one of {', '.join(_EXPERTS)}"
                )
        original(self)

    return post_init


_has_said: set[str] = set()


def _check_release() -> None:
    """Says once that a release was not tried.

    Raises:
        ConfigError: The release lacks the seam.
    """
    import nemo_automodel.components.moe.experts as module

    version = metadata.version(AUTOMODEL.distribution)
    experts = getattr(module, "GroupedExperts", None)
    missing = "GroupedExperts" if experts is None else _missing(experts)
    if missing:
        raise ConfigError(
            f"{AUTOMODEL.name} {version} lacks {missing}, so that dispatcher {DISPATCHER!r} would "
            f"be its torch dispatcher; wanted {AUTOMODEL.wanted}"
        )
    problem = AUTOMODEL.problem(version)
    if problem and problem not in _has_said:
        _has_said.add(problem)
        logging.getLogger("flashmoe_megatron").warning("%s", problem)


def _noting_options(original: Function) -> Function:
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        backend = signature.bind(self, *args, **kwargs).arguments.get("backend")
        if getattr(backend, "dispatcher", None) != DISPATCHER:
            return
        if not hasattr(self, FUNCTION):
            raise ConfigError(
                f"{type(self).__name__} has no {FUNCTION}, which says what its experts compute; "
                f"wanted {AUTOMODEL.name} {AUTOMODEL.wanted}"
            )
        setattr(self, SERVED, getattr(backend, OPTIONS, None) or ModuleOptions())

    return init


def _fused(original: Function) -> Function:
    def forward(self: Any, x: Any, token_mask: Any, weights: Any, indices: Any) -> Any:
        options = getattr(self, SERVED, None)
        if options is None:
            return original(self, x, token_mask, weights, indices)
        return run_experts(self, options, x, token_mask, weights, indices)

    return forward


def _refusing(what: str) -> Any:
    def make(original: Function) -> Function:
        def init(self: Any, orig_module: Any, *args: Any, **kwargs: Any) -> None:
            if hasattr(orig_module, SERVED):
                raise ConfigError(
                    f"{what} with dispatcher={DISPATCHER!r}: {_WAY_OUT}, or leave the experts out"
                )
            original(self, orig_module, *args, **kwargs)

        return init

    return make
