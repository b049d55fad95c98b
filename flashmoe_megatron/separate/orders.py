"""Orders of rows: how tokens become rows by expert, and rows tokens again.

FSMoE's framework calls them order and I-order. Both that it has are here; they give the same rows,
and the same sums but for rounding where a token has more than two experts.
"""

import torch

from flashmoe_megatron.hooks import Order
from flashmoe_megatron.separate.steps import PLAIN, accumulation_dtype


class TutelOrder(Order):
    """Rows by index, as Tutel's sparse encoding has them; what the backend does by itself."""

    takes_bytes = True

    def order(self, tokens: torch.Tensor, token_idx: torch.Tensor, out: torch.Tensor) -> None:
        """Copies each route's token."""
        torch.index_select(tokens, 0, token_idx, out=out)

    def restore(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Collects each token's rows, and sums them by ascending expert."""
        return PLAIN.sum_routes(rows, place)


class GShardOrder(Order):
    """Rows as products with matrices of zeros and ones, as GShard's einsum has them.

    A token that is not finite spoils all rows of its part, since zero times it is NaN. The matrix
    has an element for each route and token: this order is there to compare with.
    """

    def order(self, tokens: torch.Tensor, token_idx: torch.Tensor, out: torch.Tensor) -> None:
        """Multiplies the tokens by the routes' choices of them."""
        torch.mm(_choices(token_idx, len(tokens), tokens.dtype), tokens, out=out)

    def restore(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Multiplies the rows by the tokens' choices of them, in the dtype of sums."""
        wide = accumulation_dtype(rows.dtype)
        chosen = rows.new_zeros(len(place), len(rows) + 1, dtype=wide)
        chosen.scatter_(1, place.clamp(max=len(rows)), 1.0)
        return (chosen[:, :-1] @ rows.to(wide)).to(rows.dtype)


def _choices(index: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """One row for each index, with a one at its place."""
    chosen = torch.zeros(len(index), width, dtype=dtype, device=index.device)
    return chosen.scatter_(1, index[:, None], 1.0)
