"""Products of rows expert by expert, and the gradients of factors that are made of them."""

import pytest
import torch

from flashmoe_megatron import low_rank
from flashmoe_megatron.low_rank import ExpertRows, FactorGrads
from flashmoe_megatron.oracle import assert_close

COUNTS = [3, 0, 5, 4]
BEGINS = [0, 8, 8, 16, 24]
INPUTS, OUTPUTS = 16, 24
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def drawn(dtype: torch.dtype, *shape: int, has_gaps: bool = True) -> torch.Tensor:
    """Draws rows, with NaN wherever no expert's are; or other values."""
    torch.manual_seed(sum(shape))
    rows = torch.randn(shape).to(dtype)
    if has_gaps:
        for begin, count, end in zip(BEGINS, COUNTS, BEGINS[1:], strict=False):
            rows[begin + count : end] = torch.nan
    return rows


def places() -> ExpertRows:
    begins, counts = (torch.tensor(each, dtype=torch.int32) for each in (BEGINS, COUNTS))
    return ExpertRows(begins, counts)


def parts(rows: torch.Tensor) -> list[torch.Tensor]:
    pairs = zip(BEGINS, COUNTS, strict=False)
    return [rows[begin : begin + count] for begin, count in pairs]


@pytest.mark.parametrize("width", [OUTPUTS, 5], ids=["aligned", "odd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most", [500, 2], ids=["at once", "two at a time"])
def test_sums_leave_out_what_lies_between_experts(
    most: int, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "_MOST_EXPERTS", most)
    left, right = drawn(dtype, BEGINS[-1], width), drawn(dtype, BEGINS[-1], INPUTS)
    want = torch.stack([a.T @ b for a, b in zip(parts(left), parts(right), strict=True)])
    got = places().sums(left, right)
    assert not got[1].any(), "an expert without rows"
    assert_close("sums", got.double(), want.double(), rel_l2=1e-6)


@pytest.mark.parametrize("is_shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_rows(dtype: torch.dtype, is_shared: bool) -> None:
    rows = drawn(dtype, BEGINS[-1], INPUTS)
    matrices = drawn(dtype, 1 if is_shared else 4, INPUTS, OUTPUTS, has_gaps=False)
    got = parts(places().product(rows, matrices))
    for one, part, matrix in zip(got, parts(rows), matrices.expand(4, -1, -1), strict=True):
        assert_close("product", one.double(), (part @ matrix).double(), rel_l2=1e-6)


def test_rows_that_follow_one_another() -> None:
    found = ExpertRows.until(torch.tensor([3, 3, 8], dtype=torch.int32))
    assert found.begins.tolist() == [0, 3, 3, 8]
    assert found.counts.tolist() == [3, 0, 5]


def test_no_rows_at_all() -> None:
    grads = FactorGrads((torch.ones(2, INPUTS),), (torch.ones(OUTPUTS, 2),), 1.0, [True, True])
    none = torch.zeros(4, dtype=torch.int32)
    grads.take(
        torch.empty(0, OUTPUTS),
        torch.empty(0, INPUTS),
        ExpertRows(torch.zeros_like(none), none[1:]),
    )
    down, up = grads.grads()
    assert down is not None
    assert up is not None
    assert not down.any()
    assert not up.any()


def factors(is_shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
    down, up = (
        drawn(torch.float32, 4, 3, INPUTS, has_gaps=False),
        drawn(torch.float32, 4, OUTPUTS, 3, has_gaps=False),
    )
    return (down[0], up[0]) if is_shared else (down, up)


@pytest.mark.parametrize("is_shared", [False, True], ids=["each", "shared"])
def test_gradients_of_factors(is_shared: bool) -> None:
    """Two calls add up; a rank of 3 is no multiple of what grouped products take."""
    down, up = factors(is_shared)
    of_outputs, inputs = (
        drawn(torch.float32, BEGINS[-1], OUTPUTS),
        drawn(torch.float32, BEGINS[-1], INPUTS),
    )
    grads = FactorGrads((down,), (up,), 0.5, [True, True])
    for _ in range(2):
        grads.take(of_outputs, inputs, places())
    pairs = zip(parts(of_outputs), parts(inputs), strict=True)
    full = torch.stack([one.T @ other for one, other in pairs])
    want = [up.mT @ full, full @ down.mT]
    for got, one in zip(grads.grads(), want, strict=True):
        assert got is not None
        assert_close("factor", got, one.sum(0) if is_shared else one, rel_l2=1e-6)
    assert grads.num_bytes == down.nbytes + up.nbytes


def test_only_what_is_wanted_is_made() -> None:
    downs, ups = (tuple(one) for one in factors(False))
    wanted = [True, False, False, True, False, False, False, False]
    grads = FactorGrads(downs, ups, 1.0, wanted)
    grads.take(
        drawn(torch.float32, BEGINS[-1], OUTPUTS),
        drawn(torch.float32, BEGINS[-1], INPUTS),
        places(),
    )
    assert [one is not None for one in grads.grads()] == wanted
    assert grads.num_bytes == 2 * downs[0].nbytes


def test_gradients_that_cannot_be_right_are_nan() -> None:
    down, up = factors(True)
    grads = FactorGrads((down,), (up,), 1.0, [True, False])
    assert [one is not None and bool(one.isnan().all()) for one in grads.grads()] == [True, False]
    grads.take(
        drawn(torch.float32, BEGINS[-1], OUTPUTS),
        drawn(torch.float32, BEGINS[-1], INPUTS),
        places(),
    )
    for where, is_void in ((torch.tensor(False), False), (torch.tensor(True), True)):
        grads.spoil(where)
        found = grads.grads()[0]
        assert found is not None
        assert bool(found.isnan().any()) is bool(found.isnan().all()) is is_void
    grads.spoil()
    assert grads.grads()[1] is None
