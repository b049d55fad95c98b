"""The hooks of Megatron's DDP, called once for all experts of a layer."""

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_megatron.adapters.megatron.buckets import hooks as ddp_hooks
from flashmoe_megatron.adapters.megatron.buckets.hooks import ExpertHooks
from flashmoe_megatron.autograd import accumulator_of, moe_apply
from flashmoe_megatron.errors import FlashMoEError
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.weights import ExpertWeights
from tests.unit import cases

CONFIG = cases.make_config(num_ranks=1, num_experts=12, topk=2)
TOKENS = 8


class Ddp:
    """As much of Megatron's DDP as hooks parameters: two buckets, and what its hooks do."""

    def __init__(self, params: Sequence[torch.nn.Parameter], *, is_last: bool = True) -> None:
        half = len(params) // 2
        config = self.ddp_config = SimpleNamespace(
            overlap_grad_reduce=True, num_distributed_optimizer_instances=1
        )
        groups = [
            SimpleNamespace(is_last_microbatch=is_last, is_first_batch=True, ddp_config=config)
            for _ in range(2)
        ]
        self.param_to_bucket_group = {
            param: groups[index >= half] for index, param in enumerate(params)
        }
        self.ready: list[torch.nn.Parameter] = []
        self.waited: list[Any] = []
        for param in params:
            param.main_grad = torch.zeros(param.shape)  # type: ignore[attr-defined]
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            if not param.requires_grad:
                continue
            node = param.expand_as(param).grad_fn.next_functions[0][0]
            node.register_hook(self._make_backward_post_hook(param))
            setattr(self, f"node{id(param)}", node)

    def set_last(self, is_last: bool) -> None:
        for group in self.param_to_bucket_group.values():
            group.is_last_microbatch = is_last

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
        make = getattr(ddp_hooks, name.removeprefix("_"))
        monkeypatch.setattr(Ddp, name, make(getattr(Ddp, name)))


def make_params() -> list[torch.nn.Parameter]:
    generator = cases.generator(1)
    shapes = [(CONFIG.fc1_rows, CONFIG.hidden), (CONFIG.hidden, CONFIG.intermediate)]
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator) / 8)
        for shape in shapes
        for _ in range(CONFIG.num_experts)
    ]


def ids(params: Sequence[torch.Tensor]) -> list[int]:
    return list(map(id, params))


def forward(
    params: list[torch.nn.Parameter],
    hooks: ExpertHooks | None,
    x: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """One call of a layer on the same tokens."""
    generator = cases.generator(2)
    tokens = torch.randn(TOKENS, CONFIG.hidden, generator=generator)
    weights = torch.rand(TOKENS, CONFIG.num_experts, generator=generator)
    return moe_apply(
        ReferenceBackend(CONFIG),
        tokens if x is None else x,
        weights if probs is None else probs,
        torch.arange(CONFIG.num_experts).expand(TOKENS, -1) < 2,
        ExpertWeights(tuple(params[: CONFIG.num_experts]), tuple(params[CONFIG.num_experts :])),
        main_grads=hooks,
    )


def step(params: list[torch.nn.Parameter], hooks: ExpertHooks | None) -> list[torch.Tensor]:
    """One micro-batch; the gradients of tokens and probabilities."""
    generator = cases.generator(2)
    x = torch.randn(TOKENS, CONFIG.hidden, generator=generator).requires_grad_()
    probs = torch.rand(TOKENS, CONFIG.num_experts, generator=generator).requires_grad_()
    forward(params, hooks, x, probs).sum().backward()
    assert x.grad is not None
    assert probs.grad is not None
    return [x.grad, probs.grad]


def test_gradients_and_calls_are_those_of_a_hook_for_each():
    found = []
    for is_shared in (False, True):
        params = make_params()
        ddp = Ddp(params)
        hooks = ExpertHooks.of(tuple(params), fuses=False) if is_shared else None
        assert (hooks is not None) == is_shared
        for is_last in (False, False, True):
            ddp.set_last(is_last)
            grads = step(params, hooks)
            assert len(ddp.ready) == len(params) * is_last
            assert all(param.grad is None for param in params)
        assert set(map(id, ddp.ready)) == set(map(id, params))
        found.append([*grads, *(param.main_grad for param in params)])  # type: ignore[attr-defined]
    assert all(map(torch.equal, *found))


def test_a_bucket_in_its_last_micro_batch_is_due_whatever_the_others_are_in():
    """Layers have parameters in several buckets, which may begin to be reduced one by one."""
    params = make_params()
    ddp = Ddp(params)
    hooks = ExpertHooks.of(tuple(params), fuses=False)
    assert hooks is not None
    groups = list({id(group): group for group in ddp.param_to_bucket_group.values()}.values())
    assert len(groups) > 1
    for last in (None, *groups):
        for group in groups:
            group.is_last_microbatch = group is last
        step(params, hooks)
        assert hooks.is_due() == (last is not None)


def test_gradients_of_others_leave_main_grad():
    params = make_params()
    ddp = Ddp(params)
    x = torch.ones(TOKENS, CONFIG.hidden, requires_grad=True)
    out = forward(params, ExpertHooks.of(tuple(params), fuses=False), x)
    torch.autograd.grad(out.sum(), x)
    assert not ddp.ready
    assert not any(param.main_grad.any() for param in params)  # type: ignore[attr-defined]


def hook_accumulator(param: torch.Tensor, seen: list[Any]) -> None:
    accumulator_of(param).register_hook(lambda _, grads: seen.append(grads[0]))


def hook_tensor(param: torch.Tensor, seen: list[Any]) -> None:
    param.register_hook(seen.append)


def hook_behind(param: torch.Tensor, seen: list[Any]) -> None:
    param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))


OBSERVERS = (hook_accumulator, hook_tensor, hook_behind)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("observe", OBSERVERS)
def test_what_others_have_to_see_they_see(observe: Any, is_last: bool):
    """Their hooks may have been put there after a first call, and see what a plain layer gives."""
    params = make_params()
    ddp = Ddp(params, is_last=is_last)
    hooks = ExpertHooks.of(tuple(params), fuses=False)
    step(params, hooks)
    want = [param.main_grad.clone() for param in params]  # type: ignore[attr-defined]
    ddp.ready.clear()
    seen: list[torch.Tensor] = []
    observe(params[3], seen)
    assert hooks is not None
    assert hooks.serve(tuple(params), fuses=False)
    step(params, hooks)
    assert len(seen) == 1
    assert torch.equal(seen[0], want[3])
    for param, once in zip(params, want, strict=True):
        assert torch.equal(param.main_grad, 2 * once)  # type: ignore[attr-defined]
        assert param.grad is None
    assert ids(ddp.ready) == ids(params * is_last)


@pytest.mark.parametrize("observe", OBSERVERS)
def test_with_fusion_others_see_dummies_as_with_megatrons_layers(observe: Any):
    params = make_params()
    ddp = Ddp(params)
    hooks = ExpertHooks.of(tuple(params), fuses=True)
    seen: list[torch.Tensor] = []
    observe(params[3], seen)
    step(params, hooks)
    assert len(seen) == 1
    assert not seen[0].any()
    assert all(param.main_grad.any() for param in params[:2])  # type: ignore[attr-defined]
    assert params[3].main_grad.shape == params[3].shape  # type: ignore[attr-defined]
    assert ids(ddp.ready) == ids(params)


def test_a_frozen_expert_has_no_gradient_and_ddp_hears_of_the_others():
    params = make_params()
    params[3].requires_grad = False
    ddp = Ddp(params)
    hooks = ExpertHooks.of(tuple(params), fuses=False)
    assert hooks is not None
    step(params, hooks)
    assert ids(ddp.ready) == ids([param for param in params if param is not params[3]])
    assert not params[3].main_grad.any()  # type: ignore[attr-defined]
    params[5].requires_grad = False
    assert not hooks.serve(tuple(params), fuses=False)
    assert not hooks.serve(tuple(params[:-1]), fuses=False)


def test_ddp_hears_of_experts_in_their_order_after_the_last_call():
    params = make_params()
    ddp = Ddp(params)
    hooks = ExpertHooks.of(tuple(params), fuses=False)
    told_with: list[int] = []
    calls = [forward(params, hooks) for _ in range(3)]
    for out in calls:
        out.register_hook(lambda _: told_with.append(len(ddp.ready)))
    torch.stack([out.sum() for out in calls]).sum().backward()
    assert told_with == [0, 0, 0]
    assert ids(ddp.ready) == ids(params)
    once = make_params()
    Ddp(once)
    step(once, ExpertHooks.of(tuple(once), fuses=False))
    for three, one in zip(params, once, strict=True):
        torch.testing.assert_close(three.main_grad, 3 * one.main_grad)  # type: ignore[attr-defined]


def test_a_pass_that_failed_leaves_no_count_behind():
    params = make_params()
    ddp = Ddp(params)
    hooks = ExpertHooks.of(tuple(params), fuses=False)
    x = torch.ones(TOKENS, CONFIG.hidden, requires_grad=True)
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(params, hooks, x).sum().backward()
    ddp.ready.clear()
    step(params, hooks)
    assert ids(ddp.ready) == ids(params)


def test_only_those_that_are_asked_for_get_a_gradient():
    params = make_params()
    ddp = Ddp(params)
    hooks = ExpertHooks.of(tuple(params), fuses=False)
    step(params, hooks)
    want = [param.main_grad.clone() for param in params]  # type: ignore[attr-defined]
    ddp.ready.clear()
    forward(params, hooks).sum().backward(inputs=params[2:4])
    assert ids(ddp.ready) == ids(params[2:4])
    for index, (param, once) in enumerate(zip(params, want, strict=True)):
        times = 2 if index in (2, 3) else 1
        assert torch.equal(param.main_grad, times * once)  # type: ignore[attr-defined]
    (grad,) = torch.autograd.grad(forward(params, hooks).sum(), params[1:2])
    assert torch.equal(grad, want[1])


@pytest.mark.parametrize("fuses", [False, True])
def test_what_autograd_brings_besides_is_added_unless_megatron_drops_it(fuses: bool):
    params = make_params()
    ddp = Ddp(params)
    hooks = ExpertHooks.of(tuple(params), fuses=fuses)
    step(params, hooks)
    want = [param.main_grad.clone() for param in params]  # type: ignore[attr-defined]
    for is_last in (False, True):
        ddp.set_last(is_last)
        ddp.ready.clear()
        (forward(params, hooks).sum() + params[3].sum()).backward()
        assert ids(ddp.ready) == ids(params * is_last)
    for index, (param, once) in enumerate(zip(params, want, strict=True)):
        brought = 2.0 if index == 3 and not fuses else 0.0
        torch.testing.assert_close(param.main_grad, 3 * once + brought)  # type: ignore[attr-defined]
        assert param.grad_added_to_main_grad == fuses  # type: ignore[attr-defined]
        assert param.grad is None


@pytest.mark.parametrize("is_seen", [False, True])
def test_fusion_drops_nothing_of_a_bias(is_seen: bool):
    """Megatron's fusion is of weights: autograd brings the whole gradient of a bias."""
    params = make_params()
    bias = params[-1]
    ddp = Ddp(params)
    hooks = ExpertHooks.of(tuple(params), fuses=True, num_biases=1)
    step(params, hooks)
    want = [param.main_grad.clone() for param in params]  # type: ignore[attr-defined]
    looked: list[torch.Tensor] = []
    if is_seen:
        bias.register_hook(looked.append)
    for is_last in (False, True):
        ddp.set_last(is_last)
        (forward(params, hooks).sum() + params[0].sum() + bias.sum()).backward()
    for param, once in zip(params, want, strict=True):
        brought = 2.0 if param is bias else 0.0
        torch.testing.assert_close(param.main_grad, 3 * once + brought)  # type: ignore[attr-defined]
        assert param.grad_added_to_main_grad == (param is not bias)  # type: ignore[attr-defined]
    assert len(looked) == 2 * is_seen
    for grad in looked:
        torch.testing.assert_close(grad, (want[-1] + 1).to(grad.dtype))


def test_layers_with_the_same_experts_share_what_ddp_hears():
    params = make_params()
    ddp = Ddp(params)
    first = ExpertHooks.of(tuple(params), fuses=False)
    assert ExpertHooks.of(tuple(params), fuses=False) is first
    assert ExpertHooks.of(tuple(params[:-1]), fuses=False) is None  # DDP sees these itself
    (forward(params, first).sum() + forward(params, None).sum()).backward()
    assert ids(ddp.ready) == ids(params)
    both = [param.main_grad.clone() for param in params]  # type: ignore[attr-defined]
    step(params, None)
    for param, twice in zip(params, both, strict=True):
        torch.testing.assert_close(param.main_grad, 1.5 * twice)  # type: ignore[attr-defined]


def test_weights_that_were_changed_in_place_are_refused():
    params = make_params()
    Ddp(params)
    out = forward(params, ExpertHooks.of(tuple(params), fuses=False))
    with torch.no_grad():
        params[3].mul_(2)
    with pytest.raises(FlashMoEError, match="changed in place 1 times between a forward and its"):
        out.sum().backward()


def test_hooks_that_add_zeros_are_left_alone():
    params = tuple(make_params())
    assert ExpertHooks.of(params, fuses=False) is None  # nobody has hooked them
    ddp = Ddp(params)
    assert ExpertHooks.of(params, fuses=False) is not None
    params[-1].zero_out_wgrad = True  # type: ignore[attr-defined]
    assert ExpertHooks.of(params, fuses=False) is None
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
    assert ExpertHooks.of(tuple(params), fuses=False) is None
    held = Ddp(params)
    hooks = ExpertHooks.of(tuple(params), fuses=False)
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
