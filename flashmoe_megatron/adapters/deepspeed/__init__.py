"""DeepSpeed's MoE layers on flashmoe; the public door is :mod:`flashmoe_megatron.deepspeed`.

``settings``, ``versions``, ``experts`` and ``forwards`` need no DeepSpeed; the other modules do.
"""
