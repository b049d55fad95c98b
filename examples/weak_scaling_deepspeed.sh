#!/usr/bin/env bash
# Trains the GPT-MoE of pretrain_moe_deepspeed.sh on 1, 2, 4, ... GPUs at equal tokens per GPU, with
# flashmoe and with DeepSpeed's own layers; on 1 and 2 processes without a GPU. Arguments go to
# examples/weak_scaling.py.
exec bash "$(dirname "${BASH_SOURCE[0]}")/weak_scaling_launch.sh" deepspeed "$@"
