"""The oracle against arithmetic done by hand, and the comparison against planted errors."""

import math

import pytest
import torch

from flashmoe_megatron.config import Activation
from flashmoe_megatron.oracle import (
    ROW_FACTOR,
    MismatchError,
    assert_close,
    moe_reference,
    poison_,
)

SCALARS = {
    Activation.SILU: lambda z: z / (1 + math.exp(-z)),
    Activation.GELU: lambda z: z * 0.5 * (1 + math.erf(z / math.sqrt(2))),
    Activation.GELU_TANH: lambda z: 0.5
    * z
    * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    Activation.RELU: lambda z: max(z, 0.0),
    Activation.SQUARED_RELU: lambda z: max(z, 0.0) ** 2,
    Activation.QUICK_GELU: lambda z: z / (1 + math.exp(-1.702 * z)),
}


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", Activation)
def test_one_token_by_hand(activation: Activation, gated: bool):
    """One element of each size: the formula of the layer, written out."""
    function = SCALARS[activation]
    x, gate, up, down, prob = 1.7, 0.6, -1.3, 0.9, 0.25
    fc1 = torch.tensor([[gate], [up]] if gated else [[gate]], dtype=torch.float64)
    unused = torch.full_like(fc1, float("nan"))
    out = moe_reference(
        torch.tensor([[x]], dtype=torch.float64),
        torch.tensor([[prob, 0.9]], dtype=torch.float64),
        torch.tensor([[True, False]]),
        [fc1, unused],
        [torch.tensor([[down]], dtype=torch.float64)] * 2,
        activation=activation,
        gated=gated,
    )
    activated = function(gate * x) * (up * x if gated else 1)
    assert out.item() == pytest.approx(down * activated * prob, rel=1e-12)


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.QUICK_GELU])
@pytest.mark.parametrize(("gate", "up"), [(0.4, -0.3), (9.0, 0.2), (-9.0, 8.0), (0.5, -8.0)])
def test_one_clamped_token_by_hand(activation: Activation, gate: float, up: float):
    """The gate is clamped from above alone, and the offset comes after the other's clamp."""
    one = torch.ones(1, 1, dtype=torch.float64)
    out = moe_reference(
        one,
        one,
        one.bool(),
        [torch.tensor([[gate], [up]], dtype=torch.float64)],
        [one],
        activation=activation,
        gated=True,
        clamp_value=7.0,
        linear_offset=1.0,
    )
    activated = SCALARS[activation](min(gate, 7.0)) * (max(min(up, 7.0), -7.0) + 1.0)
    assert out.item() == pytest.approx(activated, rel=1e-12)


@pytest.mark.parametrize("interleave", [1, 2])
def test_interleaved_rows_are_the_same_rows_in_another_order(interleave: int):
    g = torch.Generator().manual_seed(2)
    x, fc1, fc2 = (torch.randn(shape, generator=g) for shape in ((3, 5), (8, 5), (5, 4)))
    order = {1: [0, 4, 1, 5, 2, 6, 3, 7], 2: [0, 1, 4, 5, 2, 3, 6, 7]}[interleave]
    ones = torch.ones(3, 1)
    form = {"activation": Activation.SILU, "gated": True}
    want = moe_reference(x, ones, ones.bool(), [fc1], [fc2], **form)
    got = moe_reference(
        x, ones, ones.bool(), [fc1[order]], [fc2], **form, glu_interleave=interleave
    )
    assert torch.equal(got, want)


def test_experts_add_up_and_unselected_tokens_get_zero():
    x = torch.tensor([[2.0], [3.0], [5.0]])
    probs = torch.tensor([[0.5, 0.25], [0.5, 0.5], [1.0, 1.0]])
    routing_map = torch.tensor([[True, True], [False, True], [False, False]])
    fc1 = [torch.tensor([[1.0]]), torch.tensor([[10.0]])]
    fc2 = [torch.tensor([[1.0]]), torch.tensor([[1.0]])]
    out = moe_reference(x, probs, routing_map, fc1, fc2, activation=Activation.RELU, gated=False)
    assert out.flatten().tolist() == [2 * 0.5 + 20 * 0.25, 30 * 0.5, 0.0]


def want() -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def test_equal_passes_and_reports_zero():
    found = assert_close("out", want(), want(), rel_l2=0)
    assert (found.rel_l2, found.worst_row) == (0, 0)


def test_relative_l2_is_what_it_says():
    found = assert_close("out", want() * 1.01, want(), rel_l2=0.011)
    assert found.rel_l2 == pytest.approx(0.01, rel=1e-4)
    with pytest.raises(MismatchError, match="relative L2 error 0.01, wanted at most 0.009"):
        assert_close("out", want() * 1.01, want(), rel_l2=0.009)


def test_one_wrong_row_is_found_although_the_whole_is_close():
    got = want().repeat(100, 1)
    expected = got.clone()
    got[70] = 0
    tolerance = 0.02
    assert (got - expected).norm() / expected.norm() < tolerance < 1 / ROW_FACTOR
    with pytest.raises(MismatchError, match=r"1 of 6400 rows are wrong; .* element \(70, 0\)"):
        assert_close("out", got, expected, rel_l2=tolerance)


def test_first_wrong_coordinate_is_named():
    got = want()
    got[3, 9] += 100
    got[5, 1] += 100
    with pytest.raises(MismatchError, match=r"out: .*first wrong element \(3, 9\)"):
        assert_close("out", got, want(), rel_l2=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_poison_is_found(dtype: torch.dtype):
    got = want().to(dtype)
    poison_(got[7, 4:6])
    with pytest.raises(MismatchError, match=r"2 of 2048 elements .*\(7, 4\): never written"):
        assert_close("out", got, want(), rel_l2=1.0)


def test_poison_of_integers_and_bools():
    assert (poison_(torch.zeros(3, dtype=torch.int32)) == 2**31 - 1).all()
    with pytest.raises(TypeError, match="no value to spare"):
        poison_(torch.zeros(3, dtype=torch.bool))


def test_anything_where_zero_is_wanted_is_wrong():
    with pytest.raises(MismatchError):
        assert_close("out", torch.full((2, 2), 1e-6), torch.zeros(2, 2), rel_l2=0.5)
    assert_close("out", torch.zeros(2, 2), torch.zeros(2, 2), rel_l2=0)


def test_shapes_must_agree_and_the_oracle_must_be_finite():
    with pytest.raises(MismatchError, match=r"shape \(2, 3\), wanted \(3, 2\)"):
        assert_close("out", torch.zeros(2, 3), torch.zeros(3, 2), rel_l2=1)
    with pytest.raises(ValueError, match="not finite"):
        assert_close("out", torch.zeros(1), torch.tensor([float("inf")]), rel_l2=1)


def test_scalars_and_empty_tensors():
    assert_close("loss", torch.tensor(1.0), torch.tensor(1.0), rel_l2=0)
    with pytest.raises(MismatchError, match=r"element \(\): 1, wanted 2"):
        assert_close("loss", torch.tensor(1.0), torch.tensor(2.0), rel_l2=0.1)
    assert_close("nothing", torch.zeros(0, 4), torch.zeros(0, 4), rel_l2=0)
