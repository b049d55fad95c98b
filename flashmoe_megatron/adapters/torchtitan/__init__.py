"""Routed experts of torchtitan on flashmoe; the door is :mod:`flashmoe_megatron.torchtitan`."""
