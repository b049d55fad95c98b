"""The promise that a layer's weights stay as they are: when it holds, and what it saves."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmoe_megatron import FlashMoELayer, unchanged_weights
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import Backend
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.kernel import ops
from flashmoe_megatron.kernel.backend import COPIES, TRANSPOSES
from flashmoe_megatron.options import FrameworkOptions
from flashmoe_megatron.promise import Promise
from flashmoe_megatron.separate import precision
from flashmoe_megatron.weights import ExpertWeights, SplitWeights, WrappedWeights
from tests.unit import cases, simulated_gpus, test_fp8
from tests.unit.separate import NAMES, make
from tests.unit.test_fp8 import CONFIG, layer_of

STEPS, MICRO_BATCHES = test_fp8.STEPS, test_fp8.MICRO_BATCHES


def weights() -> list[torch.Tensor]:
    return [torch.ones(2, 128), torch.ones(128)]


def made(promise: Promise, tensors: Sequence[torch.Tensor], maker: str = "test") -> str:
    """What a pass of a backend does."""
    making = promise.making(maker, tensors)
    if making is None:
        return "each pass"
    if making.is_current:
        return "kept"
    making.keep("copies")
    making.note()
    return "made"


def test_the_first_pass_makes_what_others_find() -> None:
    promise, tensors = Promise(), weights()
    assert made(promise, tensors) == "each pass"
    for _ in range(2):
        promise.give()
        assert [made(promise, tensors) for _ in range(3)] == ["made", "kept", "kept"]
    assert made(promise, tensors, "another") == "made"
    promise.renew()
    assert made(promise, tensors) == "made"
    promise.end()
    assert made(promise, tensors) == "each pass"
    promise.renew()
    assert made(promise, tensors) == "each pass"


def test_makers_have_copies_of_their_own() -> None:
    """As forwards and backwards have, which take turns."""
    promise, tensors, makers = Promise(), weights(), ("one", "other")
    promise.give()
    for wanted in ("made", "kept", "kept"):
        assert [made(promise, tensors, maker) for maker in makers] == [wanted] * 2
    for maker in makers:
        making = promise.making(maker, tensors)
        assert making is not None
        making.keep(maker)  # memory, to be filled
        assert [made(promise, tensors, one) for one in makers].count("made") == 1
    makings = [promise.making(maker, tensors) for maker in makers]
    assert [making and making.made for making in makings] == ["copies"] * 2
    for change in (promise.renew, promise.give, lambda: in_place(tensors)):
        change()
        assert [made(promise, tensors, maker) for maker in makers] == ["made"] * 2
    promise.end()
    assert [made(promise, tensors, maker) for maker in makers] == ["each pass"] * 2


def test_memory_for_copies_is_no_copy() -> None:
    """A launch that fails behind it has not filled it."""
    promise = Promise()
    promise.give()
    making = promise.making("test", weights())
    assert making is not None
    making.note()
    making.keep("memory")
    assert making.made == "memory"
    assert not making.is_current


def in_place(tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        tensors[0].mul_(1)


def in_place_in_a_view(tensors: list[torch.Tensor]) -> None:
    tensors[0].detach()[1].fill_(1)


def elsewhere(tensors: list[torch.Tensor]) -> None:
    tensors[0].data = tensors[0].data.clone()


def another(tensors: list[torch.Tensor]) -> None:
    tensors[1] = tensors[1].clone()


def frozen(tensors: list[torch.Tensor]) -> None:
    tensors[1].requires_grad_()


def in_another_shape(tensors: list[torch.Tensor]) -> None:
    tensors[0] = tensors[0].view(4, 64)


@pytest.mark.parametrize(
    "change",
    [in_place, in_place_in_a_view, elsewhere, another, frozen, in_another_shape],
    ids=lambda change: change.__name__,
)
def test_what_a_layer_sees_goes_before_the_word(
    change: Callable[[list[torch.Tensor]], None],
) -> None:
    promise, tensors = Promise(), weights()
    promise.give()
    assert [made(promise, tensors) for _ in range(2)] == ["made", "kept"]
    change(tensors)
    assert [made(promise, tensors) for _ in range(2)] == ["made", "kept"]


def test_tensors_that_count_no_writes_are_copied_each_time() -> None:
    promise = Promise()
    promise.give()
    with torch.inference_mode():
        tensors = weights()
    assert [made(promise, tensors) for _ in range(2)] == ["each pass"] * 2


def test_a_graph_replays_what_its_capture_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    promise, tensors, is_capturing = Promise(), weights(), False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    promise.give()
    assert made(promise, tensors) == "made"
    is_capturing = True  # a piece, captured within a step
    assert made(promise, tensors) == "each pass"
    promise.give()  # a whole iteration
    assert [made(promise, tensors) for _ in range(3)] == ["made", "kept", "kept"]
    is_capturing = False
    assert made(promise, tensors) == "each pass"


def test_a_copied_layer_has_no_promise() -> None:
    layer = layer_of(CONFIG, 7)
    x = torch.randn(16, CONFIG.hidden).bfloat16()
    with unchanged_weights(layer):
        before = layer(x)
        other = copy.deepcopy(layer)
        test_fp8.write_data(other, x)
        assert not torch.equal(other(x), before)
        assert torch.equal(layer(x), before)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts quantized weights in the last number of a list."""
    counts, quantize = [0], precision.quantize

    def count(x: torch.Tensor, height: int) -> Any:
        counts[-1] += height > 1
        return quantize(x, height)

    monkeypatch.setattr(precision, "quantize", count)
    return counts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep", ["all", "inputs"])
@pytest.mark.parametrize("experts", test_fp8.EXPERTS)
def test_a_training_has_the_same_bits(
    experts: str, keep: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each step the first forward quantizes fc1 and fc2; a backward may run another forward."""
    config = replace(CONFIG, experts=experts)
    layers = [
        FlashMoELayer(
            config, device="cpu", dtype=torch.bfloat16, router=True, backend=name, keep=keep
        )
        for _ in range(2)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    counts = counted(monkeypatch)
    test_fp8.train_both(layers, torch.randn(16, config.hidden).bfloat16(), counts)
    passes = 3 if keep == "inputs" else 2
    assert counts == [2, 2 * passes * MICRO_BATCHES] * STEPS + [0]


def in_the_loop(layer: FlashMoELayer, x: torch.Tensor) -> None:
    test_fp8.step(layer, x)


@pytest.mark.parametrize("change", [in_the_loop, test_fp8.load, test_fp8.give_memory])
@pytest.mark.parametrize("name", NAMES)
def test_a_change_within_is_seen_where_it_can_be(
    name: str, change: Callable[[FlashMoELayer, torch.Tensor], None]
) -> None:
    torch.manual_seed(7)
    layer, other = (
        FlashMoELayer(CONFIG, device="cpu", dtype=torch.bfloat16, router=True, backend=name)
        for _ in range(2)
    )
    x = torch.randn(16, CONFIG.hidden).bfloat16()
    with unchanged_weights(layer):
        before = layer(x)
        change(layer, x)
        other.load_state_dict({key: value.clone() for key, value in layer.state_dict().items()})
        test_fp8.compare_steps(layer, other, x, before)


def test_a_broken_promise_is_not_noticed() -> None:
    layer = layer_of(CONFIG, 7)
    x = torch.randn(16, CONFIG.hidden).bfloat16()
    with unchanged_weights(layer):
        before = layer(x)
        layer.fc2.data.neg_()
        assert torch.equal(layer(x), before)
    assert torch.equal(layer(x), -before)


def test_what_is_computed_for_a_call_is_copied_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts and parametrizations have memory that may become another layer's."""
    layer = layer_of(CONFIG, 7)
    x = torch.randn(16, CONFIG.hidden).bfloat16()
    counts = counted(monkeypatch)

    class Twice(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return 2 * given

    with unchanged_weights(layer):
        assert layer._weights(None).promise is layer._weights(torch.bfloat16).promise is not None
        layer.float()
        assert layer._weights(torch.bfloat16).promise is None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x), layer(x)
        assert counts == [4]
        layer.bfloat16()
        layer(x), layer(x)
        assert counts == [6]
        torch.nn.utils.parametrize.register_parametrization(layer, "fc2", Twice())
        assert layer._weights(None).promise is None
        layer(x), layer(x)
        assert counts == [10]


def test_promises_of_one_layer_are_not_anothers() -> None:
    """FSDP gives two layers the same memory, one after the other."""
    first, second = layer_of(CONFIG, 7), layer_of(CONFIG, 8)
    x = torch.randn(16, CONFIG.hidden).bfloat16()
    want = second(x)
    with unchanged_weights(torch.nn.ModuleList([first, second])):
        first(x)
        for name in ("fc1", "fc2"):
            own, its = (getattr(one, name) for one in (first, second))
            own.data.copy_(its.data)
            its.data = own.data
        assert torch.equal(second(x), want)


def test_a_model_without_such_experts_is_refused() -> None:
    plain = FlashMoELayer(replace(CONFIG, experts="bf16"), device="cpu")
    for model in (plain, torch.nn.Linear(2, 2)):
        with (
            pytest.raises(ConfigError, match=f"of a {type(model).__name__} without experts in FP8"),
            unchanged_weights(model),
        ):
            pass


def test_an_error_within_ends_it() -> None:
    layer = layer_of(CONFIG, 7)
    with pytest.raises(ZeroDivisionError), unchanged_weights(layer):
        raise ZeroDivisionError
    assert layer.promise.making("test", weights()) is None


def test_other_forms_of_weights() -> None:
    promise, one = Promise(), torch.zeros(4, 128, 128)
    apart = SplitWeights((one,), (one,), (one,), promise=promise)
    assert apart.apart().promise is promise
    assert apart.join().promise is None, "copies for a call"
    wrapped = WrappedWeights((one,), (one,), promise=promise, data_of=torch.Tensor.detach)
    assert wrapped.join().promise is promise
    assert ExpertWeights((one,), (one,), promise=promise).per_expert().promise is None


def test_options() -> None:
    assert FrameworkOptions(experts="fp8", quantize="step").quantize == "step"
    for kind, given, words in (
        (FrameworkOptions, {"quantize": "step"}, "wanted experts fp8, or pass"),
        (FrameworkOptions, {"quantize": "once"}, "wanted one of pass, step"),
        (ModuleOptions, {"quantize": "step", "experts": "fp8"}, "wanted pass, since nothing tells"),
    ):
        with pytest.raises(ConfigError, match=words):
            kind(**given)


IN_FP8: dict[str, Any] = {"hidden": 128, "intermediate": 128, "num_experts": 2, "experts": "fp8"}


def weights_of(inputs: cases.Inputs, promise: Promise | None) -> ExpertWeights:
    kinds = ([one.clone().requires_grad_() for one in kind] for kind in (inputs.fc1, inputs.fc2))
    return ExpertWeights(*map(tuple, kinds), promise=promise)


def micro_batch(backend: Backend, inputs: cases.Inputs, weights: ExpertWeights) -> None:
    """A forward and its backward."""
    x = inputs.x[0].clone().requires_grad_()
    out = moe_apply(backend, x, inputs.probs[0], inputs.routing_map[0], weights)
    out.backward(inputs.grad_out[0])


class Prompt(simulated_gpus.Gpus):
    """GPUs that run each launch at once."""

    def launch(self, rank: int, work: Callable[[], object]) -> None:
        work()


class Launches:
    """What passes of a simulated kernel say of their copies.

    Attributes:
        found: Whether a forward has found copies.
        found_backward: Whether a backward has.
        sizes: The bytes of the copies that each pass has been given.
    """

    def __init__(self, config: MoEConfig, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        simulated_gpus.install(Prompt(1, seed=1, slow=0), monkeypatch)
        self.found: list[bool] = []
        self.found_backward: list[bool] = []
        self.sizes: list[int] = []
        forward, backward = ops.forward, ops.backward

        def tell(*arguments: Any) -> None:
            self.found.append(arguments[9])
            self.sizes.append(arguments[2].nbytes)
            forward(*arguments)

        def tell_backward(*arguments: Any) -> None:
            self.found_backward.append(arguments[13])
            self.sizes.append(arguments[3].nbytes)
            backward(*arguments)

        monkeypatch.setattr(ops, "forward", tell)
        monkeypatch.setattr(ops, "backward", tell_backward)
        self.backend = simulated_gpus.make_backend(config, 0, **options)


def launches_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> tuple[Launches, cases.Inputs]:
    """A simulated kernel that multiplies in FP8 in both directions, and what its passes get."""
    config = cases.make_config(**{**IN_FP8, "experts": "fp8_dgrad"})
    launches = Launches(config, monkeypatch, keep="all")
    return launches, cases.make_inputs(config, cases.uniform, [5], dtype=torch.bfloat16)


@pytest.mark.parametrize("keep", ["all", "inputs"])
@pytest.mark.parametrize("experts", test_fp8.EXPERTS)
def test_launches_of_the_kernel(experts: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each direction fills memory of its own once a step, if it multiplies in FP8."""
    config = cases.make_config(**{**IN_FP8, "experts": experts})
    launches = Launches(config, monkeypatch, keep=keep)
    inputs = cases.make_inputs(config, cases.uniform, [5], dtype=torch.bfloat16)
    promise = Promise()
    weights = weights_of(inputs, promise)
    for _ in range(STEPS):
        promise.give()
        for _ in range(MICRO_BATCHES):
            micro_batch(launches.backend, inputs, weights)
        promise.end()
    forwards = MICRO_BATCHES * (2 if keep == "inputs" else 1)
    assert launches.found == [number > 0 for number in range(forwards)] * STEPS
    in_fp8 = config.has_fp8_dgrad
    finds = [in_fp8 and number > 0 for number in range(MICRO_BATCHES)]
    assert launches.found_backward == finds * STEPS
    again = [1024] if keep == "inputs" else []
    assert launches.sizes == [1024, *again, 2048] * MICRO_BATCHES * STEPS
    (forward, backward) = (promise._made.get(maker) for maker in (COPIES, TRANSPOSES))
    assert forward.nbytes == 1024
    assert (backward.nbytes if in_fp8 else backward) == (2048 if in_fp8 else None)
    micro_batch(launches.backend, inputs, weights)
    assert not any(launches.found[STEPS * forwards :])
    assert not any(launches.found_backward[STEPS * MICRO_BATCHES :])
    assert launches.sizes[-2:] == [2048, 2048]


def test_layers_on_the_kernel_do_not_share_what_they_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the last layer's transposes would be every layer's."""
    launches, inputs = launches_in_both_directions(monkeypatch)
    layers = [weights_of(inputs, Promise()) for _ in range(2)]
    for layer in layers:
        layer.promise.give()
    for _ in range(2):
        for layer in layers:
            micro_batch(launches.backend, inputs, layer)
    assert launches.found == launches.found_backward == [False, False, True, True]
    kept = [layer.promise._made[maker] for layer in layers for maker in (COPIES, TRANSPOSES)]
    assert len({one.data_ptr() for one in kept}) == 4


@pytest.mark.parametrize("change", [in_place, elsewhere], ids=lambda change: change.__name__)
def test_a_change_between_two_backwards_has_both_directions_quantize_again(
    change: Callable[[list[torch.Tensor]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, inputs = launches_in_both_directions(monkeypatch)
    weights = weights_of(inputs, Promise())
    weights.promise.give()
    for _ in range(2):
        micro_batch(launches.backend, inputs, weights)
    change([*weights.fc2])
    for _ in range(2):
        micro_batch(launches.backend, inputs, weights)
    assert launches.found == launches.found_backward == [False, True, False, True]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_launch_that_fails_has_made_no_copies(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, inputs = launches_in_both_directions(monkeypatch)
    weights = weights_of(inputs, Promise())
    weights.promise.give()
    tell = getattr(ops, direction)

    def fail(*_: Any) -> None:
        raise RuntimeError("no launch")

    monkeypatch.setattr(ops, direction, fail)
    with pytest.raises(RuntimeError, match="no launch"):
        micro_batch(launches.backend, inputs, weights)
    monkeypatch.setattr(ops, direction, tell)
    for _ in range(2):
        micro_batch(launches.backend, inputs, weights)
    failed, other = launches.found, launches.found_backward
    if direction == "backward":
        failed, other = other, failed[1:]
    assert failed == [False, True]
    assert other == [direction == "backward", True]


def test_the_separate_backends_keep_bytes() -> None:
    inputs = test_fp8.uneven_inputs(CONFIG, [37])
    for name in NAMES:
        promise = Promise()
        promise.give()
        micro_batch(make(name, CONFIG), inputs, weights_of(inputs, promise))
        making = promise.making("separate", [])
        assert making is not None
        kept = sum(t.nbytes for kind in making.made for one in kind for t in one[:2])
        num_weights = sum(one.numel() for one in (*inputs.fc1, *inputs.fc2))
        assert kept == num_weights + num_weights // 128**2 * 4
