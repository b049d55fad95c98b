"""The routed experts of one MoE layer of Megatron: which backend, which weights, one call."""

import functools
import math
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron.grad_reduce import note_backward
from flashmoe_megatron.adapters.megatron.refusals import SCRIPT_REFUSALS, refuse
from flashmoe_megatron.adapters.megatron.settings import (
    Settings,
    current_settings,
    flag_of,
    megatron_args,
)
from flashmoe_megatron.adapters.megatron.shape import moe_config, resolve_max_tokens
from flashmoe_megatron.adapters.megatron.weights import (
    check_forwards,
    expert_weights,
    stand_in_for_forwards,
)
from flashmoe_megatron.adapters.overflow import apply_despite_overflow
from flashmoe_megatron.autograd import in_backward, moe_apply
from flashmoe_megatron.backend import Backend, ExpertWeights
from flashmoe_megatron.checks import KERNEL_DTYPES
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.planner import plan_capacity
from flashmoe_megatron.reference.backend import ReferenceBackend
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.telemetry.calibration import Calibration, gpu_name, load_calibration
from flashmoe_megatron.telemetry.record import launch_number


class RoutedExperts:
    """Applies a layer's routed experts with a backend, over weights that Megatron owns.

    Making one is collective over the group if the bound of tokens is known, else the first call
    is. Not a module: it owns no parameters and leaves no trace in a checkpoint.

    Args:
        config: Megatron's TransformerConfig.
        experts: The layer's ``experts`` module.
        group: The layer's expert-parallel group.

    Attributes:
        num_calls: Forward calls so far, recomputation included.
        num_tokens: Tokens of training's calls so far, recomputation left out.
        layer: The layer's number in the model, 0 until a call tells it.
        dtype: Of the tokens; the configuration's until a call tells it.
        rank: This rank in the group.
        calibration: Of the settings' file, ``None`` without one or before the backend is made.

    Raises:
        ConfigError: The configuration, the training script's arguments or the experts' class
            cannot be honoured.
        DeviceError: The kernel was asked for and cannot run here.
    """

    def __init__(
        self, config: Any, experts: torch.nn.Module, group: dist.ProcessGroup | None
    ) -> None:
        refuse(megatron_args(), SCRIPT_REFUSALS)
        self._config = config
        self._experts = experts
        self._group = group
        expert_weights(experts, hidden=config.hidden_size)
        check_forwards(experts)
        self.dtype = _compute_dtype(config)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.layer = 0
        self.calibration: Calibration | None = None
        self._settings = current_settings()
        self._backend: Backend | None = None
        self.num_calls = 0
        self.num_tokens = 0
        if resolve_max_tokens(config, self._settings) is not None:
            self._backend = self._make_backend()
        _live.add(self)

    @property
    def capacity_factor(self) -> float:
        """That of the router; 1 where nothing is dropped."""
        return float(self._config.moe_expert_capacity_factor or 1.0)

    @property
    def backend(self) -> Backend:
        """What computes the layer; made at the first use."""
        if self._backend is None:
            self._backend = self._make_backend()
        return self._backend

    def __call__(
        self, x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, *, layer: int = 0
    ) -> torch.Tensor:
        """Applies the experts. Collective over the group.

        Args:
            x: ``[num_tokens, hidden]``.
            probs: ``[num_tokens, num_experts]``, in any float dtype.
            routing_map: ``[num_tokens, num_experts]`` bool.
            layer: The layer's number in the model, for the records.

        Returns:
            ``[num_tokens, hidden]`` in ``x.dtype``.

        Raises:
            ConfigError: The experts or the padding to capacity were changed since the layer was
                built.
            ShapeError: There are more tokens than the layer was built for.
        """
        self.num_calls += 1
        self.layer, self.dtype = layer, x.dtype
        if self._experts.training and not in_backward():
            self.num_tokens += x.shape[0]
        stand_in_for_forwards(self._experts)
        if probs.dtype not in (torch.float32, x.dtype):
            # --moe-router-dtype fp64: the choice of experts has been made in it.
            probs = probs.float()
        shape = self.backend.config
        if self._config.moe_pad_expert_input_to_capacity and not shape.skip_zero_probs:
            raise ConfigError(
                "moe_pad_expert_input_to_capacity was set since the layer was built: pass "
                "--moe-pad-experts-for-cuda-graph-inference where that is for decoding"
            )
        max_tokens = shape.max_tokens
        if x.shape[0] > max_tokens:
            raise ShapeError(
                f"x has {x.shape[0]} tokens, the layer was built for at most "
                f"max_tokens={max_tokens} per rank; pass {flag_of('max_tokens')} {x.shape[0]} or "
                "more on every rank"
            )
        weights = expert_weights(self._experts, hidden=self._config.hidden_size)

        def apply(finite_probs: torch.Tensor) -> torch.Tensor:
            return moe_apply(
                self.backend,
                x.contiguous(),
                finite_probs.contiguous(),
                routing_map.contiguous(),
                weights,
                accumulate_into_main_grad=self._adds_to_main_grad(weights),
                layer=launch_number(layer, is_training=self._experts.training),
                after_backward=functools.partial(note_backward, self.backend),
            )

        return apply_despite_overflow(apply, probs, x.dtype)

    @property
    def is_trained(self) -> bool:
        """Whether any of the experts' parameters gets a gradient; a teacher's do not."""
        return any(parameter.requires_grad for parameter in self._experts.parameters())

    def _adds_to_main_grad(self, weights: ExpertWeights) -> bool:
        """Also without Megatron's fusion, which may be off for want of apex alone.

        Megatron's DDP marks its parameters so, and its hooks then add nothing themselves. Gradients
        of their own would cost a table, buffers and an addition for each expert and micro-batch;
        they are made where somebody else's hooks want to see them.
        """
        if self._config.gradient_accumulation_fusion:
            return True
        parameters = (*weights.fc1, *weights.fc2, *weights.fc1_bias, *weights.fc2_bias)
        return hasattr(parameters[0], "grad_added_to_main_grad") and not any(
            each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters
        )

    def _make_backend(self) -> Backend:
        max_tokens = resolve_max_tokens(self._config, self._settings)
        if max_tokens is None:
            raise ConfigError(
                f"the number of tokens per rank is not known: pass {flag_of('max_tokens')}, or "
                "call flashmoe_megatron.adapters.megatron.configure(max_tokens=...) before "
                "building the model"
            )
        num_ranks = 1 if self._group is None else dist.get_world_size(self._group)
        shape = moe_config(self._config, self._experts, num_ranks=num_ranks, max_tokens=max_tokens)
        # As Megatron does for its buffers; an index of a GPU, or a device under a bridge.
        device = torch.empty(0, device=torch.cuda.current_device()).device
        backend = _shared_backend(shape, self._group, device, self._settings)
        if not isinstance(backend, ReferenceBackend):
            self._check_kernel_dtype()
        if self._settings.calibration is not None:
            self.calibration = load_calibration(
                self._settings.calibration,
                [shape],
                gpu=gpu_name(device),
                dtype=str(self.dtype).removeprefix("torch."),
                bounded=self._settings.row_bound is not None,
                keep=self._settings.keep,
                grads="main_grad",  # of Megatron's DDP, which comes after the model
            )
        _announce(backend, self._config)
        return backend

    def _check_kernel_dtype(self) -> None:
        dtype = _compute_dtype(self._config)
        if dtype not in KERNEL_DTYPES:
            raise ConfigError(
                f"params_dtype={dtype}: the kernel computes in bfloat16 or float16; pass --bf16 or "
                f"--fp16, or {flag_of('backend')} reference"
            )


def _compute_dtype(config: Any) -> torch.dtype:
    """What parameters and tokens are once Megatron has wrapped the model in its Float16Module."""
    if config.bf16:
        return torch.bfloat16
    if config.fp16:
        return torch.float16
    dtype: torch.dtype = config.params_dtype
    return dtype


_live: "weakref.WeakSet[RoutedExperts]" = weakref.WeakSet()


def live_experts() -> list[RoutedExperts]:
    """Those of all layers of this process that exist and have been called, by their number."""
    called = (routed for routed in _live if routed.num_calls)
    return sorted(called, key=lambda routed: routed.layer)


_Key = tuple[MoEConfig, torch.device, Settings]
_backends: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, Backend]] = (
    weakref.WeakKeyDictionary()
)


def _shared_backend(
    shape: MoEConfig, group: dist.ProcessGroup | None, device: torch.device, settings: Settings
) -> Backend:
    """The one backend of all layers of one shape, in one group, with the same settings."""
    known = {} if group is None else _backends.setdefault(group, {})
    key = (shape, device, settings)
    if key not in known:
        known[key] = select_backend(
            shape,
            group,
            device,
            kind=settings.backend,
            **settings.backend_options(),
        )
    return known[key]


_announced: set[str] = set()


def _announce(backend: Backend, config: Any) -> None:
    """Tells the user once per kind of layer, on rank 0, what computes it."""
    line = describe(backend, config)
    if line in _announced or (dist.is_initialized() and dist.get_rank() != 0):
        return
    _announced.add(line)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def describe(backend: Backend, config: Any) -> str:
    """One line on the backend, the layer's shape and what capacity becomes.

    Args:
        backend: Computes the layer.
        config: Megatron's TransformerConfig.

    Returns:
        The line.
    """
    shape = backend.config
    kind = "reference" if isinstance(backend, ReferenceBackend) else "kernel"
    parts = [
        f"flashmoe: backend {kind}",
        f"{shape.num_experts} experts on {shape.num_ranks} ranks",
        f"top-{shape.topk}",
        f"at most {shape.max_tokens} tokens per rank",
        _describe_capacity(shape, config.moe_expert_capacity_factor),
    ]
    heap_bytes = getattr(backend, "heap_bytes", 0)
    parts.append(
        f"symmetric heap {math.ceil(heap_bytes / 2**20)} MiB on each rank"
        if heap_bytes
        else "no symmetric heap"
    )
    return ", ".join(parts)


def _describe_capacity(shape: MoEConfig, factor: float | None) -> str:
    if factor is None:
        return "dropless"
    plan = plan_capacity(
        shape.max_tokens, shape.topk, shape.num_experts, factor, num_ranks=shape.num_ranks
    )
    return (
        f"capacity {plan.capacity} per rank and expert, {plan.expert_rows} rows per expert aligned "
        f"to {plan.aligned_expert_rows} in the receiver's buffer only"
    )
