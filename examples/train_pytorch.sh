#!/usr/bin/env bash
# Sets everything up and trains a small GPT-MoE in plain PyTorch on two ranks, expert parallel;
# arguments go to examples/train_pytorch.py.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" train_pytorch.py "$@"
