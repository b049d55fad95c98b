#!/usr/bin/env bash
# Sets everything up and pretrains a small GPT-MoE with DeepSpeed on two ranks, expert parallel;
# arguments go to examples/pretrain_moe_deepspeed.py.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" pretrain_moe_deepspeed.py "$@"
