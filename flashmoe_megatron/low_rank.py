"""Gradients of low-rank factors from the rows of a backward, expert by expert.

The gradient of an expert's matrix is a product over the expert's rows: of gradients of its outputs
and of its inputs. Where the matrix has an addition ``scale * up @ down``, each factor's gradient is
that product times the other factor. Here rows are multiplied by the other factor first, which makes
them ``rank`` wide, so that nothing of the matrix's size is made.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from flashmoe_megatron.weights import MATRIX, unstacked

_ALIGNED = 16
"""Bytes that the rows of grouped products are multiples of."""
_RANK_STEP = 8
"""Factors are widened to ranks of whole steps, for grouped products."""
_MOST_EXPERTS = 500
"""Experts of one grouped product, which takes fewer than 1,024 groups, two for each expert."""


class ExpertRows(NamedTuple):
    """Says which rows are each expert's, on the rows' device, so that no host has to wait.

    Attributes:
        begins: ``[num_experts + 1]`` int32, the first row of each expert, and the end of all.
        counts: ``[num_experts]`` int32, its number of rows. What lies between its last row and the
            next expert's first is never used.
    """

    begins: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def until(cls, ends: torch.Tensor) -> "ExpertRows":
        """Has each expert's rows end where the next one's begin, given ``[num_experts]`` ends."""
        begins = F.pad(ends, (1, 0))
        return cls(begins, begins.diff())

    def product(self, rows: torch.Tensor, of_experts: torch.Tensor) -> torch.Tensor:
        """Multiplies each row by its expert's matrix, or by the only one.

        Args:
            rows: ``[num_rows, width]``.
            of_experts: ``[num_experts, width, out]`` or ``[1, width, out]``.

        Returns:
            ``[num_rows, out]``, unspecified where no expert's rows are.
        """
        ends = self.begins[1:] if len(of_experts) > 1 else self.begins[-1:]
        if _is_grouped(rows, of_experts):
            grouped: torch.Tensor = torch._grouped_mm(rows, of_experts, offs=ends)
            return grouped
        out = rows.new_zeros(len(rows), of_experts.shape[2])
        begin = 0
        for matrix, end in zip(of_experts, ends.tolist(), strict=True):
            torch.mm(rows[begin:end], matrix, out=out[begin:end])
            begin = end
        return out

    def sums(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Returns ``left.T @ right`` of each expert's rows, zero for an expert without any.

        They are ``[num_experts, width of left, width of right]``, in the rows' dtype.
        """
        if _is_grouped(left, right):
            # A product over no rows is left as it was.
            is_empty = (self.counts == 0)[:, None, None]
            return torch.cat(list(self._grouped_sums(left, right))).masked_fill_(is_empty, 0)
        pairs = zip(self.begins.tolist(), self.counts.tolist(), strict=False)
        parts = [slice(begin, begin + count) for begin, count in pairs]
        return torch.stack([left[part].t() @ right[part] for part in parts])

    def _grouped_sums(self, left: torch.Tensor, right: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields :meth:`sums` of some experts after others."""
        for first in range(0, len(self.counts), _MOST_EXPERTS):
            counts = self.counts[first : first + _MOST_EXPERTS]
            begins = self.begins[first : first + len(counts) + 1]
            # Groups are all rows before, and then in turn an expert's rows and what follows them.
            pairs = torch.stack((begins[:-1] + counts, begins[1:]), dim=1).flatten()
            ends = torch.cat((begins[:1], pairs))
            yield torch._grouped_mm(left.t(), right, offs=ends)[1::2]


def _is_grouped(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether grouped products take these; without rows they do not."""
    widths = (one.shape[-1] * one.itemsize, other.shape[-1] * other.itemsize)
    return (
        one.dtype != torch.float64
        and one.shape[0] > 0
        and not any(width % _ALIGNED for width in widths)
    )


class FactorGrads:
    """Gradients of the factors of one projection's addition, ``scale * up @ down``."""

    def __init__(
        self,
        down: tuple[torch.Tensor, ...],
        up: tuple[torch.Tensor, ...],
        scale: float,
        wanted: Sequence[bool],
    ) -> None:
        """Takes factors as :class:`~flashmoe_megatron.adapted.AdaptedWeights` has them.

        ``wanted`` says for each tensor of ``down`` and then of ``up`` whether its gradient is
        wanted.
        """
        self._down, self._up, self._scale = down, up, scale
        self._wanted = list(wanted)
        self._grads: list[torch.Tensor | None] = [None] * len(self._wanted)

    @property
    def num_bytes(self) -> int:
        """Bytes of all wanted gradients."""
        pairs = zip((*self._down, *self._up), self._wanted, strict=True)
        return sum(factor.nbytes for factor, is_wanted in pairs if is_wanted)

    def take(self, of_outputs: torch.Tensor, inputs: torch.Tensor, places: ExpertRows) -> None:
        """Adds the gradients of some rows to those of earlier calls.

        Args:
            of_outputs: ``[num_rows, outputs]``, gradients of the projection's outputs.
            inputs: ``[num_rows, inputs]``, what the projection was given, times what its outputs
                were multiplied by since.
            places: Says which rows are each expert's.
        """
        downs, ups = (torch.stack(unstacked(each, MATRIX)) for each in (self._down, self._up))
        rank = downs.shape[1]
        pad = -rank % _RANK_STEP
        downs, ups = F.pad(downs, (0, 0, 0, pad)), F.pad(ups, (0, pad))
        num_down = len(self._down)
        if any(self._wanted[:num_down]):
            sums = places.sums(places.product(of_outputs, ups), inputs)[:, :rank]
            self._add(self._down, sums, 0)
        if any(self._wanted[num_down:]):
            sums = places.sums(of_outputs, places.product(inputs, downs.mT))[:, :, :rank]
            self._add(self._up, sums, num_down)

    def _add(self, factors: tuple[torch.Tensor, ...], sums: torch.Tensor, first: int) -> None:
        sums = sums * self._scale
        parts: Sequence[torch.Tensor] = (sums,)
        if len(factors) > 1:
            parts = sums.unbind()
        elif factors[0].dim() == MATRIX:  # one for all experts, or one of one
            parts = (sums.sum(0, dtype=torch.promote_types(sums.dtype, torch.float32)),)
        for at, (part, factor) in enumerate(zip(parts, factors, strict=True), first):
            if self._wanted[at]:
                grad, part = self._grads[at], part.to(factor.dtype)
                self._grads[at] = part if grad is None else grad + part

    def spoil(self, where: torch.Tensor | None = None) -> None:
        """Makes all gradients NaN, or does so on the device where a tensor of one bool is true."""
        for at, grad in enumerate(self.grads()):
            if grad is not None:
                mask = torch.ones((), dtype=torch.bool, device=grad.device)
                self._grads[at] = grad.masked_fill(mask if where is None else where, torch.nan)

    def grads(self) -> list[torch.Tensor | None]:
        """Returns the wanted gradients, of ``down`` and then of ``up``; NaN if no rows came."""
        pairs = zip((*self._down, *self._up), self._grads, self._wanted, strict=True)
        return [
            torch.full_like(factor, torch.nan) if is_wanted and grad is None else grad
            for factor, grad, is_wanted in pairs
        ]


class Factors(NamedTuple):
    """Computes gradients of low-rank factors in a backward, for each projection that has some."""

    fc1: FactorGrads | None = None
    fc2: FactorGrads | None = None

    @property
    def wanted(self) -> list[FactorGrads]:
        """Those that there are."""
        return [one for one in self if one is not None]


NO_FACTORS = Factors()
