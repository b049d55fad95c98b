"""Times a layer, and others on the same data; ``python -m flashmoe_megatron.bench``."""
