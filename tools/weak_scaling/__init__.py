"""Weak scaling on the GPUs at hand: of one layer, and of whole training iterations.

    python -m tools.weak_scaling run --out runs/weak_scaling

measures one MoE layer on 1, 2, 4, ... GPUs at equal tokens per GPU, over tokens and over experts,
with ``tools.bench.bench_layer``: the fused kernel and the unfused baseline in the same run, the
kernel after its correctness gate. Every measurement is a line of ``results.jsonl`` at once. At the
end the folder holds a report with a figure, and a run of wandb with both and with curves over GPUs:
time, efficiency T(2) / T(N), throughput, exposed communication T(N) - T(1). A run that ended early
goes on with ``--resume``, which also tries once more what failed. Arguments that are not listed go
to ``bench_layer``.

    python -m tools.weak_scaling report runs/weak_scaling     # table and figure, once more
    python -m tools.weak_scaling training megatron            # whole training iterations instead

Without a GPU the same is done small, on 1 and 2 processes, with the reference backend over gloo;
figure, columns and report then say "reference".

wandb writes into the folder and needs no account, unless ``WANDB_API_KEY`` is set or ``WANDB_MODE``
says otherwise; its other variables (``WANDB_BASE_URL``, ``WANDB_PROJECT``, ``WANDB_ENTITY``,
``WANDB_RUN_GROUP``) hold as everywhere.
"""
