"""The layers of published models, as their config.json in transformers' form describes them."""

from typing import Any

from flashmoe_megatron.bench.shapes import Form, Shape
from flashmoe_megatron.config import Activation

GPT_OSS = Form(Activation.QUICK_GELU, clamp_value=7.0, linear_offset=1.0, has_bias=True)
SWIGLU = Form(Activation.SILU)

CONFIGS: dict[str, tuple[dict[str, Any], Shape, Form]] = {
    "qwen3-30b-a3b": (
        {
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        Shape(8192, 2048, 768, 128, 8, gated=True),
        SWIGLU,
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "hidden_act": "silu",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "experts_per_token": 4,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
        },
        Shape(8192, 2880, 2880, 32, 4, gated=True),
        GPT_OSS,
    ),
    "llama-4-scout": (
        {
            "model_type": "llama4",
            "vision_config": {"hidden_size": 1408, "intermediate_size": 5632},
            "text_config": {
                "hidden_size": 5120,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "hidden_act": "silu",
            },
        },
        Shape(8192, 5120, 8192, 16, 1, gated=True),
        SWIGLU,
    ),
    "dbrx": (
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
        Shape(8192, 6144, 10752, 16, 4, gated=True),
        SWIGLU,
    ),
    "nemotron-3-nano": (
        {
            "model_type": "nemotron_h",
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "moe_intermediate_size": 1856,
            "mlp_hidden_act": "relu2",
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
        },
        Shape(8192, 2688, 1856, 128, 6, gated=False),
        Form(Activation.SQUARED_RELU),
    ),
    "gpt-oss without its clamp": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        Shape(8192, 2880, 2880, 128, 4, gated=True),
        GPT_OSS,
    ),
    "minimax-m3": (
        {
            "model_type": "minimax_m3_vl_text",
            "hidden_act": "silu",
            "hidden_size": 6144,
            "intermediate_size": 3072,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        Shape(8192, 6144, 3072, 128, 4, gated=True),
        Form(Activation.QUICK_GELU, clamp_value=7.0, linear_offset=1.0),
    ),
    "deepseek-v4": (
        {
            "model_type": "deepseek_v4",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "swiglu_limit": 10.0,
        },
        Shape(8192, 4096, 2048, 256, 6, gated=True),
        Form(Activation.SILU, clamp_value=10.0),
    ),
    "a list for all layers": (
        {
            "model_type": "hunyuan_v1_moe",
            "hidden_size": 4096,
            "moe_intermediate_size": [3072, 3072],
            "num_experts": 64,
            "moe_topk": [8, 8],
        },
        Shape(8192, 4096, 3072, 64, 8, gated=True),
        SWIGLU,
    ),
}
"""What the keys say of the experts, the layer of 8,192 tokens, and what its experts compute."""
