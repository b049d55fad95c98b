"""Experts of transformers on flashmoe; the door is :mod:`flashmoe_megatron.transformers`."""
