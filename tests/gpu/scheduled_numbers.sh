#!/usr/bin/env bash
# Measures what the scheduled backend promises on one GPU or two, and says what is missed:
#
#     bash tests/gpu/scheduled_numbers.sh runs/scheduled
#
# With two GPUs of one host NCCL's exchanges over NVLink are fitted, too, and a layer of Qwen3's shape
# is stamped. Over sockets each process is a host of its own, also where both share one GPU.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:?the folder that takes the files}
mkdir -p "$out"
export PYTHONPATH=$PWD
gpus=$(nvidia-smi -L | wc -l)
commit=${FLASHMOE_COMMIT:-$(git rev-parse --short HEAD)}
failed=0

run() {
    echo "== $SECONDS s: $*"
    timeout 90 "$@" || { echo "failed: $*" && failed=1; }
}
pair() {
    run python -m torch.distributed.run --nproc-per-node 2 --master-port 29612 \
        -m flashmoe_megatron.schedule "$@"
}
sockets() {
    # shellcheck disable=SC2016 - the variables are each process's own
    run env NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo \
        python -m torch.distributed.run --nproc-per-node 2 --master-port 29611 --no-python bash -c \
        'export NCCL_HOSTID=host$LOCAL_RANK FLASHMOE_HOST_ID=host$LOCAL_RANK
         exec python -m flashmoe_megatron.schedule "$@"' _ "$@"
}

bench=(python -m tools.bench.bench_layer --commit "$commit" --out "$out/layer.jsonl")
rm -f "$out/layer.jsonl"
run env CUDA_VISIBLE_DEVICES=0 "${bench[@]}" --backend scheduled --shapes qwen3-30b mixtral-8x7b paper-8k
run env CUDA_VISIBLE_DEVICES=0 "${bench[@]}" --backend reference --shapes qwen3-30b --iterations 5 \
    --warmup 1 --no-baselines
run env CUDA_VISIBLE_DEVICES=0 python -m flashmoe_megatron.schedule fit "$out/one.json"
sockets fit "$out/sockets.json" --mib 16
sockets trace "$out/trace_sockets.json" --degree auto --degree-fit "$out/sockets.json" --hidden 1024 \
    --intermediate 65536 --num-experts 4 --topk 2 --tokens 2048
if [ "$gpus" -gt 1 ]; then
    pair fit "$out/pair.json"
    pair trace "$out/trace_pair.json" --degree auto --degree-fit "$out/pair.json" --hidden 2048 \
        --intermediate 768 --num-experts 128 --topk 8 --gated --tokens 8192
fi

run python - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

out, missed = Path(sys.argv[1]), []


def judge(what: str, found: float, bound: float, is_good: bool) -> None:
    print(f"{'good' if is_good else 'MISSED'}: {what} {found:.4f}, wanted {bound}")
    missed.extend([] if is_good else [what])


for name in ("one", "sockets", "pair"):
    if (path := out / f"{name}.json").exists():
        lines = json.loads(path.read_text())["lines"]
        for line, terms in lines.items():
            if line.startswith("host"):
                continue
            bound = 0.998 if line in ("product", "copy") else 0.99
            found = terms["r_squared"]
            judge(f"r squared of {line}, {name}", found, bound, found >= bound)
times_of: dict[tuple[str, ...], list[float]] = {}
for text in (out / "layer.jsonl").read_text().splitlines():
    one = json.loads(text)
    if "median_ms" in one:
        key = (one["shape"], one["measurement"], one["implementation"])
        times_of.setdefault(key, []).append(one["median_ms"])
for (shape, what, kind), times in times_of.items():
    if kind == "unfused":
        ratio = times_of[shape, what, "fused"][0] / times[0]
        judge(f"{shape} {what} over unfused", ratio, 1.10, ratio <= 1.10)
    if kind == "fused" and len(times) > 1:
        judge(f"{shape} {what}, reference over it", times[1] / times[0], 3, times[1] >= 3 * times[0])
sys.exit(bool(missed))
PYTHON
exit "$failed"
