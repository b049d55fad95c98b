"""Low-rank additions to experts' matrices: gradients of both factors, as by autograd over sums."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashmoe_megatron.adapted import AdaptedWeights
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import Keep
from flashmoe_megatron.errors import FlashMoEError, ShapeError
from tests.distributed import RankPool
from tests.unit import cases
from tests.unit.additions import FORMS, RANK, assert_alike, factors, results
from tests.unit.separate import NAMES, make


@pytest.mark.parametrize("adapts", ["fc1", "fc2", "fc1 fc2"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_one_rank(name: str, form: str, adapts: str) -> None:
    config = cases.make_config(num_ranks=1, gated=True, activation="silu")
    inputs = cases.make_inputs(config, cases.uniform, [37], dtype=torch.float32)
    backend = make(name, config)
    assert_alike(results(backend, inputs, form, adapts=adapts, is_stack=form == "stack"))


@pytest.mark.parametrize("keep", ["preactivations", "inputs"])
def test_what_a_forward_keeps(keep: Keep) -> None:
    config = cases.make_config(num_ranks=1)
    inputs = cases.make_inputs(config, cases.uniform, [37], dtype=torch.float32)
    assert_alike(results(make("reference", config, keep=keep), inputs, "each", adapts="fc1 fc2"))


def on_ranks(group: dist.ProcessGroup, form: str) -> list[dict[str, torch.Tensor]]:
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.to_one_rank, [37, 20], dtype=torch.float32)
    return results(make("reference", config, group), inputs, form, adapts="fc1 fc2")


@pytest.mark.parametrize("form", ["shared", "stack"])
def test_two_ranks(ranks: RankPool, form: str) -> None:
    """One of the ranks has no rows, and its factors get gradients of zero."""
    for found in ranks.run(on_ranks, form, num_ranks=2):
        assert_alike(found)


def test_frozen_matrices_and_factors() -> None:
    """A frozen factor gets none, and matrices alone get theirs where no factor is trained."""
    config = cases.make_config(num_ranks=1)
    inputs = cases.make_inputs(config, cases.uniform, [37], dtype=torch.float32)
    fc1, fc2 = (
        tuple(one.clone().requires_grad_(is_fc1) for one in kind)
        for kind, is_fc1 in ((inputs.fc1, True), (inputs.fc2, False))
    )
    torch.manual_seed(0)
    down, up = factors("stack", fc2, "fc2")
    down[0].requires_grad_(False)
    backend = make("reference", config)
    weights = AdaptedWeights(fc1, fc2, fc2_down=down, fc2_up=up)
    out = moe_apply(backend, inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights)
    out.backward(inputs.grad_out[0])
    assert down[0].grad is None
    assert up[0].grad is not None
    assert up[0].grad.any()
    assert all(one.grad is not None and one.grad.any() for one in fc1)
    assert all(one.grad is None for one in fc2)
    counters = backend.weight_grads
    assert (counters.computed, counters.left_out) == (len(fc1) + 1, len(fc2) + 1)
    assert counters.buffer_bytes == sum(one.nbytes for one in (*fc1, *up))


class LargeTensors(TorchDispatchMode):
    """Counts the tensors of at least so many bytes that operators make."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes, self.shapes = num_bytes, dict[int, tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = filter(is_tensor, tree_leaves((args, kwargs)))
        before = {one.untyped_storage().data_ptr() for one in given}
        for one in filter(is_tensor, tree_leaves(out)):
            where = one.untyped_storage().data_ptr()
            if where not in before and one.untyped_storage().nbytes() >= self.num_bytes:
                self.shapes.setdefault(where, tuple(one.shape))
        return out


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_makes_no_gradient_of_a_matrix(name: str) -> None:
    """All that it makes of the size of a stack of matrices are the sums."""
    config = cases.make_config(num_ranks=1, hidden=512, intermediate=512)
    inputs = cases.make_inputs(config, cases.uniform, [9], dtype=torch.float32)
    fc1, fc2 = torch.stack(inputs.fc1), torch.stack(inputs.fc2)
    torch.manual_seed(0)
    down, up = factors("shared", (*inputs.fc1,), "fc1")
    more = factors("stack", (*inputs.fc2,), "fc2")
    weights = AdaptedWeights(
        (fc1,), (fc2,), fc1_down=down, fc1_up=up, fc2_down=more[0], fc2_up=more[1]
    )
    backend = make(name, config)
    out = moe_apply(backend, inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights)
    with LargeTensors(fc2.nbytes) as large:
        out.backward(inputs.grad_out[0])
    assert sorted(large.shapes.values()) == sorted([tuple(fc1.shape), tuple(fc2.shape)])
    assert backend.weight_grads.buffer_bytes == sum(
        one.nbytes for one in (*down, *up, *more[0], *more[1])
    )


def test_spare_slots_are_refused(ranks: RankPool) -> None:
    """On every rank, before anything travels."""
    for words in ranks.run(with_spare_slots, num_ranks=2):
        assert "spare_slots=1, which compute other ranks' experts: wanted 0" in words


def with_spare_slots(group: dist.ProcessGroup) -> str:
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.uniform, [9, 5], dtype=torch.float32)
    backend = make("reference", config, group, spare_slots=1)
    with pytest.raises(FlashMoEError) as caught:
        results(backend, inputs, "each", adapts="fc1")
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fc1_down": 5}, r"fc1_down is \(3, 5\), wanted \(rank, 64\)"),
        ({"fc1_up": 5}, r"fc1_up is \(5, 3\), wanted \(\d+, rank\)"),
        ({"rank": 2}, "fc1's factors have ranks 3 and 2"),
        ({"dtype": torch.bfloat16}, "fc1_down is torch.bfloat16 on cpu, wanted torch.float32"),
        ({"num": 2}, "fc1_down has 2 matrices, wanted one for all or one for each of"),
    ],
)
def test_factors_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    config = cases.make_config(num_ranks=1)
    inputs = cases.make_inputs(config, cases.uniform, [37], dtype=torch.float32)
    outputs, width = inputs.fc1[0].shape
    down = torch.zeros(RANK, change.get("fc1_down", width), dtype=change.get("dtype"))
    up = torch.zeros(change.get("fc1_up", outputs), change.get("rank", RANK))
    weights = AdaptedWeights(
        tuple(inputs.fc1), tuple(inputs.fc2), fc1_down=(down,) * change.get("num", 1), fc1_up=(up,)
    )
    with pytest.raises(ShapeError, match=words):
        moe_apply(
            make("reference", config), inputs.x[0], inputs.probs[0], inputs.routing_map[0], weights
        )


@pytest.mark.parametrize("form", ["transposed", "split"])
def test_other_forms_of_matrices_are_refused(form: str) -> None:
    with pytest.raises(ShapeError, match=f"{form}=True"):
        AdaptedWeights((), (), **{form: True})
