"""NeMo Automodel's MoE models on flashmoe: import this, then ``dispatcher: flashmoe``."""

if __name__ == "__main__":
    from flashmoe_megatron.door import describe

    raise SystemExit(describe("flashmoe_megatron.automodel", __doc__))

from flashmoe_megatron.adapters.automodel import attach
from flashmoe_megatron.releases import AUTOMODEL

attach()
with AUTOMODEL.needed():
    from flashmoe_megatron.adapters.automodel.backend import BackendConfig

__all__ = ["BackendConfig"]
