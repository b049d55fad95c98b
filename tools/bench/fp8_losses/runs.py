"""The model, its data, and the ways to train it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.python_sources import read_sources
from tools.bench.cards.arms import BLOCKWISE, EXPERTS
from tools.gpu_check import torchrun

END_OF_FILE = 256
"""The token between two files, after one token for each byte."""

MODEL = f"""
--transformer-impl transformer_engine --bf16 --num-layers 2 --hidden-size 1024
--ffn-hidden-size 4096 --num-attention-heads 16 --normalization RMSNorm
--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --swiglu --disable-bias-linear --num-experts 16 --moe-ffn-hidden-size 1024
--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--moe-router-dtype fp32 --moe-grouped-gemm --use-distributed-optimizer
--no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader
--tokenizer-type NullTokenizer --vocab-size {END_OF_FILE + 1} --split 1,0,0 --num-workers 1
--seq-length 512 --max-position-embeddings 512 --micro-batch-size 64 --global-batch-size 64
--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 50 --log-interval 1
--eval-iters 0 --eval-interval 100000 --seed 1234 --manual-gc
"""
"""Flags of the stock script. Experts' sizes are multiples of 128. The learning rate falls, since
two runs are the further apart, the larger their last steps are."""


@dataclass(frozen=True)
class Run:
    """One way to train.

    Attributes:
        name: Names its log and its line of the record.
        dispatcher: Who computes the experts.
        flags: Those that no other way has.
    """

    name: str
    dispatcher: str
    flags: str

    def command(self, script: Path, seen: Path, text: Path, iterations: int) -> list[str]:
        """Returns what starts it.

        Args:
            script: ``pretrain_gpt.py``.
            seen: A file for :mod:`.begun` to write.
            text: What :func:`write_text` wrote.
            iterations: Iterations of the training.
        """
        # Each has a cache of its own: several may not write one at the same time.
        data = ["--data-path", str(text), "--data-cache-path", str(seen.with_suffix(".cache"))]
        return [
            *torchrun(1),
            *("-m", "tools.bench.fp8_losses.begun", str(seen), str(script)),
            *(*MODEL.split(), *data, "--train-iters", str(iterations)),
            *("--moe-token-dispatcher-type", self.dispatcher, *self.flags.split()),
        ]


FUSED = "--moe-permute-fusion"
THEIRS, *OURS, BF16, BF16_AGAIN, THEIRS_AGAIN = RUNS = (
    Run("alltoall-fp8", "alltoall", f"{BLOCKWISE} {FUSED}"),
    *(
        Run(f"flashmoe-{variant}", "flashmoe", f"{BLOCKWISE} {FUSED} {flags}")
        for variant, flags in EXPERTS.items()
    ),
    Run("alltoall-bf16", "alltoall", FUSED),
    Run("alltoall-bf16-again", "alltoall", ""),
    Run("alltoall-fp8-again", "alltoall", BLOCKWISE),
)
"""All ways, the most important first. Parameters are bfloat16 in each, so that every run begins
with the same ones."""


def write_text(prefix: Path, megabytes: int) -> None:
    """Writes the sources of Python's library as an indexed dataset of Megatron.

    Args:
        prefix: The dataset's path without a suffix; its folder need not exist.
        megabytes: At most so much text.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for text in read_sources(megabytes):
        tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
        document = np.append(tokens, np.uint16(END_OF_FILE))
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
