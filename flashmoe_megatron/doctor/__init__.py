"""Facts of an installation and of its machine; ``python -m flashmoe_megatron`` prints them."""
