"""Operands of experts, as they are given or in blockwise FP8.

In FP8 tokens are quantized by the rank that sends them, and travel and are kept as bytes. Each call
quantizes the weights again, so that no quantized weight is ever older than its parameter, unless
their owner promises that they are what they were. Values are read back for the products, which are
in bfloat16 with sums in float32: these have the numbers of products in FP8, at the speed of
bfloat16's. The backward takes the same operands, as Transformer Engine's
``backward_override="dequantized"`` does. Gradients of outputs and of pre-activations can be
quantized as tokens are, for gradients of tokens; those of weights then take the former so, too,
which have travelled as bytes, and the latter as they are.
"""

from dataclasses import replace

import torch

from flashmoe_megatron.blockwise import (
    ROW,
    SQUARE,
    Blocks,
    dequantize,
    pack,
    quantize,
    rounded,
    unpack,
)
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.weights import ExpertWeights


class Precision:
    """Operands as they are given."""

    def pack(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns what travels and is kept of tokens ``[rows, hidden]``, one row for each."""
        return tokens

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of :meth:`pack`, as experts compute with them."""
        return rows

    def between(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows between an expert's two products as the second product has them."""
        return rows

    def weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Returns the experts' matrices as products have them."""
        return weights


AS_GIVEN = Precision()


class Blockwise(Precision):
    """Operands in FP8 with a scale for each block; all are bfloat16 before and after."""

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden

    def pack(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the base class; values and scales of a row lie side by side, as bytes."""
        return pack(quantize(tokens, ROW))

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return dequantize(unpack(rows, self._hidden), torch.bfloat16)

    def between(self, rows: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return rounded(rows, ROW, torch.bfloat16)

    def weights(self, weights: ExpertWeights) -> ExpertWeights:
        """See the base class; an expert's gate and up projections have no block in common."""
        making, kinds = weights.making("separate"), (weights.fc1, weights.fc2)
        if making is not None and making.is_current:
            blocks: list[list[Blocks]] = making.made
        else:
            blocks = [[quantize(one, SQUARE) for one in kind] for kind in kinds]
            if making is not None:
                making.keep(blocks)
                making.note()
        fc1, fc2 = (
            tuple(dequantize(each, one.dtype) for each, one in zip(quantized, kind, strict=True))
            for quantized, kind in zip(blocks, kinds, strict=True)
        )
        return replace(weights, fc1=fc1, fc2=fc2, promise=None)


def precision_of(config: MoEConfig) -> Precision:
    """Returns what the layer's experts compute with."""
    return Blockwise(config.hidden) if config.in_fp8 else AS_GIVEN


def precision_of_gradients(config: MoEConfig) -> Precision:
    """Returns what gradients are that a backward multiplies with weights."""
    return Blockwise(config.hidden) if config.has_fp8_dgrad else AS_GIVEN
