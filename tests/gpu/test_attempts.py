"""Overflows in a step that may be repeated: no call raises, and exact buffers hold the rows."""

from dataclasses import replace

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
