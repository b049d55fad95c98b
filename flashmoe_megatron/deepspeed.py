"""DeepSpeed's MoE layers on flashmoe: ``"flashmoe": {"enabled": true}`` in the configuration."""

from flashmoe_megatron.adapters.deepspeed.initialize import attach, initialize, install, uninstall

__all__ = ["attach", "initialize", "install", "uninstall"]
