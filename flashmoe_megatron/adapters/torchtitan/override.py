"""Routed experts in place of torchtitan's. Imported with torchtitan."""

import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from flashmoe_megatron.adapters.experts import GroupBackends
from flashmoe_megatron.adapters.forwards import refuse_touched
from flashmoe_megatron.adapters.held import Holding
from flashmoe_megatron.adapters.indexed import IndexedExperts, KnownExperts, Reading
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.eager import eager
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.expert_group import local_part
from flashmoe_megatron.options import make_options
from flashmoe_megatron.touched import find_touched
from flashmoe_megatron.weights import ExpertWeights, SplitWeights

_GPT_OSS = "torchtitan.models.gpt_oss.moe"
"""Not imported here: it brings all of that model along, and a model of it has imported it."""

_WAY_OUT = "make such a change before the first step"

_IGNORED = frozenset(
    {
        *("w1_EFD", "w2_EDF", "w3_EFD", "mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF"),
        *("mlp2_bias_ED", "forward"),
    }
)
"""Attributes that are read in each call, and what torchtitan puts around the experts' forward."""

DTYPE = torch.bfloat16
"""The dtype of the computation of torchtitan's experts; their parameters may have another."""


class FlashMoEExperts(IndexedExperts):
    """Applies the routed experts of one layer of torchtitan's."""

    WAYS_OUT_OF_DTYPE = "wanted torch.bfloat16, as torchtitan's own experts compute in"

    def allow_more(self, num_tokens: int) -> str:
        """Names the option that bounds tokens."""
        return f"give the override max_tokens={num_tokens}, or leave it out"


class FlashMoERoutedExperts(RoutedExperts):  # type: ignore[misc]
    """Dispatch, experts and combine in one call, over the parameters of torchtitan's experts.

    Names of parameters, their sharding and their initialization are those of ``RoutedExperts``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """As ``RoutedExperts.Config``, with options."""

        options: ModuleOptions

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._options: ModuleOptions = config.options
        self._sizes = config.inner_experts.dim, config.inner_experts.hidden_dim
        self._known: KnownExperts[FlashMoEExperts] = KnownExperts(_IGNORED, _WAY_OUT)

    @eager
    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Applies the experts of all ranks. Collective over the expert-parallel mesh.

        Args:
            x_BLD: ``[batch, sequence, hidden]``, this rank's part.
            topk_scores_BLK: ``[batch, sequence, k]``, the routing weights.
            topk_expert_ids_BLK: ``[batch, sequence, k]``, ids of all ranks' experts.
            num_local_tokens_per_expert_E: Not needed, since the launch counts the rows itself.

        Raises:
            ConfigError: The experts are sharded within, as tensor parallelism does without expert
                parallelism; or they have hooks or a forward of their own, which is not called. On
                several ranks, the experts have changed since the first call.
        """
        x = x_BLD.reshape(-1, x_BLD.shape[-1])
        choices = topk_expert_ids_BLK.shape[-1]
        mesh = getattr(self.token_dispatcher, "ep_mesh", None)
        num_ranks = 1 if mesh is None else mesh.size()
        group = None if mesh is None or num_ranks == 1 else mesh.get_group()
        experts = self.inner_experts

        def make(shape: MoEConfig, backends: GroupBackends) -> FlashMoEExperts:
            return FlashMoEExperts(shape, backends, DTYPE)

        with torch.autocast(x.device.type, enabled=False):
            # A rank alone may make another seat; of several, each has to be at the same call.
            weights = _read_weights(experts) if group is None else None
            out = self._known.apply(
                Reading(
                    look=functools.partial(_holding_of, experts),
                    shape=functools.partial(self._read_shape, num_ranks),
                    weights=lambda _: _read_weights(experts) if weights is None else weights,
                    make=make,
                ),
                (
                    x,
                    topk_expert_ids_BLK.reshape(-1, choices),
                    topk_scores_BLK.reshape(-1, choices),
                ),
                dtype=DTYPE,
                group=group,
                options=self._options,
                is_training=self.training,
                more=None if weights is None else _down_of(weights).shape,
            )
        return out.view(x_BLD.shape)

    def _read_shape(self, num_ranks: int) -> MoEConfig:
        """Reads from the experts of this rank what those of all ranks compute."""
        hidden, intermediate = self._sizes
        dispatcher: Any = self.token_dispatcher
        shape = MoEConfig(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=dispatcher.num_experts,
            topk=dispatcher.top_k,
            gated=True,
            **_read_form(self.inner_experts),
            num_ranks=num_ranks,
            max_tokens=1,
        )
        down = _down_of(_read_weights(self.inner_experts))
        wanted = (shape.num_local_experts, hidden, intermediate)
        if down.shape != wanted:
            raise ConfigError(
                f"this rank's down projections have shape {tuple(down.shape)}, wanted {wanted}: "
                "torchtitan shards single experts where tensor_parallel_degree is above 1 and "
                "expert_parallel_degree is 1"
            )
        return shape


def replace_routed_experts(config: Any, **options: Any) -> Any:
    """The configuration of a layer with its routed experts on flashmoe.

    Raises:
        ConfigError: An option is unknown or has no meaning; or the layer's experts or dispatcher
            are of a kind that computes something else.
    """
    experts = type(config.inner_experts)
    gpt_oss = sys.modules.get(_GPT_OSS)
    is_gpt_oss = gpt_oss is not None and experts is gpt_oss.GptOssGroupedExperts.Config
    if experts is not GroupedExperts.Config and not is_gpt_oss:
        raise ConfigError(
            f"the experts are made by {experts.__qualname__}, wanted GroupedExperts.Config or "
            "GptOssGroupedExperts.Config: leave converters of experts out"
        )
    dispatcher = type(config.token_dispatcher)
    if dispatcher not in (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config):
        raise ConfigError(
            f"the tokens are dispatched by {dispatcher.__qualname__}, which flashmoe replaces: "
            'wanted torchtitan\'s standard communication (moe_comm_backend="standard")'
        )
    return derive(
        config, FlashMoERoutedExperts.Config, options=make_options(ModuleOptions, options)
    )


def _read_form(experts: Any) -> dict[str, Any]:
    """The fields of MoEConfig that say what becomes of the first projection's output."""
    if _is_swiglu(experts):
        return {"activation": Activation.SILU}
    return {
        "activation": Activation.QUICK_GELU,
        "clamp_value": experts.swiglu_limit,
        "linear_offset": 1.0,
        "glu_interleave": 1,
    }


def _is_swiglu(experts: Any) -> bool:
    """Tells whether experts are torchtitan's usual ones, or GPT-OSS's."""
    if type(experts) is GroupedExperts:
        return True
    if type(experts).__module__ != _GPT_OSS:
        raise ConfigError(
            f"the experts are {type(experts).__name__}, wanted GroupedExperts or "
            "GptOssGroupedExperts: leave converters of experts out"
        )
    return False


def _holding_of(experts: Any) -> Holding:
    """Finds all that decides what experts compute but their parameters, and calls no forward."""
    if touched := find_touched([experts]):
        refuse_touched(
            touched,
            experts,
            ": remove what put it there, or leave the override out",
            name="inner_experts",
        )
    return Holding([experts], [type(experts), type(experts).forward])


def _down_of(weights: ExpertWeights | SplitWeights) -> torch.Tensor:
    (down,) = weights.down if isinstance(weights, SplitWeights) else weights.fc2
    return down


def _read_weights(experts: Any) -> ExpertWeights | SplitWeights:
    """This rank's experts, in the dtype that they are computed in."""

    def read(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (local_part(parameter).to(DTYPE),)

    if _is_swiglu(experts):
        return SplitWeights(
            gate=read(experts.w1_EFD), up=read(experts.w3_EFD), down=read(experts.w2_EDF)
        )
    return ExpertWeights(
        fc1=read(experts.mlp1_weight_EGD),
        fc2=read(experts.mlp2_weight_EDF),
        fc1_bias=read(experts.mlp1_bias_EG),
        fc2_bias=read(experts.mlp2_bias_ED),
    )
