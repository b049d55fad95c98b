#!/usr/bin/env bash
# Prepares .venv with torch, Megatron-Core, DeepSpeed, this package in editable form and the tools of
# the checks, compiles csrc/, and prints the path of the interpreter; progress goes to stderr. It is
# quick when nothing has changed.
#
#   FLASHMOE_PYTHON           an interpreter that has everything; used as it is, nothing is built
#   PYTHON                    the interpreter to make .venv with (3.10 to 3.13)
#   CUDA_HOME                 a CUDA toolkit to compile with; else nvcc 13 in PATH; else from PyPI
#   MAX_JOBS                  compilers at a time; else one for each core
#   FLASHMOE_SKIP_CUDA_BUILD  1: do not compile csrc/; all but the kernel will work
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup: $*" >&2; }

if [ "${1:-}" = --help ]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' tools/setup_env.sh
    exit
fi
if [ $# -gt 0 ]; then
    say "got $*: wanted no arguments"
    exit 2
fi

if [ -n "${FLASHMOE_PYTHON:-}" ]; then
    command -v "$FLASHMOE_PYTHON" && exit
    say "FLASHMOE_PYTHON=$FLASHMOE_PYTHON: no such interpreter"
    exit 1
fi

is_usable() {
    "$1" -c 'import sys, venv, ensurepip
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

choose_python() {
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3}; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    say "no Python 3.10 to 3.13 with venv among: ${PYTHON:-python3.11 python3.12 python3.13" \
        "python3.10 python3}; install one, or name one in PYTHON"
    exit 1
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q GPU; }

torch_version=2.13.0
venv=.venv
python=$PWD/$venv/bin/python
stamp=$venv/installed
wanted=$({ cat pyproject.toml setup.py tools/setup_env.sh; echo "${PYTHON:-} $PWD"; } | sha256sum)

pip() { "$python" -m pip --disable-pip-version-check "$@" >&2; }
is_new=
if [ ! -x "$python" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    is_new=yes
    base=$(choose_python)
    say "making $venv with $("$base" --version)"
    "$base" -m venv --clear "$venv"
fi

# csrc/ is compiled while packages are fetched and unpacked, which keeps less than one core busy.
compiler=
if [ "${FLASHMOE_SKIP_CUDA_BUILD:-}" != 1 ]; then
    # The compiler's packages stay out of .venv, where torch may have brought other versions.
    toolchain=$PWD/build/toolchain
    if [ -n "${CUDA_HOME:-}" ] || nvcc --version 2>/dev/null | grep -q "release 13\."; then
        pattern='nvidia-cutlass'
    else
        pattern='nvidia-'
    fi
    mapfile -t packages < <(grep "^$pattern" tools/toolchain.txt)
    if [ "$(cat "$toolchain/installed" 2>/dev/null)" != "${packages[*]}" ]; then
        say "installing ${packages[*]}"
        rm -rf "$toolchain"
        pip install --quiet --no-deps --target "$toolchain" "${packages[@]}"
        echo "${packages[*]}" >"$toolchain/installed"
    fi
    say "compiling csrc/"
    "$python" -S tools/build.py >&2 & # without .venv's packages, of which some are not whole yet
    compiler=$!
    trap 'kill "$compiler" 2>/dev/null || true' EXIT
fi

if [ -n "$is_new" ]; then
    # torch comes first and is pinned, so that nothing that follows brings another one. Without a
    # GPU the build for processors is enough; pip prefers it wherever one of its indexes has it.
    say "installing torch $torch_version"
    pip install --quiet "torch==$torch_version"
    if has_gpu && ! "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
        say "this machine has a GPU but pip chose a torch without CUDA: $("$python" -c \
            'import torch; print(torch.__version__)'); check pip's index settings"
        exit 1
    fi
    say "installing Megatron-Core, DeepSpeed, the package and the tools of the checks"
    pip install --quiet "setuptools>=77" wheel
    # DeepSpeed compiles its operators when they are first used. Its set-up asks torch for a GPU, so
    # it needs this torch and not another that pip would fetch for the build.
    DS_BUILD_OPS=0 FLASHMOE_SKIP_CUDA_BUILD=1 \
        pip install --quiet --no-build-isolation --editable ".[test,dev]"
    # The oldest release that the package claims to work with is installed as well, in a folder of
    # its own; that fetches 2 MB.
    oldest=$("$python" -c 'from flashmoe_megatron.releases import DEEPSPEED
print(*DEEPSPEED.oldest, sep=".")')
    rm -rf "build/deepspeed-$oldest"
    DS_BUILD_OPS=0 pip install --quiet --no-deps --no-build-isolation \
        --target "build/deepspeed-$oldest" "deepspeed==$oldest"
    # Further releases of transformers and torchtitan are installed in the same way, with those of
    # their dependencies alone that models import and that are not here; they fetch 30 MB, and are
    # compiled when they are first imported. They need Python 3.11.
    beside() {
        rm -rf "build/$1"
        pip install --quiet --no-deps --no-compile --target "build/$1" "${@:2}"
    }
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        for release in 5.23.0 5.24.0; do
            beside "transformers-$release" "transformers==$release"
        done
        beside torchtitan-0.3.0 \
            torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring-parser==0.18.0 \
            torchdata==0.11.0 torch_checkpointing==0.1.1
    fi
    echo "$wanted" >"$stamp"
fi

if [ -n "$compiler" ]; then
    trap - EXIT
    wait "$compiler"
fi
echo "$python"
