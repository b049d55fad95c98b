"""Gates in CUDA graphs with the experts' launch: what a replay chooses, and what it learns."""

from collections.abc import Callable

import pytest
import torch

from flashmoe_megatron.gates import (
    ExpertChoiceGate,
    Gate,
    GatedExperts,
    GShardGate,
    SigmoidGate,
    SoftMoEGate,
    XMoEGate,
)
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.layer import FlashMoELayer
from tests.gpu.layers import make_config
from tests.gpu.virtual import device

pytestmark = pytest.mark.gpu

TOKENS = 256
GATES: dict[str, Callable[[int, int], Gate]] = {
    "gshard": lambda *sizes: GShardGate(*sizes, capacity_factor=0.7, random_second=False),
    "sigmoid": lambda *sizes: SigmoidGate(*sizes, topk=2),
    "xmoe": lambda *sizes: XMoEGate(*sizes, topk=2),
    "expert-choice": lambda *sizes: ExpertChoiceGate(*sizes, max_routes=3, allow_future=True),
    "soft": lambda *sizes: SoftMoEGate(*sizes, slots=4, allow_future=True),
}


def make_model(gate: Callable[[int, int], Gate]) -> GatedExperts:
    config = make_config(1, max_tokens=TOKENS)
    layer = FlashMoELayer(config, device=device(), dtype=torch.bfloat16, row_bound=4.0)
    assert isinstance(layer.backend, KernelBackend)
    layer.check_routing = False
    return GatedExperts(gate(config.hidden, config.num_experts).to(device()), layer)


def step(model: GatedExperts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs and the auxiliary loss of a forward; a backward follows."""
    out, routing = model(x)
    (out.float().square().sum() + routing.aux_loss).backward()
    return out.detach(), routing.aux_loss.detach()


def captured(
    model: GatedExperts, x: torch.Tensor
) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]:
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # where gradients are added up then, they are captured, too
        for _ in range(2):
            step(model, x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step(model, x)
    return graph, results


@pytest.mark.parametrize("name", GATES)
def test_a_replay_routes_and_learns_as_a_call(name: str) -> None:
    torch.manual_seed(1)
    model = make_model(GATES[name])
    x = torch.randn(TOKENS, model.gate.hidden, dtype=torch.bfloat16, device=device())
    graph, results = captured(model, x)
    for seed in (2, 3):
        torch.manual_seed(seed)
        x.normal_()
        for parameter in model.parameters():
            parameter.grad.zero_()
        graph.replay()
        torch.cuda.synchronize()
        got = [one.clone() for one in (*results, *(one.grad for one in model.parameters()))]
        for parameter in model.parameters():
            parameter.grad.zero_()
        want = [*step(model, x), *(one.grad for one in model.parameters())]
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
            assert ours.isfinite().all()
        assert got[0].abs().sum() > 0


def test_replays_draw_second_choices_anew() -> None:
    torch.manual_seed(1)
    model = make_model(lambda *sizes: GShardGate(*sizes, capacity_factor=None))
    x = torch.randn(TOKENS, model.gate.hidden, dtype=torch.bfloat16, device=device())
    graph, (out, _) = captured(model, x)
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
