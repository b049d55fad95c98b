"""Tensors as a caller may get them wrong: changes of a good one, and a strategy that draws some."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st

Change = Callable[[torch.Tensor], torch.Tensor]

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def _filled(value: float) -> Change:
    """The same with one element set, where the dtype has the value."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel() or not tensor.dtype.is_floating_point or tensor.is_meta:
            return tensor
        if tensor.dtype.itemsize < 2 or tensor.layout != torch.strided:
            return tensor
        changed = tensor.detach().contiguous().clone()
        changed.view(-1)[changed.numel() // 2] = value
        return changed

    return change


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """One element past where it was."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return tensor
    base = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return base[1:].view(tensor.shape).copy_(tensor)


def _strided_only(change: Change) -> Change:
    def guarded(tensor: torch.Tensor) -> torch.Tensor:
        return change(tensor) if tensor.layout == torch.strided else tensor

    return guarded


CHANGES: dict[str, Change] = {
    "flat": _strided_only(lambda t: t.reshape(-1)),
    "another dimension": _strided_only(lambda t: t.unsqueeze(0)),
    "a dimension of none": _strided_only(lambda t: t.unsqueeze(-1)[..., :0]),
    "a number": _strided_only(lambda t: t.reshape(-1)[0] if t.numel() else t),
    "transposed": _strided_only(lambda t: t.mT if t.dim() >= 2 else t),
    "a row less": _strided_only(lambda t: t[1:] if t.dim() else t),
    "a column less": _strided_only(lambda t: t[..., 1:].contiguous() if t.dim() else t),
    "a view of fewer columns": _strided_only(lambda t: t[..., 1:] if t.dim() else t),
    "no rows": _strided_only(lambda t: t[:0] if t.dim() else t),
    "every other row": _strided_only(lambda t: t[::2] if t.dim() else t),
    "one row for all": _strided_only(
        lambda t: t[:1].expand(t.shape) if t.dim() and t.shape[0] else t
    ),
    "misaligned": _misaligned,
    "on meta": _strided_only(lambda t: t.to("meta")),
    "sparse": lambda t: t if t.is_meta or t.layout != torch.strided or not t.dim() else _sparse(t),
    "NaN": _filled(float("nan")),
    "infinite": _filled(float("inf")),
    "huge": _filled(3e38),
    "with a gradient": lambda t: t.detach().requires_grad_() if t.is_floating_point() else t,
    "negated lazily": _strided_only(
        lambda t: torch._neg_view(t)
        if t.is_floating_point() and t.dtype.itemsize > 1 and not t.is_meta
        else t
    ),
    **{str(dtype): _strided_only(lambda t, to=dtype: t.to(to)) for dtype in DTYPES},
}


def _sparse(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().to_sparse()
    except (RuntimeError, NotImplementedError):  # torch has no sparse tensors of this dtype
        return tensor


def changes(most: int = 2) -> st.SearchStrategy[list[str]]:
    """Names of up to that many changes; fewer are simpler."""
    return st.lists(st.sampled_from(list(CHANGES)), max_size=most)


def apply(tensor: torch.Tensor, names: list[str]) -> torch.Tensor:
    for name in names:
        tensor = CHANGES[name](tensor)
    return tensor
