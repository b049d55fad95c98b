"""The baseline that Megatron-Core has itself: its MoE layer with the ``alltoall`` dispatcher.

On a GPU it is what ``--moe-grouped-gemm --moe-permute-fusion --swiglu`` give with Transformer
Engine: its grouped products, permutations in its Triton kernels, and the activation with the
probabilities in one compiled kernel. On a CPU experts follow one another, nothing is fused.
"""

from typing import Any

import torch
import torch.nn.functional as F

from flashmoe_megatron.adapters.megatron.weights import expert_weights
from flashmoe_megatron.bench.correctness import LayerResults
from flashmoe_megatron.bench.problem import Problem


class Routed(torch.nn.Module):
    """A router that has chosen already, so that no router's time counts."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem

    def forward(self, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns probabilities and the map of choices, each ``[tokens, num_experts]``."""
        return self.problem.probs, self.problem.routing_map


def moe_submodules(num_experts: int, *, use_te: bool) -> Any:
    """Returns Megatron's parts of a MoE layer; with Transformer Engine its experts are grouped."""
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec

    mlp: Any = get_mlp_module_spec(use_te=use_te, num_experts=num_experts, moe_grouped_gemm=use_te)
    return getattr(mlp, "submodules", None) or mlp.keywords["submodules"]


class MegatronLayer:
    """The layer on the default group, whose ranks are Megatron's expert-parallel ones.

    Gradients of weights are ordinary ones in bfloat16.

    Args:
        problem: Its weights are copied. On a CPU Megatron needs something that answers for
            its GPU, such as ``examples/cpu_bridge.py``.

    Raises:
        ImportError: Megatron-Core is not installed, or a GPU is here and no Transformer Engine.
    """

    def __init__(self, problem: Problem) -> None:
        if problem.x.is_cuda:
            import transformer_engine.pytorch  # noqa: F401 - without it nothing would be grouped
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.moe_layer import MoELayer

        config = problem.config
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=config.num_ranks, create_gloo_process_groups=False
            )
        submodules = moe_submodules(config.num_experts, use_te=problem.x.is_cuda)
        submodules.router = lambda **_: Routed(problem)
        self.problem = problem
        self.layer = MoELayer(_transformer_config(problem), submodules)
        self.weights = expert_weights(self.layer.experts, hidden=config.hidden)
        with torch.no_grad():
            for mine, given in zip(self.parameters, problem.parameters, strict=True):
                mine.copy_(given)

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """All local weights, fc1's first."""
        return (*self.weights.fc1, *self.weights.fc2)

    def __call__(self) -> torch.Tensor:
        """One forward."""
        out, _ = self.layer(self.problem.x.unsqueeze(1))  # sequence, batch, hidden
        result: torch.Tensor = out.squeeze(1)
        return result

    def forward_and_backward(self) -> torch.Tensor:
        """One of each; forgets gradients of an earlier call."""
        leaves = (self.problem.x, self.problem.probs, *self.parameters)
        return self.problem.differentiate(self, leaves)

    def results(self) -> LayerResults:
        """The results of one forward and backward."""
        out = self.forward_and_backward()
        x, probs = self.problem.x.grad, self.problem.probs.grad
        assert x is not None
        assert probs is not None
        grads = ([weight.grad for weight in each] for each in (self.weights.fc1, self.weights.fc2))
        return LayerResults(out, x, probs, *grads)  # type: ignore[arg-type]


def _transformer_config(problem: Problem) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config, dtype, is_cuda = problem.config, problem.x.dtype, problem.x.is_cuda
    return TransformerConfig(
        num_layers=1,
        num_attention_heads=1,
        hidden_size=config.hidden,
        ffn_hidden_size=config.intermediate,
        moe_ffn_hidden_size=config.intermediate,
        num_moe_experts=config.num_experts,
        moe_router_topk=config.topk,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_router_pre_softmax=True,  # unused, but a top-k of 1 is refused without it
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=is_cuda,
        moe_permute_fusion=is_cuda,
        expert_model_parallel_size=config.num_ranks,
        gated_linear_unit=config.gated,
        activation_func=F.silu if config.gated else F.gelu,
        bias_activation_fusion=config.gated,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,  # it would add to main_grad, as no other here
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        perform_initialization=False,
    )
