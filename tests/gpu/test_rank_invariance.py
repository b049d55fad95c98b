"""On the kernel a batch has the same bits on 1 to 8 virtual ranks, where that is asked for."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import Activation, Keep, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.gpu import steps
from tests.gpu.layers import make_config, zipf
from tests.gpu.virtual import VirtualGroup, VirtualLayer, device
from tests.unit import cases

pytestmark = pytest.mark.gpu

TOKENS = 700
SPLITS = {
    1: [700],
    2: [379, 321],
    4: [205, 0, 300, 195],
    8: [100, 33, 0, 67, 1, 299, 130, 70],
}
"""Tokens of each rank, of one batch: chunks of 32 begin elsewhere on each number of ranks."""

Bits = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, and how it is called."""

    topk: int = 2
    num_experts: int = 16
    hidden: int = 256
    intermediate: int = 192
    gated: bool = True
    dtype: torch.dtype = torch.bfloat16
    routing: cases.Routing = cases.skewed
    keep: Keep = "all"
    bias: bool = False
    transposed: bool = False
    is_bounded: bool = False
    grads: torch.dtype = torch.float32
    by_indices: bool = False

    def config(self, num_ranks: int) -> MoEConfig:
        return make_config(
            num_ranks,
            num_experts=self.num_experts,
            topk=self.topk,
            hidden=self.hidden,
            intermediate=self.intermediate,
            gated=self.gated,
            activation=Activation.SILU if self.gated else Activation.GELU,
            max_tokens=max(SPLITS[num_ranks]),
        )


def inputs_of(case: Case) -> cases.Inputs:
    """The whole batch, as one rank has it."""
    inputs = steps.make_inputs(case.config(1), case.routing, [TOKENS], dtype=case.dtype)
    if case.by_indices:
        pair = cases.as_choices(
            case.config(1), inputs.probs[0], inputs.routing_map[0], dtype=torch.int64
        )
        inputs.routing_map, inputs.probs = [pair[0]], [pair[1]]
    return inputs


def divided(inputs: cases.Inputs, num_ranks: int) -> cases.Inputs:
    """The batch divided over ranks, in its order."""
    names = ("x", "probs", "routing_map", "grad_out")
    parts = {
        name: [part.clone() for part in getattr(inputs, name)[0].split(SPLITS[num_ranks])]
        for name in names
    }
    return replace(inputs, **parts)


def biases_of(case: Case) -> list[list[torch.Tensor]]:
    """All experts' biases, for fc1 and for fc2; nothing for experts without biases."""
    config, g = case.config(1), cases.generator(3)
    return [
        [torch.randn(width, generator=g).to(device(), case.dtype) for _ in range(case.num_experts)]
        for width in (config.fc1_rows, config.hidden)
        if case.bias
    ]


def weights_of(case: Case, config: MoEConfig, inputs: cases.Inputs) -> list[ExpertWeights]:
    shares = steps.weights_of(config, inputs, transposed=case.transposed)
    if not case.bias:
        return shares
    local = config.num_local_experts
    fc1, fc2 = biases_of(case)
    return [
        replace(
            share,
            fc1_bias=tuple(fc1[rank * local : (rank + 1) * local]),
            fc2_bias=tuple(fc2[rank * local : (rank + 1) * local]),
        )
        for rank, share in enumerate(shares)
    ]


def bits(case: Case, num_ranks: int, *, rank_invariant: bool = True) -> Bits:
    """Outputs, evaluated and trained, and gradients: of the batch, and of all experts."""
    config, inputs = case.config(num_ranks), divided(inputs_of(case), num_ranks)
    weights = weights_of(case, config, inputs)
    layer = VirtualLayer(config, keep=case.keep, rank_invariant=rank_invariant)
    layer.prepare()
    bound = int(layer.backends[0]._sizes.max_row_blocks) if case.is_bounded else None
    given = inputs.x, inputs.probs, inputs.routing_map, weights
    evaluated, _ = layer.forward(*given, training=False, num_row_blocks=bound)
    kinds = ["fc1", "fc2", *(["fc1_bias", "fc2_bias"] if case.bias else [])]
    grads = {
        kind: [
            [
                WeightGrad(torch.full_like(one, 0.5, dtype=case.grads), accumulate=True)
                for one in getattr(share, kind)
            ]
            for share in weights
        ]
        for kind in kinds
    }
    out, saved = layer.forward(*given, num_row_blocks=bound)
    grad_x, grad_probs = layer.backward(inputs.grad_out, saved, weights, *grads.values())
    torch.cuda.synchronize()
    layer.check_guards()
    return {
        "evaluated": torch.cat(evaluated),
        "out": torch.cat(out),
        "grad_x": torch.cat(grad_x),
        "grad_probs": torch.cat(grad_probs),
        **{
            kind: torch.stack([one.buffer for share in shares for one in share])
            for kind, shares in grads.items()
        },
    }


def differing(got: Bits, want: Bits) -> list[str]:
    """The names of results that differ in a bit, a zero's sign among them."""

    def words(tensor: torch.Tensor) -> torch.Tensor:
        kind = torch.int32 if tensor.dtype == torch.float32 else torch.int16
        return tensor.contiguous().view(kind)

    assert got.keys() == want.keys()
    return [name for name in want if not torch.equal(words(got[name]), words(want[name]))]


CASES = [
    Case(topk=1),
    Case(topk=2),
    Case(topk=4, dtype=torch.float16),
    Case(topk=8, num_experts=64),
    Case(topk=8, num_experts=8),
    Case(topk=3, num_experts=24, hidden=448, intermediate=320, gated=False),
    Case(topk=6, num_experts=128, routing=cases.uniform),
    Case(topk=16, num_experts=32, routing=zipf),
    Case(topk=2, num_experts=8, hidden=512, intermediate=1088),
    Case(topk=2, num_experts=8, hidden=2048, intermediate=768, dtype=torch.float16),
    Case(topk=4, bias=True),
    Case(topk=4, bias=True, dtype=torch.float16, gated=False, intermediate=640),
    Case(topk=4, keep="preactivations"),
    Case(topk=4, keep="preactivations", intermediate=640, transposed=True),
    Case(topk=4, transposed=True, dtype=torch.float16),
    Case(topk=4, grads=torch.bfloat16),
    Case(topk=4, is_bounded=True),
    Case(topk=4, is_bounded=True, keep="preactivations", intermediate=1088),
    Case(topk=4, by_indices=True),
    Case(topk=4, routing=cases.with_dropped_tokens),
    Case(topk=4, routing=cases.with_empty_experts),
    Case(topk=1, routing=cases.to_one_expert),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{CASES.index(case)}-top{case.topk}")
def test_any_number_of_ranks_gives_equal_bits(case: Case) -> None:
    want = bits(case, 1)
    assert all(tensor.isfinite().all() for tensor in want.values())
    for num_ranks in (2, 4, 8):
        got = bits(case, num_ranks)
        assert not differing(got, want), num_ranks
    for name in ("evaluated", "out"):
        assert torch.equal(want[name], want["out"])


def test_without_the_option_ranks_show() -> None:
    """Sums and rows by rank have other bits: the comparison above is no matter of course."""
    case = Case(topk=4)
    found = [bits(case, num_ranks, rank_invariant=False) for num_ranks in (1, 4)]
    differ = differing(*found)
    assert {"out", "grad_x", "fc1", "fc2"} <= set(differ), differ


def test_one_row_of_a_token_on_a_rank_is_its_share() -> None:
    """The option changes no bit where a token chooses one expert, and tokens lie on one rank."""
    case = Case(topk=1)
    want, got = (bits(case, 1, rank_invariant=chosen) for chosen in (False, True))
    assert not differing(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_results_are_near_those_without_it(num_ranks: int, dtype: torch.dtype) -> None:
    """Each sum is rounded up to four times more often."""
    case = Case(topk=8, num_experts=32, dtype=dtype, routing=cases.uniform)
    plain, got = (bits(case, num_ranks, rank_invariant=chosen) for chosen in (False, True))
    rel_l2 = 8e-3 if dtype == torch.bfloat16 else 1e-3
    for name, tensor in got.items():
        assert_close(name, tensor, plain[name].double(), rel_l2=rel_l2)


@pytest.mark.parametrize("keep", ["all", "preactivations", "inputs"])
def test_what_is_kept_changes_no_bit(keep: Keep) -> None:
    """One rank through autograd, beside four that keep all."""
    case = Case(topk=4)
    want, inputs = bits(case, 4), inputs_of(case)
    config = case.config(1)
    layer = VirtualLayer(config, keep=keep, rank_invariant=True, is_guarded=False)
    (weights,) = weights_of(case, config, inputs)
    for one in (*weights.fc1, *weights.fc2):
        one.requires_grad_()
    x, probs = (each[0].clone().requires_grad_() for each in (inputs.x, inputs.probs))
    out = moe_apply(layer.backends[0], x, probs, inputs.routing_map[0], weights)
    out.backward(inputs.grad_out[0])
    assert torch.equal(out, want["out"])
    assert torch.equal(x.grad, want["grad_x"])
    assert torch.equal(probs.grad, want["grad_probs"])


@pytest.mark.parametrize(
    ("num_ranks", "changes", "said"),
    [
        (1, {"num_experts": 12}, "rank_invariant with 12 experts on 1 ranks: wanted a multiple of"),
        (3, {"num_experts": 24}, "rank_invariant with 24 experts on 3 ranks: wanted a multiple of"),
        (1, {"experts": "fp8"}, "rank_invariant with experts 1, spare_slots 0"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    num_ranks: int, changes: dict[str, Any], said: str
) -> None:
    sizes = {"hidden": 256, "intermediate": 256}
    config = make_config(num_ranks, **{**sizes, **changes})
    with pytest.raises(ConfigError, match=said):
        VirtualLayer(config, VirtualGroup(num_ranks, rank_invariant=True))
