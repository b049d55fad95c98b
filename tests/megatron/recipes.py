"""Published commands that train MoE models on H100s, as far as they concern our table of refusals.

A command is what it sets of Megatron's TransformerConfig beside the model's, with flashmoe in the
place of its dispatcher. The names of settings are those of the newest release that has them.

    python -m tests.megatron.recipes

writes what the table says to each of them into the Megatron page.
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F

from flashmoe_megatron.adapters import megatron as adapter
from flashmoe_megatron.adapters.megatron.config.refusals import (
    CONFIG_REFUSALS,
    Refusal,
    refusals_of,
)

PAGE = Path(adapter.__file__).parent / "README.md"
BEGIN, END = "<!-- recipes: begin -->", "<!-- recipes: end -->"

BRIDGE_PERF = "Megatron-Bridge, `perf_recipes`"
BRIDGE = "Megatron-Bridge, `recipes`"
MEGATRON = "Megatron-LM, `examples/moe_recipes`"
MEGATRON_README = "Megatron-LM, the MoE page"


@dataclass(frozen=True)
class Recipe:
    """A published command: where it is, the number of its H100s, and what it sets."""

    name: str
    source: str
    num_gpus: int
    settings: dict[str, Any]


def sizes(hidden: int, ffn: int, experts: int, topk: int) -> dict[str, Any]:
    """The sizes of a model with SwiGLU, with grouped and whole experts, as in all commands."""
    return {
        "hidden_size": hidden,
        "moe_ffn_hidden_size": ffn,
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "expert_tensor_parallel_size": 1,
        "moe_grouped_gemm": True,
    }


def expert(ranks: int, tensor: int = 1) -> dict[str, int]:
    """Expert parallelism, and tensor parallelism of attention."""
    return {"expert_model_parallel_size": ranks, "tensor_model_parallel_size": tensor}


def graphs(*modules: str) -> dict[str, Any]:
    """CUDA graphs of these parts of a layer."""
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": list(modules)}


def recompute(*modules: str) -> dict[str, Any]:
    """Recomputation of these parts of a layer."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


QWEN3_30B = sizes(2048, 768, 128, 8)
QWEN3_235B = sizes(4096, 1536, 128, 8)
LATENT = {"multi_latent_attention": True}
DEEPSEEK_V3 = {**sizes(7168, 2048, 256, 8), **LATENT}
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
DELAY = {**OVERLAP, "delay_wgrad_compute": True}
TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}


def published() -> tuple[Recipe, ...]:
    """The commands. Megatron's activations are imported with them."""
    from megatron.core.activations import quick_gelu, squared_relu

    gpt_oss = {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
    }
    return (
        Recipe(
            "Qwen3-30B-A3B, BF16",
            BRIDGE_PERF,
            16,
            {**QWEN3_30B, **expert(16), **OVERLAP, **graphs("moe_router", "moe_preprocess")},
        ),
        Recipe(
            "Qwen3-30B-A3B, FP8 by tensor",
            BRIDGE_PERF,
            16,
            {
                **QWEN3_30B,
                **expert(16),
                **TENSORWISE,
                **graphs("attn", "moe_router", "moe_preprocess"),
            },
        ),
        Recipe("Qwen3-30B-A3B, BF16, EP 8", BRIDGE_PERF, 32, {**QWEN3_30B, **expert(8)}),
        Recipe(
            "Qwen3-30B-A3B, BF16",
            BRIDGE,
            8,
            {**QWEN3_30B, **expert(4, tensor=4), **FULL_RECOMPUTE},
        ),
        Recipe("Qwen3-30B-A3B, BF16", MEGATRON, 32, {**QWEN3_30B, **expert(8)}),
        Recipe(
            "Qwen3-30B-A3B, FP8 by block",
            MEGATRON,
            32,
            {
                **QWEN3_30B,
                **expert(8),
                **BLOCKWISE,
                "fp8_param": True,
                **graphs("moe_router", "moe_preprocess"),
            },
        ),
        Recipe(
            "Qwen3-235B-A22B, BF16",
            BRIDGE_PERF,
            256,
            {**QWEN3_235B, **expert(32, tensor=2), **DELAY},
        ),
        Recipe(
            "Qwen3-235B-A22B, FP8 by tensor",
            BRIDGE_PERF,
            256,
            {**QWEN3_235B, **expert(32, tensor=2), **DELAY, **TENSORWISE},
        ),
        Recipe("Qwen3-235B-A22B, BF16", BRIDGE, 256, {**QWEN3_235B, **expert(8, tensor=4)}),
        Recipe(
            "Qwen3-235B-A22B, BF16",
            MEGATRON,
            256,
            {
                **QWEN3_235B,
                **expert(32, tensor=2),
                **DELAY,
                **recompute("moe_act", "layernorm"),
                **graphs("moe_router", "moe_preprocess"),
            },
        ),
        Recipe(
            "DeepSeek-V3, BF16",
            BRIDGE_PERF,
            1024,
            {**DEEPSEEK_V3, **expert(64, tensor=2), **recompute("mla_up_proj", "mlp")},
        ),
        Recipe(
            "DeepSeek-V3, FP8 by block",
            BRIDGE_PERF,
            1024,
            {**DEEPSEEK_V3, **expert(64, tensor=2), **BLOCKWISE, **recompute("mla_up_proj", "mlp")},
        ),
        Recipe("DeepSeek-V3, BF16", MEGATRON, 1024, {**DEEPSEEK_V3, **expert(64)}),
        Recipe(
            "DeepSeek-V3, FP8 by block",
            MEGATRON,
            1024,
            {
                **DEEPSEEK_V3,
                **expert(64, tensor=2),
                **BLOCKWISE,
                **DELAY,
                **recompute("mla_up_proj", "mlp"),
                "moe_router_padding_for_fp8": True,
            },
        ),
        Recipe(
            "GPT-OSS-120B, BF16",
            BRIDGE_PERF,
            64,
            {
                **sizes(2880, 2880, 128, 4),
                **expert(8),
                **recompute("layernorm", "moe_act"),
                **gpt_oss,
            },
        ),
        Recipe(
            "GPT-OSS-20B, BF16",
            BRIDGE,
            16,
            {**sizes(2880, 2880, 32, 4), **expert(4, tensor=2), **gpt_oss},
        ),
        Recipe(
            "Moonlight-16B-A3B, BF16",
            BRIDGE,
            8,
            {
                **sizes(2048, 1408, 64, 6),
                **expert(8, tensor=2),
                "recompute_granularity": "selective",
                "moe_shared_expert_intermediate_size": 2816,
                "moe_shared_expert_overlap": True,
            },
        ),
        Recipe(
            "Kimi-K2, BF16",
            BRIDGE_PERF,
            1024,
            {
                **sizes(7168, 2048, 384, 8),
                **LATENT,
                **expert(64, tensor=8),
                **recompute("mla_up_proj", "mlp"),
            },
        ),
        Recipe(
            "Qwen3-Next-80B-A3B, BF16",
            BRIDGE_PERF,
            128,
            {**sizes(2048, 512, 512, 10), **expert(128)},
        ),
        Recipe(
            "Nemotron-3-Nano-30B, BF16",
            BRIDGE_PERF,
            16,
            {
                **sizes(2688, 1856, 128, 6),
                **expert(8),
                "activation_func": squared_relu,
                "gated_linear_unit": False,
                "is_hybrid_model": True,
                **recompute("moe", "layernorm"),
                **graphs("attn", "mamba"),
            },
        ),
        Recipe(
            "GLM-5.1, BF16, fine-tuning",
            BRIDGE,
            416,
            {**sizes(6144, 2048, 256, 8), **expert(32), **FULL_RECOMPUTE},
        ),
        Recipe(
            "Mixtral-8x7B, BF16", MEGATRON_README, 64, {**sizes(4096, 14336, 8, 2), **expert(8)}
        ),
    )


def split_page() -> tuple[str, str, str]:
    """The Megatron page up to its tables of recipes, the tables, and what follows."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    table, end, behind = rest.partition(END)
    return before + begin, table.strip("\n"), end + behind


def refused_flags(recipe: Recipe) -> list[Refusal]:
    """The rows of the table of refusals that a command meets."""
    return list(refusals_of(SimpleNamespace(**recipe.settings), CONFIG_REFUSALS))


def tables() -> str:
    """The page's tables: what is said to each command, and the way out of each refusal."""
    commands = ["| command | H100s | from | flashmoe |", "| --- | --- | --- | --- |"]
    met: dict[str, Refusal] = {}
    for recipe in published():
        refusals = refused_flags(recipe)
        met.update((refusal.flag, refusal) for refusal in refusals)
        answer = "refuses " + ", ".join(_shown(each.flag) for each in refusals)
        commands.append(
            f"| {recipe.name} | {recipe.num_gpus:,} | {recipe.source} | "
            f"{answer if refusals else '**accepts**'} |"
        )
    if not met:
        return "\n".join(commands)
    ways_out = ["| refused | way out |", "| --- | --- |"]
    ways_out += [f"| {_shown(each.flag)} | {each.way_out} |" for each in met.values()]
    return "\n".join([*commands, "", *ways_out])


def _shown(flag: str) -> str:
    return f"`{flag}`" if flag.startswith("--") else flag


if __name__ == "__main__":
    before, _, behind = split_page()
    PAGE.write_text(f"{before}\n{tables()}\n{behind}")
