"""Layers over wrappers of process groups, which are destroyed and made again."""

import contextlib
import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import ending, expert_group, select
from flashmoe_megatron.adapters.experts import GroupBackends, shared_backends
from flashmoe_megatron.adapters.indexed import IndexedExperts
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.options import FrameworkOptions
from flashmoe_megatron.oracle import assert_close
from flashmoe_megatron.ranks import Ranks, _made
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.torch_groups import is_destroyed, living_group, torch_group
from flashmoe_megatron.weights import ExpertWeights
from tests.distributed import RankPool, refusal
from tests.unit import cases
from tests.unit.test_layer import make_layer, oracle
from tests.wrapped_groups import FORMS, unwrapping

PAIRS = [(0, 1), (2, 3)]
TOKENS = 12


of_each_form = pytest.mark.parametrize(
    ("form", "patch", "backend"),
    [
        ("subclass", "patched", "scheduled"),
        ("subclass", "bare", "reference"),
        ("delegate", "bare", "scheduled"),
        ("nested", "bare", "reference"),
    ],
)


def within(patch: str) -> contextlib.AbstractContextManager[None]:
    return unwrapping() if patch == "patched" else contextlib.nullcontext()


def choices_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's tokens, experts and routing weights."""
    g = cases.generator(100 + rank)
    topk_idx = torch.rand(TOKENS, 8, generator=g).topk(2, dim=1).indices
    return torch.randn(TOKENS, 64, generator=g), topk_idx, torch.rand(TOKENS, 2, generator=g)


def check(layer: FlashMoELayer, whole: FlashMoELayer, pair: tuple[int, ...]) -> None:
    """Compares a call and its gradients with those of one rank that has all experts and tokens."""
    at, given = pair.index(dist.get_rank()), [choices_of(rank) for rank in pair]
    x = given[at][0].requires_grad_()
    out = layer(x, *given[at][1:])
    grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    tokens = torch.cat([each[0].detach() for each in given]).requires_grad_()
    want = oracle(whole, tokens, *(torch.cat([one[i] for one in given]) for i in (1, 2)))
    leaves = [tokens, *whole.parameters()]
    wanted = torch.autograd.grad(want.square().sum(), leaves)
    own = slice(at * TOKENS, (at + 1) * TOKENS)
    assert_close("out", out, want[own], rel_l2=1e-5)
    assert_close("grad_x", grads[0], wanted[0][own], rel_l2=1e-5)
    for (name, one), grad, full in zip(
        layer.named_parameters(), grads[1:], wanted[1:], strict=True
    ):
        assert_close(name, grad.full_tensor(), full, rel_l2=1e-5)
        assert torch.equal(one.full_tensor(), dict(whole.named_parameters())[name])


def layers_sleep(group: dist.ProcessGroup, form: str, backend: str, patch: str) -> None:
    """Two layers of one shape and one of another, over three sleeps."""
    pair = next(pair for pair in PAIRS if dist.get_rank() in pair)
    with within(patch):
        wrapper = FORMS[form](PAIRS)
        shapes = [cases.make_config(num_ranks=2), cases.make_config(num_ranks=2, intermediate=128)]
        wholes = [
            make_layer(config=cases.make_config(**changes))
            for changes in ({}, {}, {"intermediate": 128})
        ]
        first = make_layer(config=shapes[0], group=wrapper, backend=backend)
        second = make_layer(config=shapes[0], group=wrapper, backend=first.backend)
        third = make_layer(config=shapes[1], group=wrapper, backend=backend)
        used = []
        for cycle in range(4):
            if cycle:
                wrapper.destroy()
                wrapper.reload()
            for layer, whole in zip((third, second, first), reversed(wholes), strict=True):
                check(layer, whole, pair)
            assert first.backend is second.backend
            used.append((first.backend, third.backend))
        assert len({id(one) for one in sum(used, ())}) == 8, "a backend is made for every group"
        wrapper.destroy()


@of_each_form
def test_layers_are_right_whenever_their_group_is_made_again(
    form: str, backend: str, patch: str, ranks: RankPool
) -> None:
    ranks.run(layers_sleep, form, backend, patch)


class Experts(IndexedExperts):
    """A layer of some framework, with the weights of its rank."""

    WAYS_OUT_OF_DTYPE = "take another dtype"

    def allow_more(self, num_tokens: int) -> str:
        return f"allow {num_tokens}"


def applied(experts: Experts, rank: int) -> torch.Tensor:
    whole = make_layer(config=cases.CONFIG)
    own = slice(4 * rank, 4 * rank + 4)
    weights = ExpertWeights((whole.fc1[own],), (whole.fc2[own],))
    return experts(*choices_of(dist.get_rank()), lambda: weights)


def living() -> Counter[str]:
    """How many there are of what is made for groups, and of the entries by which it is found."""
    gc.collect()
    kinds = (GroupBackends, ReferenceBackend, ScheduledBackend, FlashMoELayer)
    found = Counter(one.__name__ for one in map(type, gc.get_objects()) if one in kinds)
    tables = (_made, ending._ending, ending._left, select._origins, expert_group._meshes)
    found.update({f"table {at}": len(table) for at, table in enumerate(tables)})
    found["groups"] = len(dist.distributed_c10d._world.pg_map)
    return found


def backends_of_a_wrapper(
    group: dist.ProcessGroup, form: str, backend: str, patch: str
) -> list[Counter[str]]:
    """Layers that share what their group has, over ten sleeps; what there is after each."""
    settings = FrameworkOptions(backend=backend)
    device, pair = torch.device("cpu"), next(pair for pair in PAIRS if dist.get_rank() in pair)
    rank, found = pair.index(dist.get_rank()), []
    before = living()  # what tests of before have left in this process
    with within(patch):
        wrapper = FORMS[form](PAIRS)
        config = cases.make_config(num_ranks=2)
        shapes = [config, config, cases.make_config(num_ranks=2, topk=3)]

        def make(shape: MoEConfig) -> Experts:
            return Experts(shape, shared_backends(wrapper, device, settings, None), torch.float32)

        layers = [make(shape) for shape in shapes]
        whole = make_layer(config=cases.CONFIG)
        want = oracle(whole, *choices_of(dist.get_rank()))
        for cycle in range(11):
            if cycle:
                wrapper.destroy()
                wrapper.reload()
            used = [layers[0], layers[2]] if cycle % 10 else layers  # one is left out for long
            for layer in used:
                assert_close("out", applied(layer, rank), want, rel_l2=1e-5)
            assert len({id(layer._backends) for layer in used}) == 1
            assert len({id(layer.backend) for layer in used}) == 2
            assert shared_backends(wrapper, device, settings, None) is layers[0]._backends
            if cycle in (2, 9, 10):
                found.append(living() - before)
            if backend == "scheduled" and not cycle:
                hooks = [layer.backend.hooks for layer in layers]
        if backend == "scheduled":
            assert [layer.backend.hooks for layer in layers] == hooks
        del layers, layer, used, make
        wrapper.destroy()
    Ranks(None).once(object, make=object)
    return found


@of_each_form
def test_a_wrapper_has_the_backends_of_one_group_however_often_it_sleeps(
    form: str, backend: str, patch: str, ranks: RankPool
) -> None:
    for second, ninth, last in ranks.run(backends_of_a_wrapper, form, backend, patch):
        assert second == ninth
        assert last["GroupBackends"] == 1
        num_backends = last["ReferenceBackend"] + last["ScheduledBackend"]
        assert num_backends == 2 + 1, "one for each shape, and that of the layer on one rank"


def call_without_a_group(group: dist.ProcessGroup, form: str) -> list[str]:
    """Calls layers whose group is asleep, and one whose group was no wrapper's."""
    pair = next(pair for pair in PAIRS if dist.get_rank() in pair)
    config, given = cases.make_config(num_ranks=2), choices_of(dist.get_rank())
    wrapper = FORMS[form](PAIRS)
    plain = [dist.new_group(list(ranks)) for ranks in PAIRS][PAIRS.index(pair)]
    settings = FrameworkOptions(backend="reference")
    device = torch.device("cpu")
    shared = shared_backends(wrapper, device, settings, None)
    layers = [make_layer(config=config, group=one) for one in (wrapper, plain)]
    experts = Experts(config, shared, torch.float32)
    wrapper.destroy()
    dist.destroy_process_group(plain)
    said = [refusal(group, lambda _, one=one: one(*given)) for one in layers]
    said.append(refusal(group, lambda _: applied(experts, pair.index(dist.get_rank()))))
    wrapper.reload()
    check(layers[0], make_layer(config=cases.CONFIG), pair)
    wrapper.destroy()
    return said


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_a_group_that_is_gone_say_so(form: str, ranks: RankPool) -> None:
    for said in ranks.run(call_without_a_group, form):
        for one in said:
            assert one.startswith("ConfigError: the process group of these experts has been destr")
            assert "made again in the wrapper" in one


def test_which_group_a_wrapper_stands_for(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        for form in FORMS.values():
            wrapper = form([(0,)])
            first = torch_group(wrapper)
            assert first is not world
            assert first in dist.distributed_c10d._world.pg_map
            assert not is_destroyed(wrapper)
            assert not is_destroyed(first)
            wrapper.destroy()
            assert is_destroyed(first)
            with pytest.raises(ConfigError, match="made again in the wrapper"):
                living_group(wrapper)
            wrapper.reload()
            second = living_group(wrapper)
            assert second is not first
            assert dist.get_process_group_ranks(second) == [0]
            wrapper.destroy()
        for other in (None, world, -100, [0, 1], "group", 3.5):
            assert torch_group(other) is other
        double = FORMS["subclass"]([(0,)])
        double.parent = world
        with pytest.raises(ConfigError, match="Subclass holds 2 process groups"):
            torch_group(double)
    finally:
        dist.destroy_process_group()
