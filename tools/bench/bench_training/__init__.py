"""Trains a model with flashmoe and with its framework's own MoE layers, and compares the two.

On all GPUs of a host, from the checkout; in small without a GPU:

    torchrun --nproc-per-node 4 -m tools.bench.bench_training megatron --out runs/training
    torchrun --nproc-per-node 4 -m tools.bench.bench_training deepspeed --out results.jsonl

``megatron`` judges the loss curve by the band of noise of Megatron's own runs; ``deepspeed`` wants
the losses of equal batches within a bound. The logs of stock ``pretrain_gpt.py`` runs are compared
by the same band, with the same exit status of 1 for a curve that is outside:

    python -m tools.bench.bench_training logs flashmoe.log alltoall.log --noise alltoall_again.log

``COMMAND --help`` describes each.
"""
