#!/usr/bin/env bash
# Trains one GPT-MoE on 1, 2, 4, ... GPUs at equal tokens per GPU, with flashmoe and with
# Megatron's alltoall; on 1 and 2 processes without a GPU. Arguments go to
# `python -m tools.weak_scaling training megatron`, whose --help has them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    export FLASHMOE_SKIP_CUDA_BUILD=${FLASHMOE_SKIP_CUDA_BUILD:-1} # nothing here could run it
fi
exec "$(bash tools/setup_env.sh)" -m tools.weak_scaling training megatron "$@"
