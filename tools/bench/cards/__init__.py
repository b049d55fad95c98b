"""Trains published models with Megatron's stock script, and writes what a user gets as cards.

On one Hopper GPU or several, with Transformer Engine and Megatron-Core installed:

    python -m tools.bench.cards run --megatron .megatron --out runs/cards --minutes 9
    python -m tools.bench.cards pages --out runs/cards
    python -m tools.bench.cards keep DATE-cards-GPU-1x.jsonl --out runs/cards
    python -m tools.bench.cards picture

``.megatron`` is a folder with ``pretrain_gpt.py`` of Megatron-LM, the files that it imports except
Megatron-Core, and the commit in a file ``COMMIT``. A card is of one model, cut so that it fits, on
so many GPUs. It has an arm for each way to train: with flashmoe or with Megatron's ``alltoall``,
with CUDA graphs of pieces or with one graph of the iteration, with the routing that the router
learns or with forced balance. An arm is a process of 30 iterations, and the last ten count.
Three more are recorded for the time that the GPU is busy.

``run`` runs one arm after another until the time is over. Arms start together, and wait for their
turn before they build their models. Called again, it goes on where it stopped, also days later and
on another machine that has the folder; the card then names both. A run whose attention Transformer
Engine does not fuse ends after its first iteration, and is no result.

``keep`` adds results to a file in ``tools/bench/results``, which has the cards of all models on one
kind and number of GPUs, a line for each arm. From these files ``picture`` draws the README's
picture, and ``python -m tools.tables`` writes the README's table and the page of cards. Both need
no GPU.
"""
