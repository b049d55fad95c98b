"""Buckets of Megatron's DDP, which reduce gradients and gather parameters.

A launch adds its gradients to them (``hooks``), lets the reduction of fc2's begin before it ends
(``state``), and leaves gaps for others (``sizes``). Large buckets go over all links (``links``).
``ddp`` wraps each of Megatron's methods once and says in which order these act there.
"""
