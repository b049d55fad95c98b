"""Gradients of several kinds are computed as one and end up where they belong."""

import pytest
import torch

from flashmoe_megatron.kernel.gradients import UniformGrads
from flashmoe_megatron.weights import WeightGrad

KINDS = [
    (torch.bfloat16, False),
    (torch.bfloat16, True),
    (torch.float32, False),
    (torch.float32, True),
]


def make(
    kind: tuple[torch.dtype, bool], value: float = 1.0, *, is_aligned: bool = True
) -> WeightGrad:
    memory = torch.full((4,), value, dtype=kind[0])
    return WeightGrad(memory[:3] if is_aligned else memory[1:], kind[1])


def compute(grads: list[WeightGrad], value: float) -> None:
    """As the kernel does: one dtype, all added or all written, 16 bytes at a time."""
    assert len({(grad.buffer.dtype, grad.accumulate) for grad in grads}) == 1
    assert all(grad.buffer.data_ptr() % 16 == 0 for grad in grads)
    for grad in grads:
        if grad.accumulate:
            grad.buffer.add_(value)
        else:
            grad.buffer.fill_(value)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_of_one_kind_are_the_callers(kind: tuple[torch.dtype, bool]) -> None:
    grads = [make(kind), make(kind)]
    uniform = UniformGrads(grads)
    assert all(got is want for got, want in zip(uniform.grads, grads, strict=True))
    compute(uniform.grads, 3.0)
    uniform.settle()
    assert [grad.buffer.tolist() for grad in grads] == [[4.0 if kind[1] else 3.0] * 3] * 2


@pytest.mark.parametrize("first", KINDS, ids=str)
@pytest.mark.parametrize("second", KINDS, ids=str)
def test_each_gradient_is_added_or_written_as_it_asks(
    first: tuple[torch.dtype, bool], second: tuple[torch.dtype, bool]
) -> None:
    grads = [make(first), make(second), make(second, float("nan"))]
    uniform = UniformGrads(grads)
    compute(uniform.grads, 3.0)
    uniform.settle()
    want = [4.0 if kind[1] else 3.0 for kind in (first, second)]
    assert [grad.buffer[0].item() for grad in grads[:2]] == want
    # What is written hides what was there; what is added does not.
    assert grads[2].buffer.isnan().all() if second[1] else (grads[2].buffer == 3.0).all()


def test_the_widest_kind_is_computed_in_place() -> None:
    main_grad = make((torch.float32, True))
    uniform = UniformGrads([make((torch.bfloat16, False)), main_grad, make((torch.float32, False))])
    assert uniform.grads[1] is main_grad
    assert {grad.buffer.dtype for grad in uniform.grads} == {torch.float32}


@pytest.mark.parametrize("first", KINDS, ids=str)
@pytest.mark.parametrize("second", [*KINDS, None], ids=str)
def test_misaligned_gradients_are_added_or_written_as_they_ask(
    first: tuple[torch.dtype, bool], second: tuple[torch.dtype, bool] | None
) -> None:
    """Alone, as mostly all of a layer, or beside one that is aligned."""
    aligned = [] if second is None else [second]
    grads = [make(first, is_aligned=False), make(first, is_aligned=False), *map(make, aligned)]
    uniform = UniformGrads(grads)
    compute(uniform.grads, 3.0)
    uniform.settle()
    want = [[4.0 if kind[1] else 3.0] * 3 for kind in (first, first, *aligned)]
    assert [grad.buffer.tolist() for grad in grads] == want


def test_what_is_aligned_is_computed_in_place() -> None:
    misaligned = make((torch.float32, True), is_aligned=False)
    aligned = make((torch.float32, True))
    uniform = UniformGrads([misaligned, aligned])
    assert uniform.grads[0] is not misaligned
    assert uniform.grads[1] is aligned
