"""A backward that one rank lacks: the others' launches leave at once, with NaN and the reason."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmoe_megatron.config import Keep, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.gpu import steps
from tests.gpu.expected import Results, assert_as_good, assert_void, expected
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.test_in_step import OnStream, run_on_streams
from tests.gpu.virtual import VirtualGroup, VirtualLayer, device, streams
from tests.unit import cases, in_step
from tests.unit.unmatched import REASON, WITHOUT, Trained, check_told

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

RANKS = 4
TIMEOUT_S = 60.0
"""A launch that waited for the rank without a backward would take as long."""


class Trainable:
    """A layer on virtual ranks whose results are known."""

    def __init__(self, config: MoEConfig, **group_options: Any) -> None:
        self.config = config
        self.inputs = steps.make_inputs(config, cases.uniform, TOKENS[RANKS])
        self.weights = steps.weights_of(config, self.inputs)
        self.layer = VirtualLayer(config, timeout_s=TIMEOUT_S, **group_options)
        self.right = self.step()
        assert_as_good(self.right, expected(config, self.inputs))

    def step(self) -> Results:
        return steps.step(self.layer, self.inputs, self.weights)

    def forward(self, blocks: int | None, *, training: bool = True) -> list[Any]:
        """What a forward saves whose backward one rank lacks; its output is as ever."""
        inputs = self.inputs
        pending = self.layer.begin(
            inputs.x, inputs.probs, inputs.routing_map, blocks, without_backward=[WITHOUT]
        )
        out, saved = self.layer.finish(pending, self.weights, training=training)
        torch.cuda.synchronize()
        assert torch.equal(torch.cat(out), self.right.out)
        return saved

    def check_told(self) -> None:
        """Ranks with a backward have the reason, the other has none; then all go on."""
        for rank, backend in enumerate(self.layer.backends):
            if rank == WITHOUT:
                backend.raise_pending_fault()
            else:
                with pytest.raises(ConfigError, match=REASON):
                    backend.raise_pending_fault()
        for _ in range(2):
            steps.assert_same_bits(self.step(), self.right)


def others() -> list[int]:
    return [rank for rank in range(RANKS) if rank != WITHOUT]


@pytest.mark.parametrize("spare_slots", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("blocks", [None, 32])
def test_gradients_are_void(
    blocks: int | None, gated: bool, dtype: torch.dtype, spare_slots: int
) -> None:
    case = Trainable(make_config(RANKS, gated=gated), spare_slots=spare_slots)
    saved = [case.forward(blocks) for _ in range(2)]
    if blocks is None:
        assert all(backend.unfollowed == (WITHOUT,) for backend in case.layer.backends)
    for of_call in reversed(saved):
        grads = steps.make_grads(case.layer, case.weights, dtype=dtype, initial=0.5)
        torch.cuda.synchronize()
        for rank in others():
            with torch.cuda.stream(streams()[rank]):
                results = case.layer.backends[rank].backward(
                    case.inputs.grad_out[rank],
                    of_call[rank],
                    case.weights[rank],
                    *(kind[rank] for kind in grads),
                )
            torch.cuda.synchronize()
            assert_void(results)
            assert_void(grad.buffer for kind in grads for grad in kind[rank])
        for kind in grads:
            assert all(bool((grad.buffer == 0.5).all()) for grad in kind[WITHOUT])
    case.check_told()
    case.layer.check_guards()


def test_gradients_of_biases_are_void() -> None:
    config = make_config(RANKS, hidden=320, gated=True)
    case = Trainable(config)
    rows = (config.fc1_rows, config.hidden)
    zeros = [
        tuple(torch.zeros(width, device=device(), dtype=torch.bfloat16) for _ in range(4))
        for width in rows
    ]
    case.weights = [
        ExpertWeights(share.fc1, share.fc2, fc1_bias=zeros[0], fc2_bias=zeros[1])
        for share in case.weights
    ]
    saved = case.forward(32)
    grads = [
        [WeightGrad(torch.full_like(tensor, 0.5, dtype=torch.float32), True) for tensor in kind]
        for kind in (case.weights[0].fc1, case.weights[0].fc2, *zeros)
    ]
    case.layer.backends[0].backward(case.inputs.grad_out[0], saved[0], case.weights[0], *grads)
    torch.cuda.synchronize()
    assert_void(grad.buffer for kind in grads for grad in kind)
    with pytest.raises(ConfigError, match=REASON):
        case.layer.backends[0].raise_pending_fault()


@pytest.mark.parametrize("blocks", [None, 32])
def test_a_forward_that_runs_again(blocks: int | None) -> None:
    """With ``keep="inputs"`` the forward of the backward knows from its first plan."""
    case = Trainable(make_config(RANKS))
    headers = case.forward(32, training=False)
    assert headers[WITHOUT] is None
    inputs = case.inputs
    for rank in others():
        backend = case.layer.backends[rank]
        with torch.cuda.stream(streams()[rank]):
            pending = backend.begin(
                inputs.x[rank],
                inputs.probs[rank],
                inputs.routing_map[rank],
                blocks,
                first_plan=headers[rank],
            )
            if blocks is None:
                with pytest.raises(ConfigError, match=REASON):
                    backend.finish(pending, case.weights[rank], training=True)
                continue
            out, saved = backend.finish(pending, case.weights[rank], training=True)
            grads = steps.make_grads(case.layer, case.weights)
            results = backend.backward(
                inputs.grad_out[rank],
                saved,
                case.weights[rank],
                *(kind[rank] for kind in grads),
            )
        torch.cuda.synchronize()
        assert_void([out, *results])
        assert_void(grad.buffer for kind in grads for grad in kind[rank])
    torch.cuda.synchronize()
    if blocks is None:  # the error has been raised
        for rank in others():
            case.layer.backends[rank].memory.take_fault()
        steps.assert_same_bits(case.step(), case.right)
    else:
        case.check_told()


class TrainedOnStream(OnStream, Trained):
    """A rank whose launches are on its own stream."""


@pytest.mark.parametrize("keep", ["all", "preactivations"])
@pytest.mark.parametrize("row_bound", [None, 2.0])
def test_all_are_told_in_one_call(row_bound: float | None, keep: Keep) -> None:
    group = VirtualGroup(in_step.RANKS)
    group.options = replace(group.options, row_bound=row_bound)
    layer = VirtualLayer(in_step.CONFIG, group, is_guarded=False)
    ranks = []
    for rank, backend in enumerate(layer.backends):
        backend.keep = keep
        wait = streams()[rank].synchronize
        ranks.append(TrainedOnStream(backend, lambda call: call, wait, device=device()))
    run_on_streams(layer, ranks)
    check_told(ranks, raises_at_once=row_bound is None)
