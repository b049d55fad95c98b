"""The paper's experiments on the GPUs at hand, in one command.

    python -m tools.weak_scaling run --out runs/weak_scaling

Weak scaling over 1, 2, 4, ... GPUs at equal tokens per GPU, forward latency over tokens and over
experts, overlap efficiency, throughput and memory: the fused kernel and the unfused baseline in the
same run. Every point has to pass the correctness gate before it is timed, becomes a line of
``results.jsonl`` at once and a run of wandb; at the end the folder holds tables and figures. A run
that ended early goes on with ``--resume``. ``--device cpu`` runs the same, small, on the reference
backend and gloo.

    python -m tools.weak_scaling report runs/weak_scaling     # tables and figures, once more
    python -m tools.weak_scaling log runs/weak_scaling        # to wandb, from what was kept

    python -m tools.weak_scaling training megatron            # whole training iterations instead

wandb writes into the folder and needs no account, unless ``WANDB_API_KEY`` is set or ``WANDB_MODE``
says otherwise; its other variables (``WANDB_BASE_URL``, ``WANDB_PROJECT``, ``WANDB_ENTITY``,
``WANDB_RUN_GROUP``) hold as everywhere.
"""
