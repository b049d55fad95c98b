"""The routed experts of one MoE layer of Megatron: which shape, which weights, one call."""

import functools
import math
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.adapted import AdaptedWeights
from flashmoe_megatron.adapters.experts import (
    GroupBackends,
    LayerExperts,
    read_calibration,
    shared_backends,
)
from flashmoe_megatron.adapters.megatron.buckets.hooks import ExpertHooks
from flashmoe_megatron.adapters.megatron.buckets.state import BUCKETS
from flashmoe_megatron.adapters.megatron.config.asked import (
    expert_tensor_size,
    expert_width,
    terms_of,
)
from flashmoe_megatron.adapters.megatron.config.computation import compute_dtype, functions_of
from flashmoe_megatron.adapters.megatron.config.notices import ignored_settings
from flashmoe_megatron.adapters.megatron.config.refusals import (
    SCRIPT_REFUSALS,
    check_early_routing,
    check_fp8_experts,
    refuse,
)
from flashmoe_megatron.adapters.megatron.fp8 import (
    BFLOAT16_EXPERTS,
    BFLOAT16_PARAMETERS,
    FP8_DGRAD,
    FP8_EXPERTS,
    bfloat16_layers,
    fp8_is_on,
)
from flashmoe_megatron.adapters.megatron.offload import run_offloaded, unused_modules
from flashmoe_megatron.adapters.megatron.settings import (
    Settings,
    current_settings,
    flag_of,
    megatron_args,
)
from flashmoe_megatron.adapters.megatron.shape import (
    check_graph,
    keeps_layers_in_bf16,
    moe_config,
    resolve_max_tokens,
    with_config,
)
from flashmoe_megatron.adapters.megatron.weights import HeldExperts
from flashmoe_megatron.attempts import ATTEMPTS
from flashmoe_megatron.autograd import OnSaved, moe_apply
from flashmoe_megatron.call import Backend, LooksAhead, Together
from flashmoe_megatron.config import TILE_M, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.measured.calibration import Calibration
from flashmoe_megatron.planner import plan_capacity
from flashmoe_megatron.weights import ExpertWeights


class RoutedExperts(LayerExperts):
    """Applies a layer's routed experts with a backend, over weights that Megatron owns.

    Making one is collective over the group.

    Attributes:
        calibration: The settings' file, ``None`` without one or before the backend is made.
        pre_gates: Whether the layer's routing is found before its attention.
        looks_ahead: Whether replicas are settled on there.

    Raises:
        ConfigError: The configuration, the training script's arguments or the experts' class
            cannot be honoured.
        DeviceError: The kernel was asked for and cannot run here.
    """

    WAYS_OUT_OF_DTYPE = f"pass --bf16 or --fp16, or {flag_of('backend')} auto"

    def __init__(
        self,
        config: Any,
        experts: torch.nn.Module,
        group: dist.ProcessGroup | None,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        refuse(megatron_args(), SCRIPT_REFUSALS)
        size = 1 if tensor_group is None else dist.get_world_size(tensor_group)
        if size != expert_tensor_size(config):
            raise ConfigError(
                f"expert tensor parallelism of {expert_tensor_size(config)} ranks over a group of "
                f"{size}: wanted the same number"
            )
        self._tensor_group = tensor_group if size > 1 else None
        super().__init__(
            group,
            compute_dtype(config),
            capacity_factor=float(config.moe_expert_capacity_factor or 1.0),
        )
        self._config = config
        self._experts = experts
        self._group = group
        self._settings = with_config(config, current_settings())
        self._held = HeldExperts(
            experts,
            hidden=expert_width(config),
            promise=self.promise if self._settings.quantize == "step" else None,
        )
        self._functions, self._terms = functions_of(experts), terms_of(config)
        self._hooks: ExpertHooks | None = None
        self.calibration: Calibration | None = None
        check_early_routing(config, self._settings)
        check_fp8_experts(config, self._settings)
        self.pre_gates = self._settings.pre_gate
        self.looks_ahead = self._settings.placement == "lookahead"
        self.open()
        _live.add(self)

    def __call__(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        *,
        layer: int = 0,
        experts: torch.nn.Module | None = None,
    ) -> torch.Tensor:
        """Applies the experts. Collective over the group.

        Args:
            x: ``[num_tokens, hidden]``.
            probs: ``[num_tokens, num_experts]``, in any float dtype.
            routing_map: ``[num_tokens, num_experts]`` bool.
            layer: The layer's number in the model, for the records.
            experts: The layer's ``experts`` now, if the caller has the layer.

        Raises:
            ConfigError: The experts or the padding to capacity were changed or replaced since
                the layer was built.
            ShapeError: There are more tokens than the layer was built for.
        """
        self.layer, self.is_training = layer, self._experts.training
        if fp8_is_on() and self._settings.experts == "bf16":
            say_once(BFLOAT16_EXPERTS)

        def compute(
            backend: Backend, rows: torch.Tensor, finite_probs: torch.Tensor, number: int
        ) -> torch.Tensor:
            if self._settings.row_bound == "auto" and self.is_training and ATTEMPTS.is_unknown:
                say_once(NOT_MEASURED)
            with Together(backend):  # made by now for as many tokens as all ranks have
                if experts is not None:
                    self._held.check_not_replaced(experts)
                weights = self._checked_weights()
                main_grads = self._main_grads(weights)

            def launch(rows: torch.Tensor, on_saved: OnSaved | None) -> torch.Tensor:
                return moe_apply(
                    backend,
                    rows,
                    finite_probs.contiguous(),
                    routing_map.contiguous(),
                    weights,
                    accumulate_into_main_grad=bool(self._config.gradient_accumulation_fusion),
                    # Bridge sums gradients of shared factors over ranks as autograd brings them.
                    ordered_grads=isinstance(weights, AdaptedWeights),
                    layer=number,
                    after_backward=functools.partial(BUCKETS.note_backward, backend),
                    on_saved=on_saved,
                    main_grads=main_grads,
                )

            return run_offloaded(self._config, rows, launch)

        return self.run(x, probs, compute)

    def _checked_weights(self) -> ExpertWeights:
        """Returns the experts' weights, if these still compute what the layer was built for."""
        if (
            self._config.moe_pad_expert_input_to_capacity
            and not self.backend.config.skip_zero_probs
        ):
            raise ConfigError(
                "moe_pad_expert_input_to_capacity was set since the layer was built: pass "
                "--moe-pad-experts-for-cuda-graph-inference where that is for decoding"
            )
        if functions_of(self._experts) != self._functions:
            raise ConfigError(
                "the experts' activation_func is not what it was when the layer was built: wanted "
                "it before, in the configuration, or the alltoall dispatcher"
            )
        if terms_of(self._config) != self._terms:
            self._check_terms()
        weights = self._held.read()
        if isinstance(weights, AdaptedWeights):
            if self._tensor_group is not None:
                raise ConfigError(
                    "LoRA on experts with --expert-tensor-parallel-size above 1: wanted 1, or the "
                    "alltoall dispatcher"
                )
            if self._settings.filled_slots and self.backend.config.num_ranks > 1:
                raise ConfigError(
                    f"LoRA on experts with {flag_of('spare_slots')} {self._settings.spare_slots}: "
                    "wanted 0, since other ranks read an expert's matrices without its additions"
                )
        return weights

    def _check_terms(self) -> None:
        """Refuses a configuration that would have Megatron's experts compute another function."""
        before = self._shape
        now = moe_config(
            self._config,
            self._experts,
            num_ranks=before.num_ranks,
            max_tokens=before.max_tokens,
        )
        for name in ("activation", "gated", "clamp_value", "linear_offset", "glu_interleave"):
            was, value = getattr(before, name), getattr(now, name)
            if value != was:
                raise ConfigError(
                    f"the experts' {name} was {was} when the layer was built, and is {value} in "
                    "the configuration now: wanted it before, or the alltoall dispatcher"
                )
        self._terms = terms_of(self._config)

    def settle(self, routing_map: torch.Tensor, *, layer: int) -> None:
        """Settles on the replicas of the next call. Collective over the group.

        Args:
            routing_map: ``[num_tokens, num_experts]`` bool, what the call's routing may be.
            layer: The layer's number in the model.
        """
        backend = self.follow_group()
        self.layer, self.is_training = layer, self._experts.training
        if isinstance(backend, LooksAhead):  # no other is made with lookahead
            backend.settle(routing_map, self._checked_weights, layer=self.launch_number())

    @property
    def is_trained(self) -> bool:
        """Tells whether any of the experts' parameters gets a gradient; a teacher's do not."""
        return any(parameter.requires_grad for parameter in self._experts.parameters())

    def _main_grads(self, weights: ExpertWeights) -> ExpertHooks | None:
        """Returns what adds gradients to ``main_grad``, ``None`` if DDP has to see them itself.

        It adds them with Megatron's fusion and without: fusion may be off for want of apex alone.
        Gradients as tensors of their own would cost a table, buffers and an addition for each
        expert and micro-batch.
        """
        if isinstance(weights, AdaptedWeights):
            return None
        params = (*weights.fc1, *weights.fc2, *weights.fc1_bias, *weights.fc2_bias)
        fuses = bool(self._config.gradient_accumulation_fusion)
        if self._hooks is None or not self._hooks.serve(params, fuses=fuses):
            self._hooks = None  # its parameters may be others' now
            num_biases = len(weights.fc1_bias) + len(weights.fc2_bias)
            self._hooks = ExpertHooks.of(params, fuses=fuses, num_biases=num_biases)
        return self._hooks

    def allow_more(self, num_tokens: int) -> str:
        """Names the flag that bounds tokens."""
        return f"pass {flag_of('max_tokens')} {num_tokens} or more on every rank"

    def locate(self) -> tuple[MoEConfig, GroupBackends]:
        """Reads the shape and finds the backends; without a bound, the ranks agree on one."""
        max_tokens = resolve_max_tokens(self._config, self._settings)
        check_graph(self._config, max_tokens)
        num_ranks = 1 if self._group is None else dist.get_world_size(self._group)
        shape = moe_config(
            self._config, self._experts, num_ranks=num_ranks, max_tokens=max_tokens or TILE_M
        )
        # Megatron asks so for its buffers' device; a bridge may answer with another than a GPU.
        device = torch.empty(0, device=torch.cuda.current_device()).device
        return shape, shared_backends(
            self._group, device, self._settings, max_tokens, self._tensor_group
        )

    def open(self) -> Backend:
        """Makes the backend, reads the calibration and tells the user what computes the layer."""
        backend = super().open()
        self._read_calibration(backend)
        _announce(backend, self._config, self._settings, is_bounded=self._backends.is_bounded)
        return backend

    def keep_in_bf16(self) -> None:
        """Has the experts compute in bfloat16 whatever the settings say. Collective over the group.

        A layer learns its number only after it is built, so its first call says so.
        """
        if self.backend.config.experts == "bf16":
            return
        self._read_calibration(self.compute_in("bf16"))

    def _read_calibration(self, backend: Backend) -> None:
        self.calibration = read_calibration(
            self._settings,
            [backend.config],
            self._backends.device,
            self.dtype,
            grads="main_grad",  # Megatron's DDP, which has it, comes after the model
            group=self._group,
        )


_live: "weakref.WeakSet[RoutedExperts]" = weakref.WeakSet()


NOT_MEASURED = (
    f"{flag_of('row_bound')} auto: layers are called outside of Megatron's schedule, where no "
    "bound is measured, so that their buffers are exact"
)


def built_experts() -> list[RoutedExperts]:
    """The experts of all layers of this process that exist."""
    return list(_live)


def live_experts() -> list[RoutedExperts]:
    """The experts of these that have been called, by number."""
    called = (routed for routed in _live if routed.num_calls)
    return sorted(called, key=lambda routed: routed.layer)


_said: set[str] = set()


def say_once(line: str) -> None:
    """Tells the user a line on rank 0, the first time only."""
    if line in _said:
        return
    _said.add(line)
    say(line)


def say(line: str) -> None:
    """Tells the user a line on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stdout.write(f"flashmoe: {line}\n")
        sys.stdout.flush()


def say_of_process(line: str) -> None:
    """Tells the user a line of each process, the first time only; nothing of an empty line."""
    if line and line not in _said:
        _said.add(line)
        rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
        sys.stdout.write(f"flashmoe: {rank}{line}\n")
        sys.stdout.flush()


def _announce(backend: Backend, config: Any, settings: Settings, *, is_bounded: bool) -> None:
    """Tells the user what computes a layer and what a setting becomes, each line once."""
    say_once(describe(backend, config, is_bounded=is_bounded))
    if settings.experts != "bf16":
        say_once(FP8_DGRAD if settings.experts == "fp8_dgrad" else FP8_EXPERTS)
        if keeps_layers_in_bf16(config):
            say_once(bfloat16_layers(config))
    elif getattr(config, "fp8", None):
        say_once(BFLOAT16_EXPERTS)
    if getattr(config, "fp8_param", False):
        say_once(BFLOAT16_PARAMETERS)
    if settings.filled_slots and backend.config.num_ranks > 1:
        say_once(_describe_replicas(backend.config, settings))
    if settings.pre_gate:
        say_once(PRE_GATE)
    for line in (*ignored_settings(config, settings), *unused_modules(config, backend.keep)):
        say_once(line)


PRE_GATE = (
    f"experts are chosen from each layer's input, before attention ({flag_of('pre_gate')}): this "
    "is another model than without"
)

_UNBOUNDED = (
    "no bound of tokens, on which the host agrees with the other ranks in every call "
    f"({flag_of('max_tokens')}, or max_tokens of configure, saves that)"
)


def describe(backend: Backend, config: Any, *, is_bounded: bool) -> str:
    """Describes the backend, the layer's shape and its capacity in one line."""
    shape = backend.config
    parts = [
        f"backend {backend.within.kind}",
        f"{shape.num_experts} experts on {shape.num_ranks} ranks",
        f"top-{shape.topk}",
        f"at most {shape.max_tokens} tokens per rank" if is_bounded else _UNBOUNDED,
        _describe_capacity(shape, config.moe_expert_capacity_factor),
    ]
    heap_bytes = getattr(backend, "heap_bytes", 0)
    parts.append(
        f"symmetric heap {math.ceil(heap_bytes / 2**20)} MiB on each rank"
        if heap_bytes
        else "no symmetric heap"
    )
    return ", ".join(parts)


def _describe_replicas(shape: MoEConfig, settings: Settings) -> str:
    when = "in each launch" if settings.placement == "launch" else "ahead of attention"
    numbers = shape.hidden * (shape.fc1_rows + shape.intermediate)
    return (
        f"replicas of at most {settings.spare_slots} experts of other ranks on each rank, of "
        f"{numbers / 1e6:.3g} million numbers each, planned {when} by {settings.replica_policy}"
    )


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
