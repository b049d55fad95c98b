# For the two scripts beside it: sets everything up and runs weak_scaling.py with their framework.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    export FLASHMOE_SKIP_CUDA_BUILD=${FLASHMOE_SKIP_CUDA_BUILD:-1} # nothing here could run it
fi
python=$(bash tools/setup_env.sh)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # for tools/, and an environment without the package
exec "$python" examples/weak_scaling.py "$@"
