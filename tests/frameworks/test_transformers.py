"""transformers' models train on flashmoe as on their own experts, in three releases."""

import copy
import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flashmoe_megatron.checks import check_weights
from flashmoe_megatron.config import Activation
from flashmoe_megatron.errors import ConfigError, ShapeError
from tests.frameworks.models import KINDS, make_config
from tests.programs import ROOT, run_python
from tests.side_by_side import compare_noted

FOLDERS = ("5.23.0", "5.24.0")
"""Releases that tools/setup_env.sh installs in folders of their own."""
FLOAT32, AUTOCAST = 2e-6, 5e-3
"""Largest relative differences of losses."""

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("accelerate", "transformers")
]


def compare(
    release: str | None,
    loops: dict[str, float],
    out: Path,
    forked_from: Path,
    *options: str,
    ranks: int | None = None,
    more: tuple[str, ...] = (),
) -> None:
    """Trains each kind of model in some loops, with a release or with the installed one.

    Args:
        release: The release.
        loops: How far losses may be apart in each loop.
        out: A file for the program's records.
        forked_from: Where a process listens that has imported torch.
        *options: Further arguments of the program.
        ranks: Its ranks, if several share the experts.
        more: What it trains in float32 besides.
    """
    folders = [] if release is None else [ROOT / "build" / f"transformers-{release}"]
    for folder in folders:
        if not folder.is_dir():
            pytest.skip(f"{folder} is missing; tools/setup_env.sh makes it")
    program = ("-m", "tests.frameworks.train_transformers", "--out", out, *options)
    where: dict[str, Any] = {"before": folders, "forked_from": forked_from}
    run_python(*program, ranks=ranks, **where, HF_HUB_OFFLINE="1")
    wanted = {f"{kind} {loop}": limit for kind in KINDS for loop, limit in loops.items()}
    wanted |= dict.fromkeys(more, FLOAT32)
    pairs = compare_noted(out, wanted)
    if release is not None:
        assert {fused["release"] for _, fused in pairs.values()} == {release}


@pytest.mark.parametrize("release", [None, *FOLDERS])
def test_trainer_and_accelerate(release: str | None, tmp_path: Path, with_torch: Path) -> None:
    loops = {"trainer": FLOAT32, "autocast": AUTOCAST, "accelerate": FLOAT32}
    compare(release, loops, tmp_path / "records.jsonl", with_torch)


def test_expert_parallel(tmp_path: Path, with_torch: Path) -> None:
    loops = {"fsdp_size": FLOAT32, "tp_size": FLOAT32}
    out, more = tmp_path / "records.jsonl", ("muse_spark fsdp_size",)
    compare(FOLDERS[-1], loops, out, with_torch, "--parallel", ranks=2, more=more)


class Experts(nn.Module):
    """Experts as ``use_experts_implementation`` makes them, with any activation."""

    def __init__(self, act_fn: Any, *, has_gate: bool = True, limit: float | None = None) -> None:
        super().__init__()
        self.has_gate, self.has_bias = has_gate, False
        self.is_transposed, self.is_concatenated = False, True
        self.act_fn, self.limit = act_fn, limit
        name, rows = ("gate_up_proj", 128) if has_gate else ("up_proj", 64)
        self.register_parameter(name, nn.Parameter(torch.randn(4, rows, 64) / 8))
        self.down_proj = nn.Parameter(torch.randn(4, 64, 64) / 8)

    def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.act_fn(gate) * up


def read(experts: nn.Module) -> Any:
    from flashmoe_megatron.adapters.transformers.form import read_shape

    return read_shape(experts, topk=2, num_ranks=1)


@pytest.mark.parametrize(
    ("function", "activation"),
    [
        (nn.functional.silu, Activation.SILU),
        (nn.functional.gelu, Activation.GELU),
        (lambda x: nn.functional.gelu(x, approximate="tanh"), Activation.GELU_TANH),
        (nn.functional.relu, Activation.RELU),
        (lambda x: x * torch.sigmoid(1.702 * x), Activation.QUICK_GELU),
        (lambda x: x.relu().square(), Activation.SQUARED_RELU),
    ],
)
def test_activations_are_recognised(function: Any, activation: Activation) -> None:
    for has_gate in (True, False):
        shape = read(Experts(function, has_gate=has_gate))
        assert (shape.activation, shape.gated) == (activation, has_gate)
        assert (shape.clamp_value, shape.linear_offset) == (None, 0.0)


def test_clamps_are_recognised() -> None:
    shape = read(Experts(nn.functional.silu, limit=7.0))
    assert (shape.activation, shape.clamp_value) == (Activation.SILU, 7.0)


@pytest.mark.parametrize("is_concatenated", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_rows_are_found_where_a_class_has_them(is_transposed: bool, is_concatenated: bool) -> None:
    """The hidden size differs from the rows of a projection: nothing is the same both ways."""
    experts = Experts(nn.functional.silu)
    experts.is_transposed, experts.is_concatenated = is_transposed, is_concatenated
    shape = (4, 192, 128) if is_transposed else (4, 128, 192)
    experts.gate_up_proj = nn.Parameter(torch.randn(shape))
    if not is_concatenated:
        experts._apply_gate = lambda rows: nn.functional.silu(rows[..., ::2]) * rows[..., 1::2]
    found = read(experts)
    assert (found.hidden, found.intermediate) == (192, 64)
    assert found.glu_interleave == int(not is_concatenated)


def test_experts_of_gpt_oss_are_taken_as_they_lie() -> None:
    """Why weights may be transposed: with one layout alone each call would copy these stacks."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    from flashmoe_megatron.adapters.transformers.form import read_weights

    sizes = {"hidden": 192, "intermediate": 64, "experts": 4}
    experts = GptOssExperts(make_config("gpt_oss", "eager", **sizes))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    shape, weights = read(experts), read_weights(experts)
    assert (shape.hidden, shape.intermediate) == (192, 64)
    assert weights.fc1[0].shape == (4, shape.hidden, shape.fc1_rows), "a column for each row"
    assert weights.fc2[0].shape == (4, shape.intermediate, shape.hidden)
    assert weights.transposed
    for taken, parameter in (
        (weights.fc1[0], experts.gate_up_proj),
        (weights.fc2[0], experts.down_proj),
    ):
        assert taken.data_ptr() == parameter.data_ptr()
    check_weights(shape, weights, torch.device("cpu"))
    with pytest.raises(ShapeError, match="fc1"):
        check_weights(shape, dataclasses.replace(weights, transposed=False), torch.device("cpu"))


def test_autocast_gives_back_the_dtype_of_the_tokens() -> None:
    from flashmoe_megatron.adapters.transformers.experts import experts_forward

    experts, x = Experts(nn.functional.silu), torch.randn(8, 64)
    call = x, torch.tensor([[0, 3]] * 8), torch.full((8, 2), 0.5)
    want = experts_forward(experts, *call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = experts_forward(experts, *call)
    assert out.dtype == x.dtype
    assert not torch.equal(out, want), "computed in bfloat16"
    torch.testing.assert_close(out, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (Experts(torch.tanh), "Experts computes none of the known functions"),
        (Experts(lambda x: nn.functional.silu(1.01 * x)), "none of the known functions"),
        (Experts(lambda x: nn.functional.silu(x).detach()), "none of the known functions"),
        (Experts(lambda x: x @ torch.zeros(3, 3)), "cannot be run forward and backward"),
        (nn.Linear(4, 4), "Linear has no has_gate, has_bias"),
    ],
)
def test_other_experts_are_refused(experts: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(experts)


def test_experts_that_are_no_stack_are_refused_by_name() -> None:
    experts = Experts(nn.functional.silu)
    experts.gate_up_proj = nn.Parameter(torch.randn(4 * 128, 64))
    with pytest.raises(ConfigError, match=r"gate_up_proj has shape \(512, 64\), wanted a stack"):
        read(experts)


class NormedExperts(Experts):
    """Experts with a norm after each."""

    def __init__(self) -> None:
        super().__init__(nn.functional.silu)
        self.has_post_expert_norm, self.post_expert_norm = True, nn.RMSNorm(64, eps=1e-6)
        nn.init.normal_(self.post_expert_norm.weight, mean=1.0, std=0.5)

    def forward(
        self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(x)
        for token, (experts, weights) in enumerate(zip(top_k_index, top_k_weights, strict=True)):
            for expert, weight in zip(experts.tolist(), weights, strict=True):
                if expert >= 0:
                    rows = self._apply_gate(x[token] @ self.gate_up_proj[expert].t())
                    normed = self.post_expert_norm(rows @ self.down_proj[expert].t())
                    out = out.index_add(0, torch.tensor([token]), weight * normed[None])
        return out


def test_a_norm_after_each_expert_is_the_modules_own() -> None:
    from flashmoe_megatron.adapters.transformers import experts as adapter

    experts, x = NormedExperts(), torch.randn(8, 64, requires_grad=True)
    index = torch.stack([torch.arange(8) % 4, torch.arange(8) % 3 - 1], dim=1)
    index[index[:, 0] == index[:, 1], 1] = -1
    weights = torch.rand(8, 2, requires_grad=True)
    leaves = [x, weights, *experts.parameters()]
    calls = []
    experts.post_expert_norm.register_forward_hook(lambda *_: calls.append(1))
    want = experts(x, index, weights)
    wanted = torch.autograd.grad(want.square().sum(), leaves)
    calls.clear()
    got = adapter.apply_experts(experts, x, index, weights)
    grads = torch.autograd.grad(got.square().sum(), leaves)
    assert calls == [1]
    for one, other in zip([got, *grads], [want, *wanted], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_a_bound_of_tokens_holds_for_normed_experts_too() -> None:
    from flashmoe_megatron.adapters.transformers import experts as adapter

    before = adapter._settings
    try:
        adapter.configure(max_tokens=8)
        experts = NormedExperts()
        call = torch.tensor([[0, 3]] * 9), torch.full((9, 2), 0.5)
        adapter.apply_experts(experts, torch.randn(8, 64), *(each[:8] for each in call))
        with pytest.raises(ShapeError, match=r"2 rows of a token.*configure\(max_tokens=9\)"):
            adapter.apply_experts(experts, torch.randn(9, 64), *call)
    finally:
        adapter._settings = before
        adapter._known.clear()


def test_autocast_reaches_experts_in_a_seat_of_their_own() -> None:
    from flashmoe_megatron.adapters.transformers import experts as adapter

    experts = Experts(nn.functional.silu)
    x, weight = torch.randn(8, 64), torch.full((8, 2), 0.5)
    idx = torch.tensor([[0, 3]] * 8)
    exact = adapter.experts_forward(experts, x, idx, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = adapter.experts_forward(experts, x, idx, weight)
    want = adapter.experts_forward(copy.deepcopy(experts).bfloat16(), x.bfloat16(), idx, weight)
    assert found.dtype == torch.float32
    assert torch.equal(found, want.float())
    assert not torch.equal(found, exact)
    seats = adapter._known[experts]._seats
    assert {dtype for _, _, dtype, *_ in seats} == {torch.float32, torch.bfloat16}


def test_records_tell_evaluation() -> None:
    from flashmoe_megatron.adapters.transformers import experts as adapter

    experts = Experts(nn.functional.silu)
    x, weight = torch.randn(8, 64), torch.full((8, 2), 0.5)
    idx = torch.tensor([[0, 3]] * 8)
    adapter.experts_forward(experts, x, idx, weight)
    (seat,) = adapter._known[experts]._seats.values()
    seat.backend.take_records()
    for is_training in (True, False, True):
        experts.train(is_training)
        adapter.experts_forward(experts, x, idx, weight)
        (record,) = seat.backend.take_records()
        assert record.is_evaluation != is_training


def test_a_module_keeps_no_trace() -> None:
    from flashmoe_megatron.adapters.transformers import experts as adapter

    adapter.configure(max_tokens=8)
    try:
        experts = Experts(nn.functional.silu)
        names = set(vars(experts))
        x, weight = torch.randn(8, 64), torch.full((8, 2), 0.5)
        idx = torch.tensor([[0, 3]] * 8)
        out = adapter.experts_forward(experts, x, idx, weight)
        assert set(vars(experts)) == names
        assert torch.equal(adapter.experts_forward(copy.deepcopy(experts), x, idx, weight), out)
        elsewhere = adapter.experts_forward(experts, x, idx.masked_fill(idx == 3, 4), weight)
        alone = adapter.experts_forward(experts, x, idx[:, :1], weight[:, :1])
        torch.testing.assert_close(elsewhere, alone)
        with pytest.raises(ShapeError, match=r"configure\(max_tokens=16\)"):
            adapter.experts_forward(experts, x.repeat(2, 1), idx.repeat(2, 1), weight.repeat(2, 1))
    finally:
        adapter.configure()


def test_the_first_call_may_be_of_any_kind() -> None:
    """What experts compute is found in it, by gradients that are none of the call's."""
    from flashmoe_megatron.adapters.transformers.experts import experts_forward

    x, weight = torch.randn(8, 64, requires_grad=True), torch.full((8, 2), 0.5)
    idx = torch.tensor([[0, 3]] * 8)
    evaluated, trained = Experts(nn.functional.silu), Experts(nn.functional.silu)
    trained.load_state_dict(evaluated.state_dict())
    with torch.inference_mode():
        want = experts_forward(evaluated, x, idx, weight)
    out = checkpoint(experts_forward, trained, x, idx, weight, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(out, want)
    assert x.grad is not None


def test_unknown_options_are_refused() -> None:
    from flashmoe_megatron.adapters.transformers.experts import configure

    with pytest.raises(ConfigError, match="nearest is 'max_tokens'"):
        configure(max_token=3)
    with pytest.raises(ConfigError, match="placement='lookahead': wanted launch or off"):
        configure(spare_slots=1, placement="lookahead")
    with pytest.raises(ConfigError, match="row_bound='auto': wanted a number, since only"):
        configure(row_bound="auto")
    with pytest.raises(ConfigError, match="'metrics' is unknown"):
        configure(metrics="all")
