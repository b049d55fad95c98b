#!/usr/bin/env bash
# Sets everything up, then runs every check and every test that needs no GPU; arguments go to
# pytest. Fails if any of them fails, after all have run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(bash tools/setup_env.sh)
bin=$(dirname "$python")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
failed=()

check() {
    echo "== $*"
    PATH=$bin:$PATH "$@" || failed+=("$1")
}

# find lists the sources, since a copy of the checkout may lack git. With an empty list clang-format
# would read its standard input.
mapfile -t sources < <(
    find csrc tests tools \( -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.c' \
        -o -name '*.cc' \) | sort
)
if [ ! -d csrc ] || [ "${#sources[@]}" -eq 0 ]; then
    echo "csrc has no sources" >&2
    exit 1
fi
# Without a cache mypy keeps one processor busy for more than a minute, so the others run concurrently.
types=$(mktemp)
PATH=$bin:$PATH mypy > "$types" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2> /dev/null || true; rm -f "$types"' EXIT
check ruff check .
check ruff format --check .
check clang-format --dry-run -Werror "${sources[@]}"
check codespell
check python tools/check_layers.py
check python tools/check_prose.py
# No GPU is here to run these, but what they import and take as parameters is. mypy checks what they
# call.
check pytest --collect-only -qq tests/gpu tests/multi_gpu
# Each file is in one of three processes, since its tests share fixtures; short files come last. Two
# cores are busier with three than with two, as many tests wait: for ranks, time limits, programs.
check pytest --at-once --numprocesses 3 --dist loadfile --no-loadscope-reorder \
    tests/protocol tests/unit tests/build tests/megatron tests/deepspeed tests/frameworks tests/tools tests/faults tests/fuzz tests/replicas "$@"
echo "== mypy"
wait "$mypy" || failed+=(mypy)
cat "$types"

if [ "${#failed[@]}" -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all checks passed"
