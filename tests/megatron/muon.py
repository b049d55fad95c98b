"""Megatron's Muon, with a stand-in for the package that orthogonalizes where that is missing."""

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

PACKAGE = "emerging_optimizers"


def muon_optimizer(config: Any, model: list[Any]) -> Any:
    """Muon for matrices, Adam for the rest."""
    if PACKAGE not in sys.modules and importlib.util.find_spec(PACKAGE) is None:
        _stand_in()
    try:
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer
    except ImportError:  # a release in which Muon is one of several
        from megatron.core.optimizer import get_megatron_optimizer

        config.optimizer = "muon"
        return get_megatron_optimizer(config, model)
    return get_megatron_muon_optimizer(config, model)


def _stand_in() -> None:
    root = ModuleType(PACKAGE)
    optimizers = ModuleType(f"{PACKAGE}.orthogonalized_optimizers")
    utils = ModuleType(f"{PACKAGE}.orthogonalized_optimizers.muon_utils")
    optimizers.OrthogonalizedOptimizer = Orthogonalized  # type: ignore[attr-defined]
    optimizers.get_muon_scale_factor = scale_factor  # type: ignore[attr-defined]
    utils.newton_schulz_tp = orthogonalized  # type: ignore[attr-defined]
    for module in (root, optimizers, utils):
        sys.modules[module.__name__] = module


def scale_factor(num_out: int, num_in: int, mode: str) -> float:
    """What makes the step of a matrix as large as those of others."""
    return float(max(1.0, num_out / num_in) ** 0.5)


def orthogonalized(grad: torch.Tensor, steps: int, **_: Any) -> torch.Tensor:
    """The nearest matrix with orthonormal rows or columns, by an odd polynomial's iteration."""
    wide = grad if grad.shape[0] <= grad.shape[1] else grad.t()
    x = wide / (torch.linalg.matrix_norm(wide) + 1e-7)
    for _ in range(steps):
        square = x @ x.t()
        x = 1.5 * x - 0.5 * square @ x
    return x if wide is grad else x.t()


class Orthogonalized(torch.optim.Optimizer):
    """Steps along orthogonalized momentum; a subclass says how that is made."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float,
        *,
        weight_decay: float,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
        **_: Any,
    ) -> None:
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                step = self.orthogonalize(parameter, momentum)  # type: ignore[attr-defined]
                parameter.sub_(group["lr"] * step)
