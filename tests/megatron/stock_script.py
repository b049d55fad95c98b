"""Megatron's own training script, on processors."""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BRIDGE = REPOSITORY / "examples" / "cpu_bridge.py"
TIMEOUT_S = 200

MODEL = shlex.split("""
    --distributed-backend gloo --transformer-impl local --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion
    --no-bias-swiglu-fusion --attention-softmax-in-fp32 --use-cpu-initialization
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --normalization RMSNorm --swiglu
    --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --num-experts 4 --moe-ffn-hidden-size 64 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --expert-model-parallel-size 2
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 1,0,0 --num-workers 0
    --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --min-lr 1e-4
    --lr-decay-style constant --log-interval 1 --eval-iters 0 --eval-interval 1000
""")


def torchrun(megatron_lm: Path, directory: Path, *arguments: str) -> str:
    """Runs a program of two ranks on processors; its output, or a failure with its end."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Megatron-LM imports triton, which is not installed")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(megatron_lm), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        ),
        # Megatron compiles its dataset helpers for the python3 of the path.
        "PATH": os.pathsep.join(
            [str(Path(sys.executable).parent), f"{sys.base_prefix}/bin", os.environ["PATH"]]
        ),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
    }
    launch = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = subprocess.Popen(
        [sys.executable, *launch, str(BRIDGE), *arguments],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{arguments[:2]} did not finish in {TIMEOUT_S} s")
    assert process.returncode == 0, output[-6000:]
    return output
