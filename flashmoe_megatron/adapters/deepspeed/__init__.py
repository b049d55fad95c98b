"""DeepSpeed's MoE layers on flashmoe; the public door is :mod:`flashmoe_megatron.deepspeed`.

``initialize``, ``settings``, ``experts``, ``forwards``, ``routed`` and ``routes`` can be imported
without DeepSpeed; the other modules cannot.
"""
