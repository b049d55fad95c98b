"""NaN and infinity in one token do what they do unfused, and change no other token."""

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import ExpertWeights, ReferenceBackend, moe_apply, moe_reference
from tests.distributed import RankPool
from tests.unit import cases

TOKENS = [9, 14]
VICTIM = 5  # the last rank's token that gets the value


def step(
    group: dist.ProcessGroup, value: float | None, *, in_gradient: bool
) -> dict[str, torch.Tensor]:
    """Runs one rank's forward and backward, with a value put into one token or one gradient."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    config = cases.make_config(num_ranks=num_ranks)
    inputs = cases.make_inputs(config, cases.uniform, TOKENS, dtype=torch.float32)
    x, grad_out = inputs.x[rank].clone(), inputs.grad_out[rank].clone()
    if value is not None and rank == num_ranks - 1:
        (grad_out if in_gradient else x)[VICTIM, 3] = value
    local = config.num_local_experts
    own = slice(rank * local, (rank + 1) * local)
    fc1, fc2 = (
        [weight.clone().requires_grad_() for weight in weights[own]]
        for weights in (inputs.fc1, inputs.fc2)
    )
    x.requires_grad_()
    probs = inputs.probs[rank].clone().requires_grad_()
    backend = ReferenceBackend(config, group)
    weights = ExpertWeights(tuple(fc1), tuple(fc2))
    out = moe_apply(backend, x, probs, inputs.routing_map[rank], weights)
    out.backward(grad_out)
    grads = [[one.grad for one in each] for each in (fc1, fc2)]
    unfused = moe_reference(
        x.detach(),
        probs.detach(),
        inputs.routing_map[rank],
        inputs.fc1,
        inputs.fc2,
        activation=config.activation,
        gated=config.gated,
        dtype=torch.float32,
    )
    return {
        "out": out.detach(),
        "unfused": unfused,
        "grad_x": x.grad,
        "grad_probs": probs.grad,
        "fc1": torch.stack(grads[0]),
        "fc2": torch.stack(grads[1]),
        "met": inputs.routing_map[-1][VICTIM][own],
    }


def step_with(group: dist.ProcessGroup, value: float | None, in_gradient: bool) -> object:
    return step(group, value, in_gradient=in_gradient)


@pytest.mark.parametrize("in_gradient", [False, True], ids=["token", "gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_stays_with_its_token(ranks: RankPool, value: float, in_gradient: bool):
    clean = ranks.run(step_with, None, in_gradient, num_ranks=2)
    spoiled = ranks.run(step_with, value, in_gradient, num_ranks=2)
    for rank, (want, got) in enumerate(zip(clean, spoiled, strict=True)):
        others = torch.ones(TOKENS[rank], dtype=torch.bool)
        if rank == 1:
            others[VICTIM] = False
            hit = ("grad_x",) if in_gradient else ("out", "grad_x", "grad_probs")
            for name in hit:
                assert not got[name][VICTIM].isfinite().all(), name
        for name in ("out", "grad_x", "grad_probs"):
            assert torch.equal(got[name][others], want[name][others]), name
        assert torch.equal(got["out"].isfinite(), got["unfused"].isfinite())
        met = got["met"]
        for name in ("fc1", "fc2"):
            assert torch.equal(got[name][~met], want[name][~met]), name
            assert all(not grad.isfinite().all() for grad in got[name][met]), name
