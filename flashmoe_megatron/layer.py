"""The layer from plain PyTorch: token choices in, mixed tokens out."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from flashmoe_megatron.autograd import LayerCall, apply, moe_apply, void_call
from flashmoe_megatron.call import Backend, Together
from flashmoe_megatron.checks import (
    TOKEN_DTYPES,
    check_choices,
    check_kinds,
    check_number,
    check_readable,
    check_router_weight,
    check_rows,
    check_token_dtype,
    choices_problem,
    dtype_names,
)
from flashmoe_megatron.config import MoEConfig, check_class, check_config, check_switch
from flashmoe_megatron.eager import eager
from flashmoe_megatron.errors import (
    ConfigError,
    DeviceError,
    FlashMoEError,
    RoutingError,
    ShapeError,
)
from flashmoe_megatron.expert_group import ExpertGroup, local_part, local_slices
from flashmoe_megatron.options import NOT_MEASURED, BackendKind, BackendOptions
from flashmoe_megatron.own_router import fusable_weight, logits_of
from flashmoe_megatron.promise import Promise
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.replicas.policy import ONLY_IN_MEGATRON
from flashmoe_megatron.router import RouterConfig, open_router
from flashmoe_megatron.select import (
    check_choice,
    followed,
    named_device,
    resolve_kind,
    select_backend,
)
from flashmoe_megatron.telemetry.record import MOST_NUMBERS, launch_number
from flashmoe_megatron.weights import ExpertWeights, SplitWeights


@eager
def moe_forward(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weight: torch.Tensor,
    weights: ExpertWeights | SplitWeights,
    *,
    backend: Backend,
    check_routing: bool = True,
    ordered_grads: bool = False,
    layer: int = 0,
) -> torch.Tensor:
    """Applies the routed experts to every token. Collective over the backend's group.

    Args:
        x: ``[num_tokens, hidden]``, contiguous, 16-byte aligned.
        topk_idx: ``[num_tokens, topk]`` int32 or int64 global expert ids, distinct for each token;
            ``-1`` skips the choice.
        topk_weight: ``[num_tokens, topk]`` float32 or ``x.dtype``; scales each expert's activation.
        weights: The local experts.
        backend: From :func:`~flashmoe_megatron.select.select_backend`.
        check_routing: Look at the values of the routing first, which makes the host wait for a GPU.
        ordered_grads: Give the parameters their gradients in reverse order of ``weights``; see
            :func:`~flashmoe_megatron.autograd.moe_apply`.
        layer: The number that comes back in the records of this call; see the same function.

    Returns:
        ``[num_tokens, hidden]`` in ``x.dtype``, differentiable in ``x``, ``topk_weight`` and the
        weights.

    Raises:
        ConfigError: The weights, the backend or a setting are of another class.
        ShapeError: A tensor is not what the backend was built for.
        RoutingError: An expert id is out of range or given twice for a token, or a weight is NaN;
            tells of the token where that is no number itself.
    """
    with Together(backend, may_be_void=True) as together:
        check_rows(backend.config, x)
        if (  # no function runs where classes are right
            check_routing.__class__ is not bool
            or ordered_grads.__class__ is not bool
            or layer.__class__ is not int
            or not -MOST_NUMBERS <= layer < MOST_NUMBERS
        ):
            check_switch("check_routing", check_routing)
            check_switch("ordered_grads", ordered_grads)
            check_number(layer)
        return _apply_choices(
            backend,
            x,
            topk_idx,
            topk_weight,
            weights,
            check_routing=check_routing,
            ordered_grads=ordered_grads,
            layer=layer,
        )
    return void_call(together, backend, x, topk_weight, weights)


def _apply_choices(
    backend: Backend,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weight: torch.Tensor,
    weights: ExpertWeights | SplitWeights,
    *,
    check_routing: bool,
    ordered_grads: bool = False,
    layer: int,
) -> torch.Tensor:
    """Does what :func:`moe_forward` does, with tokens that can be read; its caller's errors too."""
    if x.dtype not in TOKEN_DTYPES:  # before its routing weights, which may have its dtype
        raise ShapeError(f"x is {x.dtype}, wanted one of {dtype_names(TOKEN_DTYPES)}")
    check_readable("topk_idx", topk_idx)
    check_readable("topk_weight", topk_weight)
    topk_idx, topk_weight = topk_idx.contiguous(), topk_weight.contiguous()
    check_choices(backend.config, x, topk_idx, topk_weight)
    if check_routing:
        problem = choices_problem(backend.config, topk_idx, topk_weight, x)
        if problem is not None:
            raise RoutingError(problem)
    call = LayerCall(backend, weights, topk_idx, layer=layer)
    try:
        return apply(call, x, topk_weight, ordered_grads=ordered_grads)
    except FlashMoEError:
        raise
    except Exception:
        check_kinds(weights)
        raise


class RouterOutput(NamedTuple):
    """The output of a layer with a fused router.

    Attributes:
        out: ``[num_tokens, hidden]`` in the dtype of the tokens.
        probs: ``[num_tokens, num_experts]`` float32 (float64 if the tokens are), 0 where not
            chosen; differentiable.
        logits: ``[num_tokens, num_experts]`` like ``probs``; differentiable.
        routing_map: ``[num_tokens, num_experts]`` bool, the experts that each token has chosen.
    """

    out: torch.Tensor
    probs: torch.Tensor
    logits: torch.Tensor
    routing_map: torch.Tensor


@eager
def moe_router_forward(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    weights: ExpertWeights | SplitWeights,
    *,
    backend: Backend,
    router: RouterConfig | None = None,
    ordered_grads: bool = False,
    layer: int = 0,
) -> RouterOutput:
    """Lets every token choose its experts and applies them, in one launch. Collective.

    Logits are products of ``x`` and ``router_weight`` with float32 sums, as in Megatron's router
    with ``--moe-router-dtype fp32``. The other tensors of the result are for auxiliary losses.

    Args:
        x: ``[num_tokens, hidden]``, contiguous, 16-byte aligned.
        router_weight: ``[num_experts, hidden]``, contiguous, in the dtype of ``x``.
        weights: The local experts.
        backend: From :func:`~flashmoe_megatron.select.select_backend`.
        router: How a token chooses its ``topk`` experts; by default softmax over their logits.
        ordered_grads: Give the parameters their gradients in reverse order of ``weights``; see
            :func:`~flashmoe_megatron.autograd.moe_apply`.
        layer: The number that comes back in the records of this call; see the same function.

    Raises:
        ConfigError: The weights, the backend or the router are of another class.
        ShapeError: A tensor is not what the backend was built for.
        RoutingError: A logit is NaN; raised late where the host does not wait for the launch.
        FlashMoEError: In backward, if logits or map were changed in place.
    """
    with Together(backend, may_be_void=True) as together:
        config = backend.config
        check_rows(config, x)
        check_router_weight(config, x, router_weight)
        router = RouterConfig() if router is None else router
        probs, logits, opened = open_router(config, x, router_weight, router)
        out = moe_apply(
            backend,
            x,
            probs,
            opened.routing_map,
            weights,
            ordered_grads=ordered_grads,
            layer=layer,
            router=opened,
        )
        opened.close()
        return RouterOutput(out, probs, logits, opened.routing_map)
    out = void_call(together, backend, x, router_weight, weights)
    probs = out.new_full((len(x), backend.config.num_experts), math.nan, dtype=torch.float32)
    return RouterOutput(out, probs, probs.clone(), torch.zeros_like(probs, dtype=torch.bool))


_EXPERTS = ("fc1", "fc1_gate", "fc1_up", "fc2", "fc1_bias", "fc2_bias")
RANK_BUFFER = "expert_rank"
"""The name of a layer's buffer with its rank, which an engine that makes ranks equal overwrites."""

PREPARE = "DistributedDataParallel(flashmoe_megatron.prepare_for_ddp(model))"


class FlashMoELayer(nn.Module):
    """A mixture-of-experts layer whose experts are spread over a process group.

    Expert ``e`` lives on rank ``e // config.num_local_experts``. Construction and every call are
    collective over the group. Gradients of experts are plain sums over the tokens of all ranks;
    averaging them over data-parallel replicas is left to the training loop, as is the
    router's gradient: see :func:`~flashmoe_megatron.data_parallel.prepare_for_ddp`.

    Attributes:
        fc1: The experts' ``[num_experts, fc1_rows, hidden]`` parameter, absent with ``split``. On
            several ranks this and the following are DTensors; each rank has the part of its own
            experts.
        fc1_gate: With ``split`` their ``[num_experts, intermediate, hidden]`` gate projections.
        fc1_up: With ``split`` their up projections, of the same shape.
        fc2: Their ``[num_experts, hidden, intermediate]`` parameter.
        fc1_bias: Their ``[num_experts, fc1_rows]`` parameter, ``None`` without ``bias``.
        fc2_bias: Their ``[num_experts, hidden]`` parameter, ``None`` without ``bias``.
        router: ``nn.Linear(hidden, num_experts)`` without bias, or ``None``. Adapters may wrap it,
            hooks be put on it, and any module take its place that gives logits
            ``[num_tokens, num_experts]`` for ``[num_tokens, hidden]``, but with ``fuse_router``.
        promise: Says when the experts' parameters stay as they are, which
            :func:`~flashmoe_megatron.unchanged.unchanged_weights` gives.
    """

    router: nn.Linear | None
    fc1: nn.Parameter
    fc1_gate: nn.Parameter
    fc1_up: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: BackendKind | Backend = "auto",
        router: bool = False,
        fuse_router: bool = False,
        bias: bool = False,
        split: bool = False,
        check_routing: bool = True,
        **options: Any,
    ) -> None:
        """Makes the local experts and their backend.

        Args:
            config: The layer's shape.
            group: The expert-parallel group, ``None`` for one rank; as a mesh of one dimension
                where FSDP is to shard the experts over another dimension of the same mesh.
            device: Where the layer lives; by default torch's default device if one is set, else the
                current GPU, or the CPU without one. On "meta" the parameters have no values. If
                that is so on any rank, the backend is chosen at the first call, after ``to_empty``.
            dtype: The dtype of tokens and parameters: bfloat16 or float16; on other backends than
                the kernel also float32 or float64. By default torch's default dtype, but bfloat16
                for float32.
            backend: Which to choose, or another layer's, of an equal ``config``.
            router: Own a router, an ``nn.Linear`` that :meth:`route` calls in front of the launch,
                so that :meth:`forward` can be called with tokens alone.
            fuse_router: Run that router inside the layer's launch instead, as
                :func:`moe_router_forward` does with its weight; needs ``router=True``. Calls refuse
                a router with a bias, hooks or adapters, or of another class.
            bias: Give both projections of every expert a bias.
            split: Keep gate and up projections as parameters of their own, ``fc1_gate`` and
                ``fc1_up``, in place of ``fc1``; the kernel reads and differentiates them where they
                are.
            check_routing: See :func:`moe_forward`.
            **options: See :func:`~flashmoe_megatron.select.select_backend`; none together
                with another layer's backend.

        Raises:
            ConfigError: The group does not fit ``config``, ranks disagree on it, nothing can be
                computed in ``dtype``, ``placement`` is lookahead, or the experts cannot be split:
                on every rank, whichever has it. The group has not this rank: on this rank alone.
            DeviceError: The device cannot be used, or cannot run the kernel that was asked for: on
                every rank, whichever has it.
        """
        super().__init__()
        if dtype is None:
            dtype = torch.get_default_dtype()
            dtype = torch.bfloat16 if dtype == torch.float32 else dtype
        if device is None:
            device = _default_device()
        self.expert_group = ExpertGroup(group)
        check = functools.partial(
            _check_arguments,
            config,
            device,
            dtype,
            backend,
            options,
            switches={
                "router": router,
                "fuse_router": fuse_router,
                "bias": bias,
                "split": split,
                "check_routing": check_routing,
            },
        )
        told = Ranks(self.expert_group.group).all(check, alike=lambda one: one.alike)
        self._backends: dict[torch.dtype, Backend] = {}
        self._given: Backend | None = None
        self._choice: tuple[BackendKind, dict[str, Any]] | None = None
        self.config = config
        self.promise = Promise()
        if isinstance(backend, str):
            self._choice = backend, options
            if not any(one.is_on_meta for one in told):
                self._backends[dtype] = self._select(device, dtype)
        else:
            self._given = backend
        self.check_routing = check_routing
        self.fuse_router = fuse_router

        def make(*shape: int) -> nn.Parameter:
            local = torch.empty(config.num_local_experts, *shape, device=device, dtype=dtype)
            return self.expert_group.parameter(local)

        if split:
            self.fc1_gate = make(config.intermediate, config.hidden)
            self.fc1_up = make(config.intermediate, config.hidden)
        else:
            self.fc1 = make(config.fc1_rows, config.hidden)
        self.fc2 = make(config.hidden, config.intermediate)
        self.register_parameter("fc1_bias", make(config.fc1_rows) if bias else None)
        self.register_parameter("fc2_bias", make(config.hidden) if bias else None)
        self._is_checked = False
        self.router = None
        if router:  # made on meta, where nn.Linear draws nothing: reset_parameters draws it once
            self.router = nn.Linear(config.hidden, config.num_experts, bias=False, device="meta")
            weight = torch.empty(config.num_experts, config.hidden, device=device, dtype=dtype)
            self.router.weight = nn.Parameter(weight)
        self.reset_parameters()
        self._mark_experts()

    def _mark_experts(self) -> None:
        for _, parameter in self.expert_parameters():
            self.expert_group.mark(parameter)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_experts()  # torch copies parameters without what they are marked with

    @property
    def backend(self) -> Backend:
        """The backend that computes the layer; may be given to further layers of the same shape.

        It is chosen when the layer is made, and again at the first use after the layer has moved to
        another device, or in another dtype, as under ``torch.autocast``, or after a wrapper's
        process group has been destroyed and made again; that is collective over the group. Where
        the choice for two dtypes is the same, they share the backend.

        Raises:
            ConfigError: The layer is on "meta", its group has been destroyed and not made again, or
                the ranks compute in different dtypes.
            DeviceError: The kernel was asked for and cannot run where the layer is.
        """
        if self.expert_group.follow():
            if self._given is not None:
                self._given = followed(self._given)
            self._backends = {dtype: followed(one) for dtype, one in self._backends.items()}
        if self._given is not None:
            return self._given
        fc2 = self._parameters.get("fc2")  # a tracer puts what has no device in place of self.fc2
        if fc2 is None:  # pruned or parametrized: computed from parameters under other names
            fc2 = self.fc2
        device = fc2.device
        if device.type == "meta":
            raise ConfigError(
                "the layer is on meta and has no values: wanted layer.to_empty(device=...), "
                "and then reset_parameters() or a checkpoint"
            )
        is_autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_autocast else fc2.dtype
        if dtype not in self._backends:
            self._backends[dtype] = self._select(device, dtype)
        return self._backends[dtype]

    def _select(self, device: torch.device | str, dtype: torch.dtype) -> Backend:
        assert self._choice is not None
        kind, options = self._choice
        for other, backend in self._backends.items():
            here = named_device(device)
            if resolve_kind(kind, here, other) == resolve_kind(kind, here, dtype):
                Ranks(self.expert_group.group).check_same({"dtype": dtype})
                return backend
        group = self.expert_group.given
        return select_backend(self.config, group, device, kind=kind, dtype=dtype, **options)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws router and experts as ``nn.Linear`` does: uniform within ``1 / sqrt(fan_in)``.

        Every rank draws all experts and keeps its own part: one seed gives one model, whatever the
        number of ranks, and also after FSDP's ``fully_shard``.

        Raises:
            ConfigError: The router is no ``nn.Linear``, or what is to be drawn is computed from
                something else, as by pruning or a parametrization.
        """
        self._write_rank()
        if self.router is not None:
            if not isinstance(self.router, nn.Linear):
                raise ConfigError(
                    f"reset_parameters() draws an nn.Linear, but the router is of class "
                    f"{type(self.router).__qualname__}: wanted it before the router is wrapped or "
                    "replaced"
                )
            for name in ("weight", "bias"):
                parameter = getattr(self.router, name)
                if parameter is not None:
                    _check_drawable(f"router.{name}", parameter)
                    drawn = _drawn(parameter, parameter.shape, self.config.hidden)
                    local_part(parameter).copy_(drawn[local_slices(parameter)])
        experts = []
        for name, parameter in self._experts():
            _check_drawable(name, parameter)
            experts.append((name, parameter, local_slices(parameter)))
        for expert in range(self.config.num_experts):
            for name, parameter, (own, *part) in experts:
                is_fc1 = name.startswith("fc1")
                fan_in = self.config.hidden if is_fc1 else self.config.intermediate
                drawn = _drawn(parameter, parameter.shape[1:], fan_in)
                if own.start <= expert < own.stop:
                    local_part(parameter)[expert - own.start].copy_(drawn[tuple(part)])

    @eager
    def forward(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routes if no choice is given, and applies the experts.

        Args:
            x: ``[..., num_tokens, hidden]``, contiguous, 16-byte aligned; any number of tokens up
                to ``config.max_tokens``, also none, also a different number on each rank.
            topk_idx: As in :func:`moe_forward`, with one row per token of ``x`` in order; ``None``
                for the own router's choice.
            topk_weight: As in :func:`moe_forward`.

        Returns:
            Like ``x``. Under ``torch.autocast`` the layer computes in autocast's dtype, as torch's
            own layers do: tokens and parameters are cast, and the output has that dtype.

        Raises:
            ConfigError: Only one of the two choices is given, or none without a router; or the
                experts were overwritten with another rank's, as DistributedDataParallel does; or
                with ``fuse_router`` the router has become more than its weight.
            ShapeError: A tensor is not what the layer was built for, or a router gives no logits.
            RoutingError: As in :func:`moe_forward`.
        """
        backend = self.backend  # autocast, on which it may depend, is off where experts are applied
        with Together(backend, may_be_void=True) as together:
            return self._forward(backend, x, topk_idx, topk_weight)
        if topk_weight is None and self.router is not None:
            parts = [local_part(one).flatten().float() for one in self.router.parameters()]
            topk_weight = torch.cat(parts) if parts else None
        kind = local_part(self.fc2).device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if dtype is not None and type(x) is torch.Tensor and x.is_floating_point():
            x = x.to(dtype)
        return void_call(together, backend, x, topk_weight, self._weights(dtype))

    def _forward(
        self,
        backend: Backend,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        if not self._is_checked:
            self._check_experts()
        check_readable("x", x)
        if x.dim() < 2 or x.shape[-1] != self.config.hidden:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}, wanted [..., num_tokens, {self.config.hidden}]"
            )
        if not x.is_contiguous():
            raise ShapeError(
                f"x has shape {tuple(x.shape)} and strides {x.stride()}, wanted contiguous rows; "
                "call .contiguous()"
            )
        tokens = x.view(-1, self.config.hidden)
        if (topk_idx is None) != (topk_weight is None):
            raise ConfigError("topk_idx and topk_weight: give both or none")
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            return _shaped(self._apply_to(backend, tokens, topk_idx, topk_weight), x)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return _shaped(self._apply_to(backend, tokens, topk_idx, topk_weight, dtype), x)

    def _apply_to(
        self,
        backend: Backend,
        tokens: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weight: torch.Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Routes if no choice is given, and applies the experts, in another dtype if given one."""

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

        weights = self._weights(dtype)
        number = launch_number(0, is_training=self.training)
        if topk_idx is None or topk_weight is None:
            if self.router is not None and self.fuse_router:
                router = cast(fusable_weight(self.router))
                return moe_router_forward(
                    cast(tokens), router, weights, backend=backend, layer=number
                ).out
            topk_idx, topk_weight = self.route(tokens)
        return _apply_choices(
            backend,
            cast(tokens),
            topk_idx,
            topk_weight if dtype is None else topk_weight.float(),
            weights,
            check_routing=self.check_routing,
            layer=number,
        )

    def _weights(self, dtype: torch.dtype | None) -> ExpertWeights | SplitWeights:
        """This rank's experts, in another dtype if given one.

        Results of casts and of parametrizations live for this call alone, and have no promise.
        """
        stacks: dict[str, tuple[torch.Tensor, ...]] = {}
        promise: Promise | None = self.promise
        for name in _EXPERTS:
            if (one := getattr(self, name, None)) is not None:
                local = local_part(one)
                given = local if dtype is None else local.to(dtype)
                stacks[name] = (given,)
                if given is not local or not isinstance(one, nn.Parameter):
                    promise = None
        if "fc1" in stacks:
            return ExpertWeights(**stacks, transposed=False, split=False, promise=promise)
        gate, up, down = (stacks.pop(name) for name in ("fc1_gate", "fc1_up", "fc2"))
        return SplitWeights(gate, up, down, **stacks, promise=promise)

    def _experts(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in _EXPERTS:
            tensor = getattr(self, name, None)
            if tensor is not None:
                yield name, tensor

    def expert_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that have this rank's experts, without the router's, by their names.

        They differ from the tensors that the layer computes with where these are pruned or
        parametrized.
        """
        for name, parameter in self._parameters.items():
            if parameter is not None:
                yield name, parameter
        for name, module in self._modules.items():  # what parametrizations have
            if name != "router" and module is not None:
                for below, parameter in module.named_parameters(name):
                    if isinstance(parameter, DTensor) or self.config.num_ranks == 1:
                        yield below, parameter

    def _check_experts(self) -> None:
        """Refuses experts that are, or are about to be, another rank's; waits for the device."""
        model = DistributedDataParallel._active_ddp_module
        if model is not None:
            shared = set(dist.get_process_group_ranks(model.process_group))
            names = {id(parameter): name for name, parameter in model.module.named_parameters()}
            if len(shared.intersection(self.expert_group.ranks)) > 1 and any(
                names[id(parameter)] not in model.parameters_to_ignore
                for _, parameter in self.expert_parameters()
            ):
                raise ConfigError(
                    "DistributedDataParallel makes the experts of all ranks those of rank 0: wrap "
                    f"the model by {PREPARE}"
                )
        rank = int(self.get_buffer(RANK_BUFFER).item())
        if rank != self.expert_group.rank:
            raise ConfigError(
                f"rank {self.expert_group.rank} has the experts of rank {rank}: wanted an engine "
                "that leaves out what flashmoe_megatron.expert_parameters(model) gives; for "
                f"DistributedDataParallel, {PREPARE}"
            )
        self._is_checked = True

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Takes the own part of plain tensors of all experts, and refuses those of other parts.

        The same holds for submodules: a parametrization keeps the experts in a module of its own,
        which torch loads next from the same dictionary.
        """
        for name, parameter in self.named_parameters():
            key = prefix + name
            given = state_dict.get(key)
            if isinstance(given, torch.Tensor):
                state_dict[key] = self.expert_group.like(parameter, given, key)
        before = local_part(self.fc2).device
        self.promise.renew()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        if local_metadata.get("assign_to_params_buffers", False):
            self._follow_parameters(before)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "FlashMoELayer":
        before = local_part(self.fc2).device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._follow_parameters(before)
        return self

    def _follow_parameters(self, before: torch.device) -> None:
        """Restores what torch loses with parameters that it moves from a device or replaces."""
        if self._choice is not None and local_part(self.fc2).device != before:
            self._backends.clear()
        self._write_rank()
        self._mark_experts()

    def _write_rank(self) -> None:
        """Writes the buffer, whose values ``to_empty`` and checkpoints do not keep."""
        rank = torch.tensor(float(self.expert_group.rank), device=local_part(self.fc2).device)
        self.register_buffer(RANK_BUFFER, rank, persistent=False)

    def extra_repr(self) -> str:
        """The layer's shape, ranks, backend and dtype, for ``repr(layer)``."""
        config = self.config
        made = self._given or self._backends.get(self.fc2.dtype)
        backend = type(made).__name__ if made is not None else None
        return (
            f"hidden={config.hidden}, intermediate={config.intermediate}, "
            f"num_experts={config.num_experts}, topk={config.topk}, "
            f"activation={config.activation.value}, gated={config.gated}, "
            f"rank {self.expert_group.rank} of {config.num_ranks}, "
            f"backend={backend}, dtype={self.fc2.dtype}"
        )

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses each token's experts: softmax over its ``topk`` largest logits, in float32.

        A router with hooks, a bias or adapters, or of another class is called as a module, with
        tokens in float32 and outside of autocast; its products are computed in float32.

        Returns:
            Expert ids ``[num_tokens, topk]`` int64 and weights ``[num_tokens, topk]`` float32.

        Raises:
            ConfigError: The layer has no router.
            ShapeError: The tokens are not ``[num_tokens, hidden]``; or the router, a module that
                has been put there, gives no such logits.
        """
        if self.router is None:
            raise ConfigError(
                "the layer has no router: give topk_idx and topk_weight, or build it with "
                "router=True"
            )
        check_readable("tokens", tokens)
        if tokens.dim() != 2 or tokens.shape[1] != self.config.hidden:
            raise ShapeError(
                f"tokens have shape {tuple(tokens.shape)}, wanted "
                f"[num_tokens, {self.config.hidden}]"
            )
        logits = logits_of(self.router, tokens, self.config.num_experts)
        top = logits.topk(self.config.topk, dim=1)
        return top.indices, top.values.softmax(dim=1)


def _shaped(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The output in the shape of the tokens, and no view: FSDP's hooks warn of these."""
    if out.shape == x.shape:
        return out
    shaped = torch.ops.aten._unsafe_view.default(out, x.shape)
    assert isinstance(shaped, torch.Tensor)
    return shaped


class _Told(NamedTuple):
    """A rank's arguments that concern the others.

    Attributes:
        alike: Arguments that have to be the same on every rank: the choice of a backend is
            collective, rows travel without their dtype, and checkpoints are those of one layer.
        is_on_meta: Whether it has no values yet.
    """

    alike: dict[str, Any]
    is_on_meta: bool


def _check_arguments(
    config: MoEConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    backend: BackendKind | Backend,
    options: dict[str, Any],
    *,
    switches: dict[str, bool],
) -> _Told:
    """Returns what concerns the other ranks, and refuses what makes no layer on this one.

    Not collective. For errors see :class:`FlashMoELayer`.
    """
    check_config(config)
    check_token_dtype(dtype)
    for name, value in switches.items():
        check_switch(name, value)
    if switches["fuse_router"] and not switches["router"]:
        raise ConfigError("fuse_router=True without a router: wanted router=True")
    if switches["split"] and (not config.gated or config.glu_interleave):
        raise ConfigError(
            f"split=True with gated={config.gated}, glu_interleave={config.glu_interleave}: "
            "wanted True and 0"
        )
    here = named_device(device)
    if isinstance(backend, str):
        check_choice(backend, options)
        if here.type != "meta":
            resolve_kind(backend, here, dtype)
        if options.get("placement") == "lookahead":
            raise BackendOptions.refusal("placement", "lookahead", ONLY_IN_MEGATRON)
        if options.get("row_bound") == "auto":
            raise BackendOptions.refusal("row_bound", "auto", NOT_MEASURED)
    elif options:
        raise ConfigError(f"{', '.join(options)} beside a backend that is given: wanted its own")
    else:
        check_class("backend", backend, Backend, "a name, or what select_backend gives")
        if backend.config != config:
            raise ConfigError(f"the backend was made for {backend.config}, the layer is {config}")
    try:
        torch.empty(0, device=here)
    except (RuntimeError, AssertionError) as error:  # the latter where torch has no CUDA
        raise DeviceError(f"the device '{here}' cannot be used: {error}") from error
    whose = "its own" if isinstance(backend, str) else "another layer's"
    own = {name: switches[name] for name in ("bias", "split")}
    alike = {"backend": whose, "dtype": dtype, **own}
    return _Told(alike, is_on_meta=here.type == "meta")


def _default_device() -> torch.device:
    """Returns the device of ``torch.device(...)`` or ``torch.set_default_device``, else a GPU."""
    # torch.get_default_device does not tell whether "cpu" was chosen.
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(isinstance(mode, DeviceContext) for mode in modes):
        return torch.get_default_device()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _check_drawable(name: str, given: torch.Tensor) -> None:
    if not isinstance(given, nn.Parameter):
        raise ConfigError(
            f"reset_parameters() draws {name}, which is computed from other parameters: wanted it "
            "before pruning or a parametrization"
        )


def _drawn(parameter: torch.Tensor, shape: torch.Size, fan_in: int) -> torch.Tensor:
    bound = 1 / math.sqrt(fan_in)
    empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return nn.init.uniform_(empty, -bound, bound)
