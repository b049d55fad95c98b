"""The experts' part of a call: rows, part after part, and what is kept of all of them.

Rows have arrived by then, in the order of experts; hooks and ways are the backend's.
"""

from typing import NamedTuple

import torch

from flashmoe_megatron.call import Grads, Targets
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.low_rank import ExpertRows, Factors
from flashmoe_megatron.separate.own_experts import OwnExperts
from flashmoe_megatron.separate.plan import Part, picked
from flashmoe_megatron.separate.precision import Precision
from flashmoe_megatron.separate.steps import Steps, accumulation_dtype, stack_of, turned
from flashmoe_megatron.weights import MATRIX, VECTOR, ExpertWeights, WeightGrad, unstacked

Pair = tuple[torch.Tensor, torch.Tensor, Targets]
"""Rows by expert whose ``left.T @ right`` are gradients of matrices, and where these go."""
Summands = tuple[torch.Tensor, Targets]
"""Rows by expert whose sums are gradients of biases, and where these go."""


class ForwardParts:
    """Computes the rows of one forward, part after part.

    Attributes:
        preact: ``[rows, fc1_rows]``, the first projection's outputs of all parts so far, which a
            backward reads; ``None`` before the first, and where an expert is the user's own.
        rows: ``[rows, ...]``, the rows of tokens so far, as they have travelled; likewise ``None``
            where they are not kept.
    """

    def __init__(
        self,
        config: MoEConfig,
        steps: Steps,
        precision: Precision,
        weights: ExpertWeights,
        row_probs: torch.Tensor,
        own: OwnExperts | None,
    ) -> None:
        """Reads the local experts' weights; ``row_probs`` are ``[rows]``, of all parts."""
        self._config, self._steps, self._precision = config, steps, precision
        self._row_probs, self._own = row_probs, own
        self._fc1, self._fc2 = steps.matrices(precision.weights(weights))
        self._biases1, self._biases2 = _biases(weights)
        self.preact: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None

    def probs_of(self, part: Part) -> torch.Tensor:
        """The routing weights of a part's rows."""
        return picked(self._row_probs, part.rows)

    def compute(
        self, numbers: torch.Tensor, weight: torch.Tensor, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes rows but for the second bias.

        Args:
            numbers: ``[rows, hidden]``, by expert.
            weight: ``[rows]``, their routing weights.
            part: Says how many rows each expert has.

        Returns:
            Their outputs, and the first projection's, ``None`` of a user's own expert.
        """
        if self._own is not None:
            return self._own.compute(numbers, part.counts, weight), None
        steps = self._steps
        preact = steps.product(numbers, self._fc1, part.ends, part.counts)
        if self._biases1 is not None:
            preact += self._biases1[experts_of(part)]
        activated = self._precision.between(steps.weighted_activation(self._config, preact, weight))
        return steps.product(activated, self._fc2, part.ends, part.counts), preact

    def add_second_bias(self, out_rows: torch.Tensor, weight: torch.Tensor, part: Part) -> None:
        """Adds the second projection's bias times the rows' routing weights, in place."""
        if self._own is None and self._biases2 is not None:
            wide = accumulation_dtype(out_rows.dtype)
            out_rows += weight.to(wide)[:, None] * self._biases2[experts_of(part)].to(wide)

    def keep(self, part: Part, preact: torch.Tensor | None, rows: torch.Tensor | None) -> None:
        """Keeps a part's pre-activations and its rows of tokens, where there are any."""
        total = len(self._row_probs)
        if preact is not None:
            self.preact = self._steps.add_part(self.preact, preact, part, total)
        if rows is not None:
            self.rows = self._steps.add_part(self.rows, rows, part, total)


class OfPart(NamedTuple):
    """The gradients of a part that its rows do not take along.

    Attributes:
        row_probs: ``[rows]`` in the dtype of sums, of the routing weights.
        preact: ``[rows, fc1_rows]``, of the first projection's outputs.
        weighted: ``[rows, intermediate]``, the second projection's input again. Both are ``None``
            of a user's own expert.
    """

    row_probs: torch.Tensor
    preact: torch.Tensor | None
    weighted: torch.Tensor | None


class BackwardParts:
    """Differentiates the rows of one forward, part after part.

    Attributes:
        steps: The steps for such tokens.
        grad_row_probs: ``[rows]``, the gradients of routing weights of all parts so far; ``None``
            before the first.
    """

    def __init__(
        self,
        config: MoEConfig,
        steps: Steps,
        precisions: tuple[Precision, Precision],
        weights: ExpertWeights,
        kept: tuple[torch.Tensor, torch.Tensor],
        wants: tuple[bool, bool],
    ) -> None:
        """Reads the local experts' weights.

        Args:
            config: The layer's shape.
            steps: The steps for such tokens.
            precisions: The operands of a forward, and gradients.
            weights: The local experts, with replicas where there are spare slots.
            kept: What the forward has kept of all parts: pre-activations and routing weights.
            wants: Whether either projection has gradients of weights to be computed.
        """
        self._config, self.steps, self._weights = config, steps, weights
        self._precision, self._of_gradients = precisions
        self._preact, self._row_probs = kept
        self._wants_fc1, self._wants_fc2 = wants
        self._fc1_t, self._fc2_t = map(turned, steps.matrices(self._precision.weights(weights)))
        _, self._biases2 = _biases(weights)
        self.grad_row_probs: torch.Tensor | None = None
        self._grad_pre: torch.Tensor | None = None
        self._grad_y: torch.Tensor | None = None
        self._weighted: torch.Tensor | None = None

    def compute(self, grad_y: torch.Tensor, part: Part) -> tuple[torch.Tensor, OfPart]:
        """Differentiates a part's rows.

        ``grad_y`` is ``[rows, hidden]``, of their outputs. Returns the gradients of the rows, and
        what :meth:`keep` takes.
        """
        steps, row_probs = self.steps, picked(self._row_probs, part.rows)
        grad_weighted = steps.grad_product(grad_y, self._fc2_t, part.ends, part.counts)
        of_preact, of_probs, weighted = steps.weighted_activation_backward(
            self._config, picked(self._preact, part.rows), row_probs, grad_weighted
        )
        if self._biases2 is not None:
            wide = accumulation_dtype(grad_y.dtype)
            of_probs = of_probs + (grad_y.to(wide) * self._biases2[experts_of(part)].to(wide)).sum(
                1
            )
        multiplied = self._of_gradients.between(of_preact)
        grad_rows = steps.product(multiplied, self._fc1_t, part.ends, part.counts)
        return grad_rows, OfPart(of_probs, of_preact, weighted)

    def compute_own(
        self, own: OwnExperts, grad_y: torch.Tensor, rows: torch.Tensor, part: Part
    ) -> tuple[torch.Tensor, OfPart]:
        """Does what :meth:`compute` does with a user's own expert, of the rows of all parts."""
        of_part = picked(rows, part.rows), picked(self._row_probs, part.rows)
        grad_rows, of_probs = own.backward(*of_part, grad_y, part.counts)
        return grad_rows, OfPart(of_probs, None, None)

    def keep(self, part: Part, grad_y: torch.Tensor, found: OfPart) -> None:
        """Keeps what gradients of weights and of probabilities are made of."""
        steps, total = self.steps, len(self._row_probs)
        self.grad_row_probs = steps.add_part(self.grad_row_probs, found.row_probs, part, total)
        if self._wants_fc1 and found.preact is not None:
            self._grad_pre = steps.add_part(self._grad_pre, found.preact, part, total)
        if self._wants_fc2 and found.weighted is not None:
            self._grad_y = steps.add_part(self._grad_y, grad_y, part, total)
            weighted = self._precision.between(found.weighted)
            self._weighted = steps.add_part(self._weighted, weighted, part, total)

    def give(self, factors: Factors, rows: torch.Tensor | None, whole: Part) -> None:
        """Has factors take each projection's gradients of outputs and its inputs."""
        places = ExpertRows.until(whole.ends)
        found = (self._grad_pre, rows), (self._grad_y, self._weighted)
        for of_factors, (of_outputs, inputs) in zip(factors, found, strict=True):
            if of_factors is not None:
                assert of_outputs is not None
                assert inputs is not None
                of_factors.take(of_outputs, inputs, places)

    def products(
        self, rows: torch.Tensor | None, written: Grads, *, is_all: bool
    ) -> tuple[list[Pair], list[Summands]]:
        """Finds what is multiplied and summed up for the gradients of weights.

        Args:
            rows: ``[rows, hidden]``, the experts' inputs; ``None`` if none of ``fc1`` is wanted.
            written: Where the gradients go.
            is_all: Whether those are wanted, too, that have no target.
        """
        pairs: list[Pair] = []
        summands: list[Summands] = []
        if self._grad_pre is not None and (is_all or is_any(written.fc1)):
            assert rows is not None
            if self._weights.split:  # all gates and after them all ups
                gate, up = self._grad_pre.chunk(2, dim=1)
                gates, ups = _halves(written.fc1)
                pairs += [(gate, rows, gates), (up, rows, ups)]
            else:
                pairs.append((self._grad_pre, rows, written.fc1))
        grad_y, weighted = self._grad_y, self._weighted
        if grad_y is not None and weighted is not None and (is_all or is_any(written.fc2)):
            pairs.append((grad_y, weighted, written.fc2))
        if self._weights.transposed:
            pairs = [(right, left, targets) for left, right, targets in pairs]
        if self._grad_pre is not None and written.fc1_bias:
            summands.append((self._grad_pre, written.fc1_bias))
        if grad_y is not None and written.fc2_bias:
            wide = accumulation_dtype(grad_y.dtype)
            summands.append((grad_y.to(wide) * self._row_probs.to(wide)[:, None], written.fc2_bias))
        return pairs, summands


def experts_of(part: Part) -> torch.Tensor:
    """The local expert of each row."""
    counts = torch.tensor(part.counts, device=part.ends.device)
    experts = torch.arange(len(part.counts), device=part.ends.device)
    return experts.repeat_interleave(counts, output_size=sum(part.counts))


def is_any(targets: Targets) -> bool:
    """Tells whether any gradient of a kind is wanted."""
    return any(target is not None for target in targets)


def _halves(grads: Targets) -> tuple[Targets, Targets]:
    """Cuts the gradients of matrices, one for each expert, into those of gates and of ups."""
    every: list[WeightGrad | None] = []
    for grad in grads:
        if grad is None:
            every.append(None)
        else:
            parts = unstacked([grad.buffer], MATRIX)
            every += (WeightGrad(buffer, grad.accumulate) for buffer in parts)
    return every[: len(every) // 2], every[len(every) // 2 :]


def _biases(weights: ExpertWeights) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    first, second = weights.fc1_bias, weights.fc2_bias
    return (
        stack_of(first, VECTOR) if first else None,
        stack_of(second, VECTOR) if second else None,
    )
