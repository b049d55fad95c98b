"""In a step that may be repeated no call raises what a repeat may cure."""

from functools import partial

import pytest
import torch

from flashmoe_megatron.attempts import Attempts
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.errors import FlashMoEError, RoutingError, RowBoundError, ShapeError
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.weights import ExpertWeights
from tests.unit import cases, in_step
from tests.unit.in_step import BAD, BAD_STEP, CONFIG, RANKS, Rank
from tests.unit.simulated_gpus import Gpus, install, make_backend


def test_only_overflows_and_their_consequences_are_put_off() -> None:
    attempts = Attempts()
    assert not attempts.put_off(RowBoundError("closed"))
    with attempts.open():
        assert attempts.put_off(RoutingError("NaN of another layer"))
        assert not attempts.has_overflown
        assert attempts.put_off(RowBoundError("too many"))
        assert not attempts.put_off(ShapeError("a mistake"))
        assert not attempts.put_off(KeyboardInterrupt())  # type: ignore[arg-type]
    assert attempts.has_overflown
    assert [str(error) for error in attempts.errors] == ["NaN of another layer", "too many"]
    assert not attempts.put_off(RowBoundError("closed again"))
    with attempts.open():
        assert not attempts.errors


def test_bounds_grow_and_are_off_in_exact_buffers() -> None:
    attempts = Attempts()
    attempts.note(9)
    assert (attempts.most, attempts.bound(5), attempts.bound(None)) == (0, 5, None)
    with attempts.exact():
        attempts.note(7)
        attempts.note(6)
        assert attempts.bound(5) is None
    assert (attempts.bound(0), attempts.is_unknown) == (None, True), "it is to be measured"
    attempts.blocks = 8
    assert (attempts.bound(0), attempts.is_unknown) == (8, False)
    assert (attempts.most, attempts.bound(5), attempts.bound(9)) == (7, 8, 9)
    with attempts.exact():
        assert attempts.most == 0


@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
@pytest.mark.parametrize("seed", range(4))
def test_hosts_ahead_of_their_gpus_put_an_error_off(
    keep: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a call hears of it on all ranks or none does, all steps of all ranks end."""
    gpus = Gpus(RANKS, seed, slow=seed % RANKS)
    install(gpus, monkeypatch)
    backends = [make_backend(CONFIG, rank, row_bound=2.0, keep=keep) for rank in range(RANKS)]
    change, message = BAD["found by the GPU"]
    ranks = [Rank(one, change, partial(gpus.wait, one.rank)) for one in backends]
    for backend in backends:
        backend.attempts = Attempts()
        backend.attempts._is_open = True  # for threads that begin within
    in_step.run_ranks(ranks)
    assert not gpus.problems
    for one in ranks:
        assert one.errors == []
        assert one.backend.attempts.errors, "the training has gone on for longer than hosts are"
        assert all(message in str(error) for error in one.backend.attempts.errors)
        assert all(out.isnan().all() for step, out in one.outputs if step == BAD_STEP)
        assert not any(out.isnan().any() for step, out in one.outputs if step in (0, 11))


@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
@pytest.mark.parametrize("kind", ["reference", "scheduled"])
def test_separate_kernels_give_nan_until_they_are_exact(kind: str, keep: str) -> None:
    config = cases.make_config(num_ranks=1, num_experts=4, topk=1, max_tokens=256)
    inputs = cases.make_inputs(config, cases.uniform, [256], dtype=torch.float32)
    options = BackendOptions(row_bound=1.0, keep=keep)  # type: ignore[arg-type]
    backend = select_backend(config, None, "cpu", kind=kind, **vars(options))
    backend.attempts = attempts = Attempts()
    attempts.bound = lambda _: None if attempts.is_exact else 1  # type: ignore[method-assign]
    fc1, fc2 = (
        tuple(torch.nn.Parameter(weight) for weight in weights)
        for weights in (inputs.fc1, inputs.fc2)
    )
    x = inputs.x[0].clone().requires_grad_()

    def apply() -> torch.Tensor:
        x.grad = None
        given = inputs.probs[0], inputs.routing_map[0], ExpertWeights(fc1, fc2)
        out = moe_apply(backend, x, *given)
        out.sum().backward()
        return out

    with pytest.raises(RowBoundError, match="but its buffers hold 1"):
        apply()
    with attempts.open():
        assert apply().isnan().all()
    assert isinstance(attempts.errors[0], RowBoundError)
    assert x.grad is not None
    assert x.grad.isnan().all()
    assert all(one.grad is not None and one.grad.isnan().all() for one in (*fc1, *fc2))
    for one in (*fc1, *fc2):
        one.grad = None
    with attempts.open(), attempts.exact():
        assert apply().isfinite().all()
    assert not attempts.errors
    assert attempts.most >= 4
    assert all(one.grad is not None and one.grad.isfinite().all() for one in (*fc1, *fc2))
    with attempts.open(), pytest.raises(FlashMoEError, match="tokens, the layer was built"):
        moe_apply(
            backend,
            torch.cat([x.detach()] * 2),
            torch.cat([inputs.probs[0]] * 2),
            torch.cat([inputs.routing_map[0]] * 2),
            ExpertWeights(fc1, fc2),
        )
