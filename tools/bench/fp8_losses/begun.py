"""Runs Megatron's stock script with flashmoe installed, and tells with what a training begins.

    torchrun --nproc-per-node 1 -m tools.bench.fp8_losses.begun seen.json pretrain_gpt.py ...

Writes the chosen attention, and the sums of the weights ahead of the first iteration. A run whose
attention is unfused ends after its first iteration.
"""

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from flashmoe_megatron import run
from tools.bench.cards.watched import Watch, take_turns

MODEL_AT = 2
"""Megatron passes the model to ``train_step`` as its third argument, a list of chunks."""


class FirstWeights(Watch):
    """Notes the weights that a training begins with.

    Args:
        out: The file.
    """

    def __init__(self, out: Path) -> None:
        super().__init__(out, iterations=0)

    def train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Sums the weights ahead of the first iteration."""
        watched = super().train_step(original)

        def train_step(*args: Any, **kwargs: Any) -> Any:
            if self.iteration == 0:
                parameters = (each for chunk in args[MODEL_AT] for each in chunk.parameters())
                self.seen["weights"] = sums_of(parameters)
            return watched(*args, **kwargs)

        return train_step


def sums_of(parameters: Iterable[torch.Tensor]) -> dict[str, float]:
    """Returns the number of all elements, their sum, and that of their squares, in float64.

    They are the same for one model whatever the order and the split of its tensors, but for
    rounding.
    """
    elements, sums, squares = 0, [], []
    for parameter in parameters:
        values = parameter.detach().double()
        elements += values.numel()
        sums.append(float(values.sum()))
        squares.append(float(values.square().sum()))
    return {"elements": elements, "sum": math.fsum(sums), "squares": math.fsum(squares)}


if __name__ == "__main__":
    FirstWeights(Path(sys.argv[1])).install()
    take_turns()
    run.main(sys.argv[2:])
