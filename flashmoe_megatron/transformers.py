"""transformers' MoE models on flashmoe: import this, then ``experts_implementation="flashmoe"``."""

from flashmoe_megatron.adapters.transformers.experts import configure
from flashmoe_megatron.adapters.transformers.register import register

register()

__all__ = ["configure"]
