"""Trains a small model in bfloat16 and in blockwise FP8, and judges how far the losses end apart.

On one GPU with Transformer Engine and Megatron-Core installed:

    python -m tools.bench.fp8_losses --megatron .megatron --out runs/fp8_losses

Megatron's stock script trains the model by each of ``runs.RUNS``, a few at the same time, from one
seed and in one order of the data, which are the sources of Python's library as bytes. Called again,
the program goes on with the runs that have not ended well. ``alltoall``
is trained twice in each precision; the second run rounds in another order, since it permutes by
torch's operations. How far apart the two end is what rounding alone does. Every run has to begin
with the same weights, those of one precision with about the same loss, and with fused attention.

Compared are the means of the last tenth of all losses. flashmoe with its experts in FP8 may differ
from ``alltoall`` in FP8 by as much as the two runs of ``alltoall`` in bfloat16 do, or by 0.25 % if
that is more. Prints tables, and writes ``fp8_losses.jsonl``, a line for each run; the exit status
is 1 if a difference is larger, or if a run has failed. ``--judge`` judges such a file again, and
``--picture`` with it draws the file if nothing is wrong.
"""
