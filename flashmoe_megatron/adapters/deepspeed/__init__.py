"""DeepSpeed's MoE layers on flashmoe; the public door is :mod:`flashmoe_megatron.deepspeed`.

``settings``, ``versions`` and ``experts`` need no DeepSpeed; the other modules import it.
"""
