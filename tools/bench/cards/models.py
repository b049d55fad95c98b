"""The models of the cards: flags of their layers, and cuts that let one GPU hold them."""

from dataclasses import dataclass

ITERATIONS = 30
COUNTED = 10
"""The last of the iterations, which alone are timed."""
RECORDED = 3
"""Iterations after them, in which CUDA's activities are recorded."""

COMMON = f"""
--transformer-impl transformer_engine --bf16 --max-position-embeddings 4096
--normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--moe-grouped-gemm --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--cross-entropy-loss-fusion --no-check-for-nan-in-loss-and-grad --mock-data
--tokenizer-type NullTokenizer --split 1,0,0 --num-workers 2
--no-create-attention-mask-in-dataloader --train-iters {ITERATIONS + RECORDED} --lr 1e-4
--min-lr 1e-5 --lr-decay-style constant --no-gradient-accumulation-fusion --log-interval 1
--log-throughput --eval-iters 0 --eval-interval 1000 --seed 1234 --manual-gc
"""
"""The flags of all runs. Gradients are not accumulated by Megatron's fusion, which wants apex."""

QWEN3 = """
--num-layers 4 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --swiglu
--disable-bias-linear --rotary-base 1000000 --num-experts 128 --moe-ffn-hidden-size 768
--moe-router-topk 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
--moe-router-dtype fp32 --vocab-size 32000 --seq-length 4096 --micro-batch-size 2
"""

QWEN3_NEXT = """
--num-layers 2 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16
--group-query-attention --num-query-groups 2 --kv-channels 256 --qk-layernorm --swiglu
--disable-bias-linear --rotary-base 10000000 --rotary-percent 0.25 --num-experts 512
--moe-ffn-hidden-size 512 --moe-router-topk 10 --moe-shared-expert-intermediate-size 512
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32
--vocab-size 32000 --seq-length 4096 --micro-batch-size 2
"""

GPT_OSS = """
--num-layers 4 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64
--group-query-attention --num-query-groups 8 --kv-channels 64 --quick-geglu
--glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable
--window-size 127,0 --window-attn-skip-freq 2 --rotary-base 150000 --num-experts 32
--moe-ffn-hidden-size 2880 --moe-router-topk 4 --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 1e-3 --no-bias-dropout-fusion --vocab-size 32000 --seq-length 4096
--micro-batch-size 2
"""
"""There is no ``--moe-router-dtype fp32``: a product in float32 of Transformer Engine 2.20 reads
the router's bias, which is bfloat16, as if it were float32, and past its end."""

MOONLIGHT = """
--num-layers 5 --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16
--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
--v-head-dim 128 --kv-channels 192 --swiglu --disable-bias-linear --num-experts 64
--moe-layer-freq [0]+[1]*4 --moe-ffn-hidden-size 1408 --moe-router-topk 6
--moe-shared-expert-intermediate-size 2816 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.446
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32
--vocab-size 32000 --seq-length 4096 --micro-batch-size 2
"""

MIXTRAL = """
--num-layers 2 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu --disable-bias-linear
--rotary-base 1000000 --num-experts 8 --moe-ffn-hidden-size 14336 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-router-dtype fp32
--vocab-size 32000 --seq-length 4096 --micro-batch-size 2
"""

DEEPSEEK_V3 = """
--num-layers 2 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 192 --qk-layernorm --swiglu
--disable-bias-linear --num-experts 32 --moe-ffn-hidden-size 2048 --moe-router-topk 8
--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-shared-expert-intermediate-size 2048
--moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-4 --moe-router-dtype fp32 --vocab-size 16000 --seq-length 4096
--micro-batch-size 1
"""

MICRO_BATCHES = 4


@dataclass(frozen=True)
class Model:
    """One published model, cut.

    Attributes:
        name: Names its card.
        title: As its page is called.
        flags: Flags of ``pretrain_gpt.py`` for its layers and its batch.
        cuts: Says what differs from the published model.
        arms: How many ways are trained: "six", or "four" without flashmoe's graphs of pieces and
            with alltoall as before; "fp8" adds both in blockwise FP8 to these. "six" has spare
            slots, too, where experts are spread over GPUs.
    """

    name: str
    title: str
    flags: str
    cuts: str
    arms: str

    def number(self, flag: str) -> int:
        """Returns the number after a flag."""
        words = self.flags.split()
        return int(words[words.index(f"--{flag}") + 1])

    @property
    def tokens(self) -> int:
        """Tokens of one GPU and iteration."""
        return MICRO_BATCHES * self.number("micro-batch-size") * self.number("seq-length")

    def arguments(self, gpus: int) -> list[str]:
        """Returns the script's arguments on so many GPUs, with the experts spread over all."""
        batch = MICRO_BATCHES * self.number("micro-batch-size") * gpus
        spread = ["--global-batch-size", str(batch), "--expert-model-parallel-size", str(gpus)]
        return [*COMMON.split(), *self.flags.split(), *spread]


MODELS = (
    Model(
        "qwen3-30b-a3b",
        "Qwen3-30B-A3B",
        QWEN3,
        "4 of 48 layers, a vocabulary of 32,000 in place of 151,936",
        "six",
    ),
    Model(
        "qwen3-next-80b-a3b",
        "Qwen3-Next-80B-A3B",
        QWEN3_NEXT,
        "2 of 48 layers, a vocabulary of 32,000 in place of 151,936; full attention in place of "
        "linear in three of four layers, and no gates of attention and of the shared expert",
        "four",
    ),
    Model(
        "gpt-oss-20b",
        "GPT-OSS-20B",
        GPT_OSS,
        "4 of 24 layers, a vocabulary of 32,000 in place of 201,088, plain RoPE",
        "four",
    ),
    Model(
        "moonlight-16b-a3b",
        "Moonlight-16B-A3B",
        MOONLIGHT,
        "5 of 27 layers, the first of them dense as published, a vocabulary of 32,000 in place of "
        "163,840",
        "four",
    ),
    Model("mixtral-8x7b", "Mixtral 8x7B", MIXTRAL, "2 of 32 layers", "fp8"),
    Model(
        "deepseek-v3",
        "DeepSeek-V3",
        DEEPSEEK_V3,
        "2 of 61 layers, both with experts, 32 of 256 experts (as many as a GPU has where 8 share "
        "them) in 8 groups of 4, a vocabulary of 16,000 in place of 129,280, no multi-token "
        "prediction",
        "fp8",
    ),
)
"""All models, the most important first."""
