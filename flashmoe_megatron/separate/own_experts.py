"""An expert of a user's own in place of the layer's FFN, differentiated by autograd.

A backward computes the expert again, since parts of a forward are not those of its backward.
"""

from collections.abc import Sequence

import torch

from flashmoe_megatron.call import Grads
from flashmoe_megatron.errors import ShapeError
from flashmoe_megatron.hooks import Expert, OneExpert
from flashmoe_megatron.separate.steps import accumulation_dtype, split, store
from flashmoe_megatron.weights import MATRIX, VECTOR, ExpertWeights


class OwnExperts:
    """The local experts, computed by a user's class with the layer's weights.

    Attributes:
        grads: Sums of the gradients of weights so far, expert by expert.
    """

    def __init__(self, expert: Expert, weights: ExpertWeights) -> None:
        self._expert = expert
        self._split, self._transposed = weights.split, weights.transposed
        each = weights.per_expert()
        fc1, fc2 = each.fc1, each.fc2
        if each.split:  # all gates and after them all ups
            fc1 = tuple(map(torch.cat, zip(fc1[: len(fc2)], fc1[len(fc2) :], strict=True)))
        if each.transposed:
            fc1, fc2 = tuple(one.t() for one in fc1), tuple(one.t() for one in fc2)
        none = (None,) * len(fc2)
        kinds = (fc1, fc2, each.fc1_bias or none, each.fc2_bias or none)
        self._experts = [OneExpert(*of_one) for of_one in zip(*kinds, strict=True)]
        self.grads: list[list[torch.Tensor]] = []

    def compute(
        self, rows: torch.Tensor, counts: Sequence[int], row_probs: torch.Tensor
    ) -> torch.Tensor:
        """The outputs of rows by expert, times their weights.

        Raises:
            ShapeError: The class returned something else than ``[rows, hidden]``.
        """
        pieces = zip(split(rows, counts), self._experts, strict=True)
        out = torch.cat([self._output(part, of_one) for part, of_one in pieces])
        wide = accumulation_dtype(rows.dtype)
        return (out.to(wide) * row_probs.to(wide)[:, None]).to(rows.dtype)

    def backward(
        self,
        rows: torch.Tensor,
        row_probs: torch.Tensor,
        grad_y: torch.Tensor,
        counts: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes outputs again, and adds to the gradients of weights.

        Args:
            rows: ``[rows, hidden]``, by expert.
            row_probs: ``[rows]``, the outputs' weights.
            grad_y: ``[rows, hidden]``, the gradient of weighted outputs.
            counts: Rows of each expert.

        Returns:
            The gradients of ``rows`` and of ``row_probs``, the latter in the dtype of sums.
        """
        wide = accumulation_dtype(rows.dtype)
        grad_rows, grad_probs = torch.empty_like(rows), row_probs.new_empty(len(rows), dtype=wide)
        pieces = (split(one, counts) for one in (rows, row_probs, grad_y, grad_rows, grad_probs))
        made = []
        for part, probs, grad, of_rows, of_probs, expert in zip(
            *pieces, self._experts, strict=True
        ):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                mine = OneExpert._make(
                    None if one is None else one.detach().requires_grad_() for one in expert
                )
                leaves = [one for one in mine if one is not None]
                out = self._output(leaf, mine)
            weighted = (grad.to(wide) * probs.to(wide)[:, None]).to(out.dtype)
            found: tuple[torch.Tensor | None, ...] = (None,) * (1 + len(leaves))
            if out.requires_grad:
                found = torch.autograd.grad(out, [leaf, *leaves], weighted, allow_unused=True)
            if found[0] is None:
                of_rows.zero_()
            else:
                of_rows.copy_(found[0])
            torch.sum(grad.to(wide) * out.detach().to(wide), 1, out=of_probs)
            made.append(
                [
                    torch.zeros_like(leaf, dtype=wide) if one is None else one.to(wide)
                    for leaf, one in zip(leaves, found[1:], strict=True)
                ]
            )
        if self.grads:
            for sums, more in zip(self.grads, made, strict=True):
                for total, one in zip(sums, more, strict=True):
                    total += one
        else:
            self.grads = made
        return grad_rows, grad_probs

    def store(self, targets: Grads) -> None:
        """Adds or writes the gradients to where they go, in the weights' own form."""
        for_fc1, for_fc2, *biases = (torch.stack(kind) for kind in zip(*self.grads, strict=True))
        if self._split:
            for_fc1 = torch.cat(for_fc1.chunk(2, dim=1))
        if self._transposed:
            for_fc1, for_fc2 = for_fc1.mT, for_fc2.mT
        store(targets.fc1, for_fc1, MATRIX)
        store(targets.fc2, for_fc2, MATRIX)
        for of_kind in (targets.fc1_bias, targets.fc2_bias):
            if of_kind:
                store(of_kind, biases.pop(0), VECTOR)

    def _output(self, rows: torch.Tensor, weights: OneExpert) -> torch.Tensor:
        out = self._expert(rows, weights)
        if out.shape != rows.shape or out.dtype != rows.dtype:
            raise ShapeError(
                f"an own expert returned {tuple(out.shape)} of {out.dtype}: wanted "
                f"{tuple(rows.shape)} of {rows.dtype}, as its rows"
            )
        return out
