"""Trains published models, cut to four layers, with stock pretrain_gpt.py on one GPU.

    python -m tests.megatron.trainings --megatron .megatron --out runs/recipes

``--megatron`` is a folder with ``pretrain_gpt.py`` and what it imports beside Megatron-Core, which
has to be installed with Transformer Engine. Each run is a process of 20 iterations: a recipe with
flashmoe or with Megatron's ``alltoall``. Logs stay beside ``recipes.jsonl``, a line for each run.

The table has the median iteration in front of the recorded ones, the wait for batches and the time
that the GPU is busy in it, and what is left: by that the host is late. ``--only`` chooses runs by
parts of their names; they are run in the order of the table until ``--minutes`` are over.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.bench_training.logs import read_log
from tools.bench.cards.models import RECORDED

ITERATIONS = 20
WARM = 7
"""First iterations that are not timed: kernels are chosen, and graphs captured in the fourth."""

COMMON = f"""
--transformer-impl transformer_engine --bf16 --num-layers 4 --seq-length 4096
--max-position-embeddings 4096 --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--moe-grouped-gemm --moe-permute-fusion --expert-model-parallel-size 1
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data
--tokenizer-type NullTokenizer --vocab-size 32000 --split 1,0,0 --num-workers 2
--no-create-attention-mask-in-dataloader --train-iters {ITERATIONS} --lr 1e-4 --min-lr 1e-5
--lr-decay-style constant --no-gradient-accumulation-fusion --log-interval 1 --eval-iters 0
--eval-interval 1000 --seed 1234 --manual-gc
"""

QWEN3 = """
--hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention
--num-query-groups 4 --kv-channels 128 --qk-layernorm --swiglu --disable-bias-linear
--num-experts 64 --moe-ffn-hidden-size 768 --moe-router-topk 8
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32
--micro-batch-size 2 --global-batch-size 8
"""

MOONLIGHT = """
--hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16 --multi-latent-attention
--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 192
--swiglu --disable-bias-linear --num-experts 64 --moe-layer-freq [0]+[1]*3
--moe-ffn-hidden-size 1408 --moe-router-topk 6 --moe-shared-expert-intermediate-size 2816
--moe-shared-expert-overlap --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-topk-scaling-factor 2.446 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32 --recompute-granularity selective
--micro-batch-size 1 --global-batch-size 4
"""

GPT_OSS = """
--hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 --group-query-attention
--num-query-groups 8 --kv-channels 64 --quick-geglu --glu-linear-offset 1.0
--activation-func-clamp-value 7.0 --softmax-type learnable --window-size 127,0
--window-attn-skip-freq 2 --num-experts 32 --moe-ffn-hidden-size 2880 --moe-router-topk 4
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
--no-bias-dropout-fusion --seq-length 2048 --micro-batch-size 1 --global-batch-size 4
"""
"""Sequences are halved, since Transformer Engine's 2.20 keeps probabilities of this attention,
2 GiB a time with 4,096 tokens, and did not fit. There is no ``--moe-router-dtype fp32``: a product
in float32 of that version reads the router's bias, which is bfloat16, as if it were float32, and
past its end."""

GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules"
AROUND_EXPERTS = "attn moe_router moe_preprocess"
ONE_WEIGHT = "--use-transformer-engine-op-fuser --moe-single-grouped-weight"
FP8 = "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather"
WHOLE = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"


@dataclass(frozen=True)
class Training:
    """One run: its name, the flags that differ, and whether it is flashmoe's or alltoall's."""

    name: str
    flags: str
    is_ours: bool = True

    @property
    def title(self) -> str:
        """The name in tables, and of files."""
        return f"{self.name}-{'flashmoe' if self.is_ours else 'alltoall'}"

    def command(self, script: Path, seen: Path) -> list[str]:
        """What starts it, with a file for what :mod:`~.watched` sees."""
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        dispatcher = "flashmoe" if self.is_ours else "alltoall"
        return [
            *(sys.executable, *launch, "-m", "tests.megatron.watched"),
            *(str(seen), str(script), *COMMON.split(), *self.flags.split()),
            *("--moe-token-dispatcher-type", dispatcher),
        ]


def trainings() -> Iterator[Training]:
    """All runs, the most important first."""
    for name, flags in (
        ("qwen3-graphs", f"{QWEN3} {GRAPHS} {AROUND_EXPERTS}"),
        ("qwen3", QWEN3),
        ("qwen3-fp8-graphs", f"{QWEN3} {FP8} {GRAPHS} moe_router moe_preprocess"),
        ("moonlight-shared-overlap", MOONLIGHT),
        ("gpt-oss", GPT_OSS),
    ):
        yield Training(name, flags)
        yield Training(name, flags, is_ours=False)
    # Megatron's alltoall waits on the host, so that it has no graph of the whole iteration, and
    # computes with one parameter for all experts on Blackwell alone.
    yield Training("qwen3-whole-graph", f"{QWEN3} {WHOLE} --flashmoe-row-bound 2")
    yield Training("qwen3-one-weight-graphs", f"{QWEN3} {ONE_WEIGHT} {GRAPHS} {AROUND_EXPERTS}")


def run(training: Training, script: Path, out: Path, limit_s: float) -> dict[str, Any]:
    """Runs one training; what it did, or how it failed.

    Args:
        training: The run.
        script: ``pretrain_gpt.py``.
        out: A folder for its log and what is seen of it.
        limit_s: Seconds after which it is ended.
    """
    log, seen = out / f"{training.title}.log", out / f"{training.title}.json"
    seen.unlink(missing_ok=True)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
    if ONE_WEIGHT in training.flags:
        # Without the first Megatron refuses the flags, and without the second the parameters are
        # those of each expert.
        environment["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"
        environment["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"
    begin = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(
            training.command(script.resolve(), seen.resolve()),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its rank
            status = process.wait()
    iterations = read_log(log)
    result = {
        "run": training.title,
        "status": status,
        "seconds": round(time.perf_counter() - begin, 1),
        "losses": [each.loss for each in iterations.values()],
        "iteration_ms": [each.ms for each in iterations.values()],
    }
    if seen.is_file():
        result |= json.loads(seen.read_text())
    return result


def row(result: Mapping[str, Any]) -> str:
    """A run's line of the table."""
    timed = slice(WARM, ITERATIONS - RECORDED)
    if "busy_ms" not in result:
        after = f"status {result['status']} after {len(result['losses'])} iterations"
        return f"| {result['run']} | {after} | | | | | |"
    ms = statistics.median(result["iteration_ms"][timed])
    waits = statistics.median(result["batch_ms"][timed])
    busy, losses = result["busy_ms"], result["losses"]
    return (
        f"| {result['run']} | {ms:.1f} | {waits:.1f} | {busy:.1f} | {ms - waits - busy:.1f} | "
        f"{result['most_gib']:.1f} | {losses[0]:.5f}, {losses[9]:.5f}, {losses[-1]:.5f} |"
    )


HEADER = """
| run | iteration, ms | waits for batches | GPU busy | left | GiB | loss 1, 10, 20 |
| --- | --- | --- | --- | --- | --- | --- |"""


def end_of(log: Path, num_lines: int = 25) -> str:
    """The last lines of a log, behind the first line that names an error."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line][:3]
    return "\n".join([*errors, "...", *lines[-num_lines:]])


def main(arguments: list[str]) -> int:
    """The command line; the exit status is 1 if a run has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True, help="has pretrain_gpt.py")
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--only", nargs="*", default=[], help="parts of names; default: all runs")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all runs together")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    options = parser.parse_args(arguments)
    script = options.megatron / "pretrain_gpt.py"
    chosen = [
        each
        for each in trainings()
        if not options.only or any(part in each.title for part in options.only)
    ]
    if options.list:
        for training in chosen:
            print(" ".join(training.command(script, options.out / f"{training.title}.json")))
        return 0
    if not script.is_file():
        print(f"error: {script} is no file, wanted Megatron-LM's script", file=sys.stderr)
        return 2
    if not chosen:
        print(f"error: no run's name has one of {options.only}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    results = []
    for training in chosen:
        left = end - time.monotonic()
        if left < 20:
            print(f"no time is left for {training.title}", flush=True)
            continue
        results.append(run(training, script, options.out, left))
        with (options.out / "recipes.jsonl").open("a") as file:
            file.write(json.dumps(results[-1]) + "\n")
        print(row(results[-1]), f"{results[-1]['seconds']} s", flush=True)
        if results[-1]["status"]:
            print(end_of(options.out / f"{training.title}.log"), flush=True)
    print(HEADER, *map(row, results), sep="\n")
    return int(any(result["status"] for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
