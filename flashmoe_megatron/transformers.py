"""transformers' MoE models on flashmoe: import this, then ``experts_implementation="flashmoe"``."""

if __name__ == "__main__":
    from flashmoe_megatron.door import describe

    raise SystemExit(describe("flashmoe_megatron.transformers", __doc__))

from flashmoe_megatron.releases import TRANSFORMERS

with TRANSFORMERS.needed():
    from flashmoe_megatron.adapters.transformers.experts import configure
    from flashmoe_megatron.adapters.transformers.register import register

    register()

__all__ = ["configure"]
