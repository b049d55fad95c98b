# The scripts beside this one call it: it sets everything up and runs a Python program of this folder,
# the first argument, on two ranks. With one GPU there is one rank; without a GPU both ranks run on
# processors.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    export FLASHMOE_SKIP_CUDA_BUILD=${FLASHMOE_SKIP_CUDA_BUILD:-1} # no GPU here could run what it compiles
fi
python=$(bash tools/setup_env.sh)
ranks=$("$python" -c 'import torch; print(min(torch.cuda.device_count(), 2) or 2)')
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores >= 2 * ranks ? cores / ranks : 1))}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # an environment may lack the package
exec "$python" -m torch.distributed.run --standalone --nproc_per_node "$ranks" "examples/$1" "${@:2}"
