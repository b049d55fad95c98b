"""A change of experts of transformers gives one answer, before and after their first call."""

import gc
import importlib
import importlib.util
import re
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode

from flashmoe_megatron.errors import ConfigError
from tests.distributed import RankPool, refusal
from tests.frameworks.models import make_model
from tests.operators import Operators, saving

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    importlib.import_module("flashmoe_megatron.transformers")  # makes the name known
    return make_model(kind, "flashmoe", dtype)


def experts_of(kind: str = "qwen3_moe") -> Any:
    """The experts of a small model's first layer, with weights that make values around 1."""
    experts = model_of(kind).model.layers[0].mlp.experts
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.mul_(6)
    return experts


def routed(num_tokens: int = 16, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Tokens, and two of experts 0 to 3 for each."""
    g = torch.Generator().manual_seed(2)
    choices = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, 2, generator=g)
    return torch.randn(num_tokens, 64, generator=g).to(dtype), choices, weights


def own(experts: Any, *inputs: torch.Tensor, name: str = "grouped_mm") -> torch.Tensor:
    """What transformers' own implementation gives."""
    before = experts.config._experts_implementation
    experts.config._experts_implementation = name
    try:
        return experts(*inputs)
    finally:
        experts.config._experts_implementation = before


class Scaled:
    """A function that reads a number of its own."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) * self.scale


def keep(experts: Any, num_experts: int) -> None:
    for name in ("gate_up_proj", "down_proj"):
        rows = torch.arange(num_experts) % len(getattr(experts, name))
        setattr(experts, name, nn.Parameter(getattr(experts, name).detach()[rows]))
    experts.num_experts = num_experts


def widen(experts: Any) -> None:
    g = torch.Generator().manual_seed(3)
    for name, shape in (("gate_up_proj", (8, 256, 64)), ("down_proj", (8, 64, 128))):
        setattr(experts, name, nn.Parameter(torch.randn(shape, generator=g) / 8))


def gelu_gate(experts: Any, rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return nn.functional.gelu(gate) * up


def set_gate(experts: Any) -> None:
    experts._apply_gate = gelu_gate.__get__(experts)


def set_gate_that_knows_them(experts: Any) -> None:
    experts._apply_gate = lambda rows: gelu_gate(experts, rows)


def set_class(experts: Any) -> None:
    changed = type("Changed", (type(experts),), {"_apply_gate": gelu_gate})
    experts.__class__ = changed


def tanh_form(experts: Any) -> None:
    experts.act_fn.approximate = "tanh"


def relu_forward(experts: Any) -> None:
    experts.act_fn.forward = torch.relu


def hooked(experts: Any) -> None:
    experts.act_fn.register_forward_hook(lambda *_: None)


def scaled(experts: Any) -> None:
    experts.act_fn.scale = 2.0


def act(make: Callable[[], Any]) -> Callable[[Any], None]:
    def change(experts: Any) -> None:
        del experts.act_fn  # which may have been a module
        experts.act_fn = make()

    return change


def nothing(experts: Any) -> None:
    pass


Change = Callable[[Any], None]

COMPUTED: dict[str, tuple[str, Change, Change]] = {
    "activation": ("qwen3_moe", nothing, act(nn.ReLU)),
    "function": ("qwen3_moe", act(Scaled), act(lambda: torch.relu)),
    "attribute of the activation": ("qwen3_moe", act(nn.GELU), tanh_form),
    "gate": ("qwen3_moe", nothing, set_gate),
    "gate of the class": ("qwen3_moe", nothing, set_class),
    "limit": ("gpt_oss", nothing, lambda experts: setattr(experts, "limit", 0.05)),
    "alpha": ("gpt_oss", nothing, lambda experts: setattr(experts, "alpha", 1.0)),
    "pruned": ("qwen3_moe", nothing, lambda experts: keep(experts, 4)),
    "wider": ("qwen3_moe", nothing, widen),
    "grown": ("qwen3_moe", nothing, lambda experts: keep(experts, 16)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_change_is_computed_whenever_it_comes(name: str) -> None:
    kind, first, change = COMPUTED[name]
    experts, inputs = experts_of(kind), routed()
    first(experts)
    with torch.no_grad():
        before = experts(*inputs)
        torch.testing.assert_close(before, own(experts, *inputs))
        change(experts)
        after = experts(*inputs)
        torch.testing.assert_close(after, own(experts, *inputs))
    if name != "grown":  # by experts that nobody chooses
        assert name == "pruned" or not torch.allclose(after, before, rtol=1e-4, atol=1e-5)


REFUSED: dict[str, tuple[Change, Change, str]] = {
    "hook": (nothing, hooked, r"experts\.act_fn \(\w+\) has forward hooks, which would not be"),
    "own forward": (nothing, relu_forward, r"experts\.act_fn \(\w+\) has a forward of its own"),
    "activation": (nothing, act(nn.Tanh), "computes none of the known functions"),
    "attribute of a function": (act(Scaled), scaled, "computes none of the known functions"),
    "training": (
        nothing,
        act(lambda: nn.Sequential(nn.SiLU(), nn.Dropout())),
        "in training and eval",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_called", [False, True])
def test_a_change_is_refused_whenever_it_comes(name: str, is_called: bool) -> None:
    first, change, message = REFUSED[name]
    experts, inputs = experts_of().eval(), routed()
    first(experts)
    if is_called:
        experts(*inputs)
    change(experts)
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            experts(*inputs)
    act(nn.SiLU)(experts)
    torch.testing.assert_close(experts(*inputs), own(experts, *inputs))


def test_hooks_of_experts_and_their_own_forward_are_called() -> None:
    experts, inputs, calls = experts_of(), routed(), []
    experts(*inputs)
    experts.register_forward_hook(lambda *_: calls.append("hook"))
    experts.forward = lambda x, *_: calls.append("forward") or x
    assert torch.equal(experts(*inputs), inputs[0])
    assert calls == ["forward", "hook"]


def test_experts_are_read_once_where_nothing_says_what_they_compute() -> None:
    from flashmoe_megatron.adapters.transformers import experts as adapter

    experts, inputs = experts_of(), routed()
    with mock.patch.object(adapter, "read_shape", wraps=adapter.read_shape) as read:
        experts(*inputs)
        experts.eval()
        experts.ds_grads_remaining = experts.act_fn.ds_grads_remaining = 1
        experts.down_proj = nn.Parameter(experts.down_proj.detach() * 2)
        experts(*inputs)
        prune.random_unstructured(experts, "down_proj", 0.5)
        experts(*inputs)
        for _ in range(2):  # as adapters of parameters do in every call
            parametrize.register_parametrization(experts, "gate_up_proj", nn.Identity())
            out = experts(*inputs)
            torch.testing.assert_close(out, own(experts, *inputs))
            parametrize.remove_parametrizations(experts, "gate_up_proj")
        assert read.call_count == 1
        experts.note = "which says nothing, but might"
        experts(*inputs)
        experts(*inputs)
        assert read.call_count == 2


def test_experts_are_given_up_with_their_module() -> None:
    experts = experts_of()
    set_gate_that_knows_them(experts)
    experts(*routed())
    gone = weakref.ref(experts)
    del experts
    gc.collect()
    assert gone() is None


class Functions(TorchFunctionMode):
    """Takes note of the dtypes of what functions are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {value.dtype for value in args if isinstance(value, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def test_nobody_sees_the_rows_of_the_proof() -> None:
    experts, inputs, dtypes = experts_of(), routed(), set()

    def note(value: torch.Tensor) -> torch.Tensor:
        dtypes.add(value.dtype)
        return value

    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: dtypes.update(value.dtype for value in args)
    )
    with Functions() as functions, torch.autograd.graph.saved_tensors_hooks(note, note):
        with Operators() as first:
            experts(*inputs)
        with Operators() as second:
            experts(*inputs)
        more = routed(500)
        with Operators() as third:  # for which another backend is made
            experts(*more)
    hook.remove()
    assert first.seen == second.seen == third.seen
    assert torch.float32 in functions.seen
    assert torch.float64 not in dtypes | functions.seen
    assert experts.act_fn(torch.zeros(1)) == 0  # and hooks are called again


def test_selective_checkpointing_trains_from_the_first_step_on() -> None:
    losses = {}
    ids = routed()[1] % 96
    for name in ("grouped_mm", "flashmoe"):
        model = model_of("qwen3_moe")
        model.config._experts_implementation = name
        for layer in model.model.layers:
            run = saving(torch.ops.aten.mul.Tensor)
            layer.mlp.forward = lambda x, run=run, mlp=layer.mlp: run(type(mlp).forward, mlp, x)
        steps = []
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            model.zero_grad()
            loss.backward()
            steps += [loss.item(), *(p.grad.norm().item() for p in model.parameters())]
        losses[name] = steps
    assert losses["flashmoe"] == pytest.approx(losses["grouped_mm"], rel=1e-4)


def test_tokens_of_another_dtype_are_computed_in_the_experts() -> None:
    """As under norms in float32, which stay so where the rest is loaded in bfloat16."""
    experts = model_of("qwen3_moe", torch.bfloat16).model.layers[0].mlp.experts
    x, choices, weights = routed()
    found = {}
    for name in ("grouped_mm", "flashmoe"):
        leaf = x.clone().requires_grad_()
        out = own(experts, leaf, choices, weights, name=name)
        assert out.dtype == torch.float32
        grads = torch.autograd.grad(out.square().sum(), [leaf, *experts.parameters()])
        assert [grad.dtype for grad in grads] == [torch.float32, torch.bfloat16, torch.bfloat16]
        found[name] = [out, *grads]
    for got, want in zip(found["flashmoe"], found["grouped_mm"], strict=True):
        assert (got - want).float().norm() < 2e-2 * want.float().norm()


def test_transposed_parameters_are_computed() -> None:
    experts, inputs = experts_of(), routed()
    want = own(experts, *inputs)
    grads = torch.autograd.grad(want.square().sum(), list(experts.parameters()))
    for name in ("gate_up_proj", "down_proj"):
        stack = getattr(experts, name).detach().mT.contiguous().mT
        assert not stack.is_contiguous()
        setattr(experts, name, nn.Parameter(stack))
    out = experts(*inputs)
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out.square().sum(), list(experts.parameters()))
    torch.testing.assert_close(got, grads)


def test_a_share_of_the_experts_that_no_backend_computes_is_named() -> None:
    experts = experts_of()
    assert experts.intermediate_dim == 64
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach()[:, :64])
    experts.down_proj = nn.Parameter(experts.down_proj.detach()[..., :32])
    wanted = r"intermediate=32: .*multiple of 64.*this rank's share of intermediate_dim=64"
    with pytest.raises(ConfigError, match=wanted):
        experts(*routed())


def apply(group: dist.ProcessGroup, experts: Any) -> torch.Tensor:
    from flashmoe_megatron.adapters.transformers.experts import apply_experts

    with torch.no_grad():
        return apply_experts(experts, *routed(), group)


RANKS: dict[str, tuple[Change, str]] = {
    "other on one": (act(nn.ReLU), r"activation: silu on rank 0, relu on rank 1|compute something"),
    "unknown": (act(nn.Tanh), "rank 1: .*computes none of the known functions"),
    "hook": (hooked, r"rank 1: experts\.act_fn \(\w+\) has forward hooks"),
    "pruned": (lambda experts: keep(experts, 2), "num_experts: 8 on rank 0, 4 on|num_experts of"),
}


def changed_on_rank_1(group: dist.ProcessGroup, name: str, is_called: bool) -> tuple[str, bool]:
    """What a change on one rank makes of a call, and whether all go on once all are alike."""
    from flashmoe_megatron.adapters.transformers.experts import configure

    experts = experts_of()
    keep(experts, 4)  # both ranks have eight together
    if is_called:
        apply(group, experts)
    if dist.get_rank() == 1:
        RANKS[name][0](experts)
    told = refusal(group, lambda _: apply(group, experts))
    experts = experts_of()
    keep(experts, 4)
    apply(group, experts)
    act(nn.ReLU)(experts)
    configure()  # on every rank, after a change on every rank
    out, want = apply(group, experts), own(experts, *routed())
    return told, torch.allclose(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RANKS)
def test_ranks_that_differ_are_told_of_it_on_all(name: str, ranks: RankPool) -> None:
    for is_called in (False, True):
        for told, goes_on in ranks.run(changed_on_rank_1, name, is_called, num_ranks=2):
            assert re.search(RANKS[name][1], told), told
            assert told.startswith("ConfigError")
            assert not is_called or "rank 1" in told
            assert goes_on
