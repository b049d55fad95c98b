"""The hooks of Megatron's DDP, called once for all experts of a layer."""

import copy
import gc
import pickle
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_megatron.adapters.megatron import ddp_hooks
from flashmoe_megatron.adapters.megatron.ddp_hooks import ExpertHooks
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.backend import ExpertWeights
from flashmoe_megatron.reference.backend import ReferenceBackend
from tests.unit import cases

CONFIG = cases.make_config(num_ranks=1, num_experts=12, topk=2)
TOKENS = 8


class Ddp:
    """As much of Megatron's DDP as hooks parameters: two buckets, and what its hooks do."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        half = len(params) // 2
        groups = [SimpleNamespace(is_last_microbatch=True) for _ in range(2)]
        self.param_to_bucket_group = {
            param: groups[index >= half] for index, param in enumerate(params)
        }
        self.ready: list[torch.nn.Parameter] = []
        self.waited: list[Any] = []
        for param in params:
            param.main_grad = torch.zeros(param.shape)  # type: ignore[attr-defined]
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            node = param.expand_as(param).grad_fn.next_functions[0][0]
            node.register_hook(self._make_backward_post_hook(param))
            setattr(self, f"node{id(param)}", node)

    def _make_backward_post_hook(self, param: Any) -> Any:
        def hook(*_: Any) -> None:
            assert param.grad is not None
            if not param.grad_added_to_main_grad:
                param.main_grad.add_(param.grad)
            param.grad = None
            if self.param_to_bucket_group[param].is_last_microbatch:
                self.ready.append(param)

        return hook

    def _make_forward_pre_hook(self) -> Any:
        def hook(module: Any, *_: Any) -> None:
            for param in module.parameters(recurse=False):
                self.waited.append(self.param_to_bucket_group[param])

        return hook


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_make_backward_post_hook", "_make_forward_pre_hook"):
        monkeypatch.setattr(Ddp, name, getattr(Ddp, name))  # as it was, behind the test
    module = ModuleType("distributed_data_parallel")
    module.DistributedDataParallel = Ddp  # type: ignore[attr-defined]
    ddp_hooks.patch_ddp(module)


def make_params() -> list[torch.nn.Parameter]:
    generator = cases.generator(1)
    shapes = [(CONFIG.fc1_rows, CONFIG.hidden), (CONFIG.hidden, CONFIG.intermediate)]
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator) / 8)
        for shape in shapes
        for _ in range(CONFIG.num_experts)
    ]


def step(params: list[torch.nn.Parameter], hooks: ExpertHooks | None) -> list[torch.Tensor]:
    """One micro-batch; the gradients of tokens and probabilities."""
    generator = cases.generator(2)
    x = torch.randn(TOKENS, CONFIG.hidden, generator=generator).requires_grad_()
    probs = torch.rand(TOKENS, CONFIG.num_experts, generator=generator).requires_grad_()
    weights = ExpertWeights(
        tuple(params[: CONFIG.num_experts]), tuple(params[CONFIG.num_experts :])
    )
    moe_apply(
        ReferenceBackend(CONFIG),
        x,
        probs,
        torch.arange(CONFIG.num_experts).expand(TOKENS, -1) < 2,
        weights,
        accumulate_into_main_grad=True,
        shared_hooks=hooks,
    ).sum().backward()
    assert x.grad is not None
    assert probs.grad is not None
    return [x.grad, probs.grad]


def test_gradients_and_calls_are_those_of_a_hook_for_each():
    found = []
    for is_shared in (False, True):
        params = make_params()
        ddp = Ddp(params)
        hooks = ExpertHooks.of(tuple(params)) if is_shared else None
        assert (hooks is not None) == is_shared
        for is_last in (False, False, True):
            for group in ddp.param_to_bucket_group.values():
                group.is_last_microbatch = is_last
            grads = step(params, hooks)
            assert len(ddp.ready) == len(params) * is_last
            assert all(param.grad is None for param in params)
        assert set(map(id, ddp.ready)) == set(map(id, params))
        found.append([*grads, *(param.main_grad for param in params)])  # type: ignore[attr-defined]
    assert all(map(torch.equal, *found))


def test_gradients_of_others_leave_main_grad():
    params = make_params()
    ddp = Ddp(params)
    hooks = ExpertHooks.of(tuple(params))
    x = torch.ones(TOKENS, CONFIG.hidden, requires_grad=True)
    probs = torch.ones(TOKENS, CONFIG.num_experts)
    weights = ExpertWeights(
        tuple(params[: CONFIG.num_experts]), tuple(params[CONFIG.num_experts :])
    )
    out = moe_apply(
        ReferenceBackend(CONFIG),
        x,
        probs,
        torch.arange(CONFIG.num_experts).expand(TOKENS, -1) < 2,
        weights,
        accumulate_into_main_grad=True,
        shared_hooks=hooks,
    )
    torch.autograd.grad(out.sum(), x)
    assert not ddp.ready
    assert not any(param.main_grad.any() for param in params)  # type: ignore[attr-defined]


def freeze(param: Any) -> None:
    param.requires_grad = False


@pytest.mark.parametrize(
    "change",
    [
        freeze,
        lambda param: param.register_hook(lambda grad: grad),
        lambda param: param.register_post_accumulate_grad_hook(lambda param: None),
    ],
    ids=["frozen", "hooked", "hooked behind"],
)
def test_what_others_have_to_see_is_not_served(change: Any):
    params = tuple(make_params())
    ddp = Ddp(list(params))
    hooks = ExpertHooks.of(params)
    assert hooks is not None
    assert not ddp.ready
    assert hooks.serve(params)
    change(params[3])
    assert not hooks.serve(params)
    assert not hooks.serve(params[:-1])


@pytest.mark.parametrize("name", ["zero_out_wgrad", "skip_backward_post_hook"])
def test_hooks_that_wait_for_more_are_left_alone(name: str):
    params = tuple(make_params())
    assert ExpertHooks.of(params) is None  # nobody has hooked them
    ddp = Ddp(list(params))
    assert ExpertHooks.of(params) is not None
    setattr(params[-1], name, True)
    assert ExpertHooks.of(params) is None
    assert not ddp.ready


def test_a_module_waits_once_for_each_bucket():
    params = make_params()
    ddp = Ddp(params)
    module = torch.nn.ParameterList(params)
    hook = ddp._make_forward_pre_hook()
    groups = list({id(group): group for group in ddp.param_to_bucket_group.values()}.values())
    for _ in range(2):
        hook(module)
        assert ddp.waited == groups
        ddp.waited.clear()
    few = torch.nn.ParameterList(params[:3])
    hook(few)
    assert ddp.waited == [groups[0]] * 3
    ddp.waited.clear()
    module._parameters.popitem()  # its parameters are looked at again
    hook(module)
    assert ddp.waited == groups


def test_ddp_is_freed_with_its_model():
    params = make_params()
    ddp = weakref.ref(Ddp(params))
    gc.collect()
    assert ddp() is None
    assert ExpertHooks.of(tuple(params)) is None
    held = Ddp(params)
    hooks = ExpertHooks.of(tuple(params))
    step(params, hooks)
    assert held.ready
    ddp, model = weakref.ref(held), weakref.ref(params[0])
    del held, hooks, params
    gc.collect()
    assert ddp() is None
    assert model() is None


def test_a_parameter_is_saved_without_its_hook():
    params = make_params()
    Ddp(params)
    assert copy.deepcopy(params[0]).equal(params[0])
    assert pickle.loads(pickle.dumps(getattr(params[0], ddp_hooks._HOOK))) is None
