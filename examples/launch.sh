# The other scripts of this folder call this one. It sets everything up and runs a Python program of
# this folder, the first argument, on two ranks. With one GPU there is one rank; without a GPU both
# ranks run on CPUs. On several hosts, FLASHMOE_RENDEZVOUS names the first one and a free port of
# it, as host:port, and FLASHMOE_HOSTS says how many there are.
set -euo pipefail
if [ -n "${FLASHMOE_HOSTS:-}" ] && [ -z "${FLASHMOE_RENDEZVOUS:-}" ]; then
    echo "FLASHMOE_HOSTS=$FLASHMOE_HOSTS: wanted FLASHMOE_RENDEZVOUS=host:port, too, got none" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    export FLASHMOE_SKIP_CUDA_BUILD=${FLASHMOE_SKIP_CUDA_BUILD:-1} # no GPU here could run what it compiles
fi
python=$(bash tools/setup_env.sh)
ranks=$("$python" -c 'import torch; print(min(torch.cuda.device_count(), 2) or 2)')
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores >= 2 * ranks ? cores / ranks : 1))}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # an environment may lack the package
where=(--standalone)
if [ -n "${FLASHMOE_RENDEZVOUS:-}" ]; then
    where=(--nnodes "${FLASHMOE_HOSTS:-2}" --rdzv_backend c10d --rdzv_endpoint "$FLASHMOE_RENDEZVOUS")
fi
exec "$python" -m torch.distributed.run "${where[@]}" --nproc_per_node "$ranks" "examples/$1" "${@:2}"
