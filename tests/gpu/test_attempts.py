"""Overflows in a step that may be repeated: no call raises, and exact buffers hold the rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmoe_megatron import FlashMoELayer, RepeatedSteps
from flashmoe_megatron.attempts import ATTEMPTS, Attempts
from flashmoe_megatron.config import Keep
from flashmoe_megatron.errors import RowBoundError
from tests.gpu.test_in_step import OnStream, load_operators, run_on_streams
from tests.gpu.virtual import VirtualGroup, VirtualLayer, device, streams
from tests.unit.in_step import CONFIG, LAYERS, RANKS, STEPS

pytestmark = pytest.mark.gpu

TIGHT = range(5 * LAYERS, 7 * LAYERS)
"""Calls whose buffers hold one block; all tokens choose two experts of rank 0, one block each."""


class Tight(Attempts):
    """Steps of which some overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def bound(self, blocks: int | None) -> int | None:
        self.num_calls += 1
        found = super().bound(blocks)
        return 1 if found is not None and self.num_calls - 1 in TIGHT else found


@pytest.mark.parametrize("keep", ["all", "preactivations"])
def test_all_steps_end_and_a_repeat_fits(keep: Keep) -> None:
    load_operators()
    group = VirtualGroup(RANKS)
    group.options = replace(group.options, row_bound=2.0)
    layer = VirtualLayer(CONFIG, group, is_guarded=False)
    attempts = [Tight() for _ in range(RANKS)]

    def train(*, is_exact: bool) -> list[OnStream]:
        ranks = []
        for rank, backend in enumerate(layer.backends):
            backend.keep, backend.attempts = keep, attempts[rank]
            attempts[rank].is_exact = is_exact
            attempts[rank]._is_open = True  # for threads that begin within
            wait = streams()[rank].synchronize
            ranks.append(OnStream(backend, lambda call: call, wait, device=device()))
        run_on_streams(layer, ranks)
        return ranks

    for rank, one in enumerate(train(is_exact=False)):
        assert one.errors == []
        layer.backends[rank]._look_for_fault()
        assert isinstance(attempts[rank].errors[0], RowBoundError)
        assert "rank 0 was to receive 2 blocks" in str(attempts[rank].errors[0])
        for call, (_, out) in enumerate(one.outputs):
            if call in TIGHT:
                assert out.isnan().all(), call
            elif call < TIGHT.start or call >= (STEPS - 1) * LAYERS:
                assert out.isfinite().all(), call
        attempts[rank].errors.clear()
    for rank, one in enumerate(train(is_exact=True)):
        assert one.errors == []
        assert attempts[rank].errors == []
        assert all(out.isfinite().all() for _, out in one.outputs)
        assert attempts[rank].most == (2 if rank == 0 else 0)


@pytest.mark.parametrize("fuse_router", [False, True], ids=["in_front", "in_the_launch"])
def test_a_layer_behind_an_overflow_is_repeated_with_it(
    fuse_router: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets NaN, which a router in front of its launch refuses before the launch."""
    config = replace(CONFIG, num_ranks=1)
    options = {"device": "cuda", "row_bound": 2.0, "router": True, "fuse_router": fuse_router}
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(FlashMoELayer(config, **options) for _ in range(2)))
    x = torch.randn(config.max_tokens, config.hidden, dtype=torch.bfloat16, device="cuda")
    steps = RepeatedSteps(model, model.zero_grad)

    def step() -> list[torch.Tensor]:
        loss = model(x).float().square().mean()
        loss.backward()
        return [loss.detach(), *(one.grad.clone() for one in model.parameters())]

    want = steps.run(step)
    assert steps.num_repeats == 0
    monkeypatch.setattr(Attempts, "bound", lambda self, _: None if self.is_exact else 1)
    monkeypatch.setattr(ATTEMPTS, "blocks", 0)
    got = steps.run(step)
    assert steps.num_repeats == 1
    assert all(map(torch.equal, got, want))
    assert all(one.isfinite().all() for one in got)


def train_in_fp8(recipe: Any, overflows: set[int], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Trains six steps of Transformer Engine's layers around one of ours, whose rows do not fit.

    Returns losses, weights and the engine's histories and scales, and whether scales have moved.
    """
    import transformer_engine.pytorch as engine

    config = replace(CONFIG, num_ranks=1, hidden=128, max_tokens=128)
    torch.manual_seed(3)
    wide = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    model = torch.nn.Sequential(
        engine.Linear(config.hidden, config.hidden, **wide),
        FlashMoELayer(config, device="cuda", row_bound=2.0, router=True),
        engine.Linear(config.hidden, config.hidden, **wide),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = RepeatedSteps(model, optimizer.zero_grad)

    def step(x: torch.Tensor) -> torch.Tensor:
        with engine.autocast(enabled=True, recipe=recipe):
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        return loss.detach()

    losses = []
    for number in range(6):
        drawn = torch.Generator("cuda").manual_seed(number)
        x = torch.randn(config.max_tokens, config.hidden, device="cuda", generator=drawn)
        with monkeypatch.context() as patched:
            patched.setattr(ATTEMPTS, "blocks", 0)
            if number in overflows:
                patched.setattr(Attempts, "bound", lambda self, _: None if self.is_exact else 1)
            losses.append(steps.run(step, x.to(torch.bfloat16)))
        optimizer.step()
    assert steps.num_repeats == len(overflows)
    kept = [
        tensor
        for layer in (model[0], model[2])
        for key in ("scaling_fwd", "scaling_bwd")
        for tensor in (
            getattr(layer.fp8_meta[key], name, None) for name in ("scale", "amax_history")
        )
        if tensor is not None
    ]
    return [*losses, *(one.detach() for one in model.parameters()), *kept]


@pytest.mark.parametrize("overflows", [{0}, {2, 5}], ids=["first", "later"])
@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_scales_of_transformer_engine_are_those_of_a_bound_that_holds(
    name: str, overflows: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step, the attempt that overflows makes the tensors of delayed scales."""
    pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.common import recipe

    made = getattr(recipe, name)
    delayed = {"amax_history_len": 4, "amax_compute_algo": "max"} if "Delayed" in name else {}
    want = train_in_fp8(made(**delayed), set(), monkeypatch)
    got = train_in_fp8(made(**delayed), overflows, monkeypatch)
    assert len(got) == len(want)
    assert all(one.isfinite().all() for one in want)
    assert all(map(torch.equal, got, want))
    if delayed:
        assert all(bool((one != 1).any()) for one in want[-8::2]), "the scales have moved"
