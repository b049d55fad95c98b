"""Routed experts in place of torchtitan's. Imported with torchtitan."""

import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from flashmoe_megatron.adapters.experts import shared_backends
from flashmoe_megatron.adapters.indexed import IndexedExperts
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.backend import ExpertWeights
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.eager import eager
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.expert_group import local_part
from flashmoe_megatron.options import make_options
from flashmoe_megatron.weights import SplitWeights

_GPT_OSS = "torchtitan.models.gpt_oss.moe"
"""Not imported here: it brings all of that model along, and a model of it has imported it."""

DTYPE = torch.bfloat16
"""What torchtitan's experts compute in, whatever their parameters are."""


class FlashMoEExperts(IndexedExperts):
    """Applies the routed experts of one layer of torchtitan's."""

    WAYS_OUT_OF_DTYPE = "wanted torch.bfloat16, as torchtitan's own experts compute in"

    def allow_more(self, num_tokens: int) -> str:
        """See :meth:`LayerExperts.allow_more`."""
        return f"give the override max_tokens={num_tokens}, or leave it out"


class FlashMoERoutedExperts(RoutedExperts):  # type: ignore[misc]
    """Dispatch, experts and combine in one call, over the parameters of torchtitan's experts.

    Names of parameters, their sharding and their initialization are those of ``RoutedExperts``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """As ``RoutedExperts.Config``.

        Attributes:
            options: See :class:`~flashmoe_megatron.adapters.options.ModuleOptions`.
        """

        options: ModuleOptions

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._options: ModuleOptions = config.options
        self._sizes = config.inner_experts.dim, config.inner_experts.hidden_dim
        self._seats: dict[torch.device, FlashMoEExperts] = {}

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

        Returns:
            As ``x_BLD``.

        Raises:
            ConfigError: The experts are sharded within, as tensor parallelism does without expert
                parallelism.
        """
        x = x_BLD.reshape(-1, x_BLD.shape[-1])
        choices = topk_expert_ids_BLK.shape[-1]
        if x.device not in self._seats:
            self._seats[x.device] = self._seat(x.device)
        seat = self._seats[x.device]
        seat.is_training = self.training
        with torch.autocast(x.device.type, enabled=False):
            out = seat(
                x.to(DTYPE),
                topk_expert_ids_BLK.reshape(-1, choices),
                topk_scores_BLK.reshape(-1, choices),
                functools.partial(_read_weights, self.inner_experts),
            )
        return out.to(x_BLD.dtype).view(x_BLD.shape)

    def _seat(self, device: torch.device) -> FlashMoEExperts:
        """Makes what applies the experts. Collective over the expert-parallel mesh."""
        dispatcher: Any = self.token_dispatcher
        mesh = getattr(dispatcher, "ep_mesh", None)
        num_ranks = 1 if mesh is None else mesh.size()
        hidden, intermediate = self._sizes
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
        weights = _read_weights(self.inner_experts)
        (down,) = weights.down if isinstance(weights, SplitWeights) else weights.fc2
        wanted = (shape.num_local_experts, hidden, intermediate)
        if down.shape != wanted:
            raise ConfigError(
                f"this rank's down projections have shape {tuple(down.shape)}, wanted {wanted}: "
                "torchtitan shards single experts where tensor_parallel_degree is above 1 and "
                "expert_parallel_degree is 1"
            )
        group = None if mesh is None or num_ranks == 1 else mesh.get_group()
        backends = shared_backends(group, device, self._options, self._options.max_tokens)
        return FlashMoEExperts(shape, backends, DTYPE)


def replace_routed_experts(config: Any, **options: Any) -> Any:
    """The configuration of a layer with its routed experts on flashmoe.

    Args:
        config: The layer's, a ``RoutedExperts.Config``.
        **options: Fields of :class:`~flashmoe_megatron.adapters.options.ModuleOptions`.

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
    if type(experts) is GroupedExperts:
        return {"activation": Activation.SILU}
    return {
        "activation": Activation.QUICK_GELU,
        "clamp_value": experts.swiglu_limit,
        "linear_offset": 1.0,
        "glu_interleave": 1,
    }


def _read_weights(experts: Any) -> ExpertWeights | SplitWeights:
    """This rank's experts, in the dtype that they are computed in."""

    def read(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (local_part(parameter).to(DTYPE),)

    if type(experts) is GroupedExperts:
        return SplitWeights(
            gate=read(experts.w1_EFD), up=read(experts.w3_EFD), down=read(experts.w2_EDF)
        )
    return ExpertWeights(
        fc1=read(experts.mlp1_weight_EGD),
        fc2=read(experts.mlp2_weight_EDF),
        fc1_bias=read(experts.mlp1_bias_EG),
        fc2_bias=read(experts.mlp2_bias_ED),
    )
