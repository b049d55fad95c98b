"""DeepSpeed's MoE layers on flashmoe: ``"flashmoe": {"enabled": true}`` in the configuration."""

if __name__ == "__main__":
    from flashmoe_megatron.door import describe

    raise SystemExit(describe("flashmoe_megatron.deepspeed", __doc__))

from flashmoe_megatron.adapters.deepspeed.initialize import (
    attach,
    initialize,
    install,
    repeated_steps,
    uninstall,
)

__all__ = ["attach", "initialize", "install", "repeated_steps", "uninstall"]
