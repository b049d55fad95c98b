"""The layer among the other features of PyTorch: what works gives the same, the rest is refused."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from flashmoe_megatron.errors import ConfigError, FlashMoEError
from flashmoe_megatron.expert_group import local_part
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.separate.reference import ReferenceBackend
from tests.distributed import RankPool, refusal
from tests.unit import cases

HIDDEN = 64


def make_layer(group: dist.ProcessGroup | None = None, **options: Any) -> FlashMoELayer:
    num_ranks = 1 if group is None else dist.get_world_size(group)
    torch.manual_seed(3)
    options = {"device": "cpu", "dtype": torch.float32, "router": True, **options}
    return FlashMoELayer(cases.make_config(num_ranks=num_ranks), group=group, **options)


def tokens(count: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=cases.generator(seed))


class Model(nn.Module):
    def __init__(self, layer: FlashMoELayer) -> None:
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(HIDDEN, HIDDEN), layer, nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.moe(self.first(x)))


def grads_of(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """What a step gives: output, gradient of the tokens, and those of the parameters."""
    model.zero_grad()
    x = tokens().requires_grad_()
    out = run(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(local_part(one.grad).clone() for one in model.parameters())]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, got, want))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("options", [{}, {"fuse_router": True}], ids=str)
def test_compiled_models_break_once_and_not_for_a_batch_size(options: dict[str, Any]):
    model = Model(make_layer(**options))
    explained = torch._dynamo.explain(model)(tokens())
    assert (explained.graph_break_count, explained.graph_count) == (1, 2)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=True)
    for count in (9, 16, 7, 33):
        assert torch.equal(compiled(tokens(count)), model(tokens(count)))
    assert counter.frame_count == 2
    assert_same(grads_of(model, compiled), grads_of(model, model))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_layer_is_the_layer():
    layer = make_layer()
    compiled = torch.compile(layer, backend="eager")
    assert_same(grads_of(layer, compiled), grads_of(layer, layer))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("fuse_router", [False, True])
def test_activation_checkpointing(use_reentrant: bool, fuse_router: bool):
    layer = make_layer(fuse_router=fuse_router)
    run = functools.partial(checkpoint, layer, use_reentrant=use_reentrant)
    assert_same(grads_of(layer, run), grads_of(layer, layer))


def checkpoint_on_ranks(group: dist.ProcessGroup) -> None:
    model = make_layer(group)
    run = functools.partial(checkpoint, model, use_reentrant=False)
    assert_same(grads_of(model, run), grads_of(model, model))


def test_activation_checkpointing_on_ranks(ranks: RankPool):
    ranks.run(checkpoint_on_ranks, num_ranks=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"fuse_router": True}, {"bias": True}], ids=str)
def test_autocast_computes_in_its_dtype(dtype: torch.dtype, options: dict[str, Any]):
    layer = make_layer(dtype=dtype, **options)
    plain = copy.deepcopy(layer).bfloat16()
    # The router in front of the launch sees the tokens as they are.
    choice = () if layer.fuse_router else layer.route(tokens())
    x = tokens().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, plain(tokens().bfloat16(), *choice))
    out.sum().backward()
    assert x.grad is not None
    assert all(one.grad is not None and one.grad.dtype == dtype for one in layer.parameters())


def differ(group: dist.ProcessGroup, how: str) -> str:
    """The error of a rank whose layer, or whose call, differs from the other rank's."""
    is_first = dist.get_rank(group) == 0
    dtype = torch.float16 if is_first else torch.bfloat16  # as many bytes of another meaning

    def call() -> None:
        options = {"dtype": {"dtype": dtype}, "bias": {"bias": is_first}}.get(how, {})
        layer = make_layer(group, backend="reference", **options)
        x = tokens()
        if how == "to":
            layer, x = layer.to(dtype), x.to(dtype)
        with torch.autocast("cpu", dtype=dtype, enabled=how == "autocast"):
            layer(x)

    return refusal(group, lambda _: call())


@pytest.mark.parametrize("how", ["dtype", "bias", "to", "autocast"])
def test_ranks_that_compute_in_other_dtypes_or_forms_are_refused(how: str, ranks: RankPool):
    dtypes = "dtype: torch.float16 on rank 0, torch.bfloat16 on rank 1"
    words = "bias: True on rank 0, False on rank 1" if how == "bias" else dtypes
    for said in ranks.run(differ, how, num_ranks=2):
        assert said.startswith(f"ConfigError: the ranks disagree on {words}")


def test_autocast_with_a_choice_that_is_given():
    layer = make_layer(router=False)
    ids = torch.tensor([[0, 3]]).repeat(9, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(tokens(), ids, torch.rand(9, 2).bfloat16())
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("make", ["argument", "context", "default"])
def test_a_layer_that_is_made_on_meta(make: str):
    if make == "argument":
        layer = make_layer(device="meta")
    elif make == "context":
        with torch.device("meta"):
            layer = make_layer(device=None)
    else:
        torch.set_default_device("meta")
        try:
            layer = make_layer(device=None)
        finally:
            torch.set_default_device(None)
    assert all(one.is_meta for one in layer.parameters())
    assert "backend=None" in repr(layer)
    with pytest.raises(ConfigError, match=r"on meta and has no values: wanted layer.to_empty"):
        layer(tokens())
    layer.to_empty(device="cpu")
    layer.load_state_dict(make_layer().state_dict())
    assert torch.equal(layer(tokens()), make_layer()(tokens()))
    assert isinstance(layer.backend, ReferenceBackend)


def test_on_meta_a_choice_is_checked_at_once():
    for options, message in (({"backend": "best"}, "wanted one of auto"), ({"keeps": 1}, "keeps")):
        with pytest.raises(ConfigError, match=message):
            make_layer(device="meta", **options)


def test_a_backend_follows_the_layer_and_a_given_one_does_not():
    layer = make_layer()
    backend = layer.backend
    assert layer.double().backend is backend
    assert not layer.to("meta")._backends
    twin = make_layer(backend=backend)
    assert twin.to("meta").backend is backend


def meta_on_ranks(group: dist.ProcessGroup) -> None:
    layer = make_layer(group, device="meta")
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert isinstance(layer.fc1, DTensor)
    torch.manual_seed(7)
    layer.reset_parameters()
    other = make_layer(group)
    torch.manual_seed(7)
    other.reset_parameters()
    assert_same(grads_of(layer, layer), grads_of(other, other))


def test_a_layer_of_ranks_that_is_made_on_meta(ranks: RankPool):
    ranks.run(meta_on_ranks, num_ranks=2)


def test_a_seed_before_the_constructor_draws_what_it_draws_on_meta():
    layer = make_layer(device="meta", bias=True).to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    after_reset = torch.rand(1)
    made = make_layer(bias=True)  # which sets that seed, too
    assert_same([*layer.parameters(), after_reset], [*made.parameters(), torch.rand(1)])


def meta_sharded(group: dist.ProcessGroup, num_ranks: int, num_experts: int, dim: int) -> None:
    """FSDP2's way to make a large model, and what one process draws from the same seed."""
    shape = (dist.get_world_size(group) // num_ranks, num_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "ep"))
    options: dict[str, Any] = {"dtype": torch.float32, "router": True, "bias": True}
    config = cases.make_config(num_ranks=num_ranks, num_experts=num_experts)
    with torch.device("meta"):
        layer = FlashMoELayer(config, group=mesh["ep"], **options)
    fully_shard(layer, mesh=mesh["fsdp"], shard_placement_fn=lambda _: Shard(dim))
    layer.to_empty(device="cpu")
    alone = FlashMoELayer(cases.make_config(num_experts=num_experts), device="cpu", **options)
    for one in (layer, alone):
        torch.manual_seed(3)
        one.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.full_tensor(), alone.get_parameter(name)), name
    assert_close("out", layer(tokens()).detach(), alone(tokens()).detach(), rel_l2=1e-5)


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "dim"), [(1, 6, 0), (2, 8, 0), (2, 6, 0), (2, 8, 1)]
)
def test_a_layer_that_is_made_on_meta_and_sharded(
    ranks: RankPool, num_ranks: int, num_experts: int, dim: int
):
    ranks.run(meta_sharded, num_ranks, num_experts, dim)


@pytest.mark.parametrize("source", [1, 2])
def test_a_layer_on_meta_takes_a_checkpoint_as_its_parameters(ranks: RankPool, source: int):
    ranks.run(assign_on_ranks, source, num_ranks=2)


def assign_on_ranks(group: dist.ProcessGroup, source: int) -> None:
    """The checkpoint has plain tensors of all experts, or the DTensors of two ranks."""
    given = make_layer(group if source > 1 else None).state_dict()
    layer = make_layer(group, device="meta")
    layer.load_state_dict(given, assign=True)
    for _, parameter in layer.expert_parameters():
        assert (parameter.allreduce, parameter.group_name) == (False, "ep_size_2")
    want = make_layer(group)
    assert_same(grads_of(layer, layer), grads_of(want, want))
    assert "backend=ReferenceBackend" in repr(layer)
    layer.load_state_dict(make_layer(group).to("meta").state_dict(), assign=True)
    with pytest.raises(ConfigError, match="on meta and has no values"):
        layer(tokens())


def test_a_layer_runs_within_a_device_context():
    layer = make_layer()
    want = layer(tokens())
    x = tokens()
    with torch.device("meta"):
        assert torch.equal(layer(x), want)


def test_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        layer = make_layer(dtype=None)
        assert {one.dtype for one in layer.parameters()} == {torch.float64}
        layer(tokens().double()).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert make_layer(dtype=None).fc1.dtype == torch.bfloat16


def copies_on_ranks(group: dist.ProcessGroup | None) -> None:
    layer = make_layer(group)
    want = grads_of(layer, layer)
    twin = copy.deepcopy(layer)
    assert twin.backend is layer.backend
    assert_same(grads_of(twin, twin), want)
    parameters = {name: one.detach() * 2 for name, one in layer.named_parameters()}
    with torch.no_grad():
        for one in twin.parameters():
            local_part(one).mul_(2)
    out = torch.func.functional_call(layer, parameters, (tokens(),))
    assert torch.equal(out, twin(tokens()))
    assert_same(grads_of(layer, layer), want)


def test_deep_copies_and_functional_call(ranks: RankPool):
    copies_on_ranks(None)
    ranks.run(copies_on_ranks, num_ranks=2)


def call_with_parameters(layer: FlashMoELayer, parameters: Any) -> torch.Tensor:
    return torch.func.functional_call(layer, parameters, (tokens(),)).sum()


def on_fake_tensors(layer: FlashMoELayer) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer(torch.empty(9, HIDDEN))


def in_forward_mode(layer: FlashMoELayer) -> None:
    with forward_ad.dual_level():
        layer(forward_ad.make_dual(tokens(), tokens()))


EXPORT = "cannot be exported or traced, .* export the parts of the model before it and after it"
REFUSED: dict[str, tuple[Callable[[FlashMoELayer], object], str]] = {
    "vmap": (
        lambda layer: torch.vmap(layer)(torch.randn(2, 9, HIDDEN)),
        r"under torch.vmap: call it once, .* among those of x \[..., hidden\]",
    ),
    "grad": (
        lambda layer: torch.func.grad(functools.partial(call_with_parameters, layer))(
            dict(layer.named_parameters())
        ),
        r"torch.func's transforms \(grad\): use .backward\(\) or torch.autograd.grad",
    ),
    "vjp": (lambda layer: torch.func.vjp(layer, tokens()), r"torch.func's transforms \(grad\)"),
    "jvp": (
        lambda layer: torch.func.jvp(layer, (tokens(),), (tokens(),)),
        r"torch.func's transforms \(jvp\)",
    ),
    "forward mode": (in_forward_mode, r"in forward mode .*: use .backward\(\)"),
    "fake tensors": (on_fake_tensors, "on fake tensors, .* call it outside of FakeTensorMode"),
    "a fake tensor": (
        lambda layer: layer(FakeTensorMode().from_tensor(tokens())),
        "x is a FakeTensor, wanted a plain torch.Tensor, which has values",
    ),
    "export": (lambda layer: torch.export.export(layer, (tokens(),)), EXPORT),
    "make_fx": (lambda layer: make_fx(layer)(tokens()), EXPORT),
    "jit": (lambda layer: torch.jit.trace(layer, (tokens(),)), EXPORT),
    "fx": (torch.fx.symbolic_trace, "x is a Proxy, wanted a torch.Tensor"),
    "no tensor": (lambda layer: layer([1.0]), "x is a list, wanted a torch.Tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("fuse_router", [False, True])
def test_what_is_refused(name: str, fuse_router: bool):
    run, message = REFUSED[name]
    layer = make_layer(fuse_router=fuse_router)
    want = layer(tokens())
    with pytest.raises(FlashMoEError, match=message):
        run(layer)
    assert torch.equal(layer(tokens()), want)


def distributed_tokens(group: dist.ProcessGroup) -> list[str]:
    mesh = DeviceMesh.from_group(group, "cpu")
    spread = functools.partial(DTensor.from_local, device_mesh=mesh, placements=[Replicate()])
    layer, found = make_layer(group), []
    other = copy.deepcopy(layer)
    other.router.weight = nn.Parameter(spread(layer.router.weight.detach()))
    for one, x in ((layer, spread(tokens())), (other, tokens())):
        try:
            one(x)
        except FlashMoEError as error:
            found.append(str(error))
    layer(tokens())
    return found


def test_distributed_tensors_are_refused(ranks: RankPool):
    for found in ranks.run(distributed_tokens, num_ranks=2):
        for message, what in zip(found, ("x", "router weight"), strict=True):
            assert f"{what} is a DTensor, wanted a plain torch.Tensor; call .to_local()" in message


def test_a_subclass_without_operators_of_its_own_is_an_array_of_values():
    class Marked(torch.Tensor):
        pass

    layer = make_layer()
    assert torch.equal(layer(tokens().as_subclass(Marked)), layer(tokens()))


@pytest.mark.usefixtures("fresh_compiler")
def test_nothing_makes_one_graph_of_a_layer():
    model = Model(make_layer())
    with pytest.raises(RuntimeError, match="FlashMoELayer.forward"):
        torch.compile(model, backend="eager", fullgraph=True)(tokens())
    with pytest.raises(RuntimeError, match="FlashMoELayer.forward"):
        torch.export.export(model, (tokens(),), strict=True)


def test_gradients_accumulate():
    layer = make_layer()
    once = grads_of(layer, layer)[2:]
    layer.zero_grad()
    for _ in range(2):
        layer(tokens()).square().sum().backward()
    assert_same([one.grad for one in layer.parameters()], [2 * grad for grad in once])
