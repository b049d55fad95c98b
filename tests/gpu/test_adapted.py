"""Low-rank additions to experts' matrices on the kernel, beside matrices that hold the sums."""

import pytest
import torch

from flashmoe_megatron.adapted import AdaptedWeights
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import Keep
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps
from tests.gpu.layers import make_config
from tests.gpu.virtual import device
from tests.unit import cases

pytestmark = pytest.mark.gpu

RANK, SCALE = 16, 0.5


@pytest.mark.parametrize("is_stack", [False, True], ids=["each", "stack"])
@pytest.mark.parametrize("form", ["shared", "stack", "shared outer"])
@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
def test_sums_and_their_factors_gradients(keep: Keep, form: str, is_stack: bool) -> None:
    """The sums' bits are those of a call with sums; factors have products of their gradients."""
    config = make_config(1, gated=True, activation="silu")
    options = BackendOptions(keep=keep)
    memory = GroupMemory(None, device(), options)
    backend = KernelBackend(config, None, device(), memory=memory, rank=0, options=options)
    inputs = steps.make_inputs(config, cases.with_empty_experts, [300])
    generator = torch.Generator(device()).manual_seed(3)
    kinds = {"fc1": tuple(inputs.fc1), "fc2": tuple(inputs.fc2)}
    factors, sums = {}, {}
    for kind, matrices in kinds.items():
        outputs, width = matrices[0].shape
        for name, shape in (("down", (RANK, width)), ("up", (outputs, RANK))):
            is_shared = form == "shared" or (
                form == "shared outer" and (kind, name) in (("fc1", "down"), ("fc2", "up"))
            )
            drawn = torch.randn(
                *(() if is_shared else (len(matrices),)),
                *shape,
                generator=generator,
                device=device(),
            )
            factors[f"{kind}_{name}"] = (drawn * 0.1).to(matrices[0].dtype).requires_grad_()
        down, up = (
            factors[f"{kind}_{name}"].detach().expand(len(matrices), -1, -1)
            for name in ("down", "up")
        )
        sums[kind] = [
            torch.addmm(one, b, a, alpha=SCALE).requires_grad_()
            for one, a, b in zip(matrices, down, up, strict=True)
        ]
    stacks = {kind: (torch.stack(each),) if is_stack else each for kind, each in kinds.items()}
    adapted = AdaptedWeights(
        **stacks,
        **{name: (one,) for name, one in factors.items()},
        fc1_scale=SCALE,
        fc2_scale=SCALE,
    )
    outs = []
    for weights in (adapted, ExpertWeights(**sums)):
        x, probs = (each[0].clone().requires_grad_() for each in (inputs.x, inputs.probs))
        out = moe_apply(backend, x, probs, inputs.routing_map[0], weights)
        out.backward(inputs.grad_out[0])
        outs.append((out.detach(), x.grad, probs.grad))
    for got, want in zip(*outs, strict=True):
        assert torch.equal(got, want)
    for kind, of_kind in sums.items():
        of_sums = torch.stack([one.grad for one in of_kind]).double()
        down, up = (factors[f"{kind}_{name}"] for name in ("down", "up"))
        for factor, grad in (
            (down, up.detach().double().mT @ of_sums),
            (up, of_sums @ down.detach().double().mT),
        ):
            want = SCALE * (grad if factor.dim() > 2 else grad.sum(0))
            assert factor.grad is not None
            assert_close(kind, factor.grad.double(), want, rel_l2=1e-2)
