"""Megatron's own training script, on processors."""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]
BRIDGE = REPOSITORY / "examples" / "cpu_bridge.py"

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

SEQUENCE_PARALLEL_BLOCK = '''
"""A block of local layers whose norms allow sequence parallelism, for --spec.

Megatron's own need Apex or Transformer Engine for it.
"""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


class Norm(torch.nn.RMSNorm):
    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


layer = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
submodules = TransformerBlockSubmodules(layer_specs=[layer] * 2, layer_norm=Norm)
'''


def torchrun(
    megatron_lm: Path,
    directory: Path,
    *arguments: str,
    num_ranks: int = 2,
    timeout_s: float = PATIENCE_S,
) -> str:
    """Runs a program on processors; its output, or a failure with its end."""
    for package in ("pybind11", "six", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.fail(f"Megatron-LM needs {package}, which is not installed")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(megatron_lm), str(REPOSITORY), os.environ.get("PYTHONPATH", ""), str(directory)]
        ),
        # Megatron compiles its dataset helpers for the python3 of the path.
        "PATH": os.pathsep.join(
            [str(Path(sys.executable).parent), f"{sys.base_prefix}/bin", os.environ["PATH"]]
        ),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
    }
    launch = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    launch.append(f"--nproc_per_node={num_ranks}")
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
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{arguments[:2]} did not finish in {timeout_s} s")
    assert process.returncode == 0, output[-6000:]
    return output
