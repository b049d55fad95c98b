"""The measuring tools measure what they say: the baseline is the layer, the gate notices errors."""

import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.bench import layers, stopwatch
from flashmoe_megatron.bench.correctness import (
    GATE,
    LayerResults,
    relative_errors,
    routed_errors,
)
from flashmoe_megatron.bench.layers import FusedLayer, UnfusedLayer, without_grad
from flashmoe_megatron.bench.problem import Problem, Router, make_problem
from flashmoe_megatron.bench.shapes import ODD_SHAPES, SHAPES, Form, Shape, shape_of
from flashmoe_megatron.config import Activation
from flashmoe_megatron.separate.reference import ReferenceBackend
from tests.distributed import RankPool
from tools.bench import bench_layer, compare_libraries, multipath
from tools.bench.bench_layer import DTYPES, early_timing, routed_calls, router_weight_for
from tools.bench.compare_libraries import Worker, bits_of, differing
from tools.bench.floors import Rates, floors_of
from tools.timeline import __main__ as timeline
from tools.timeline import capture


def make(num_ranks: int, *, gated: bool, dtype: str = "bf16") -> Problem:
    shape = Shape(40, 64, 128, 8, 2, gated=gated)
    cpu = torch.device("cpu")
    return make_problem(shape, num_ranks, device=cpu, router=Router(0.7), dtype=DTYPES[dtype])


def measured_errors(
    group: dist.ProcessGroup | None, gated: bool, use_main_grad: bool
) -> list[dict[str, float]]:
    """Errors of the layer, of the baseline, and of a layer that misses one token."""
    num_ranks = 1 if group is None else dist.get_world_size(group)
    problem = make(num_ranks, gated=gated)
    backend = ReferenceBackend(problem.config, group)
    layer = FusedLayer(problem, backend, use_main_grad=use_main_grad)
    assert len(layer.parameters) == (2 * problem.config.num_local_experts if use_main_grad else 2)
    results = layer.results()
    errors = [relative_errors(problem, results)]
    results.out[7] = 0
    broken = relative_errors(problem, results)

    problem.x.grad = None
    baseline = UnfusedLayer(problem, use_main_grad=use_main_grad)
    errors.append(relative_errors(problem, baseline.results()))
    return [*errors, broken]


@pytest.mark.parametrize(("gated", "use_main_grad"), [(True, False), (False, True)])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_baseline_and_gate(ranks: RankPool, num_ranks: int, gated: bool, use_main_grad: bool):
    if num_ranks == 1:
        found = [measured_errors(None, gated, use_main_grad)]
    else:
        found = ranks.run(measured_errors, gated, use_main_grad, num_ranks=num_ranks)
    for layer, baseline, broken in found:
        assert max(layer.values()) < GATE
        assert max(baseline.values()) < GATE
        assert broken["out"] > 10 * GATE
        assert broken["grad_x"] == layer["grad_x"]


def test_the_gate_sees_all_that_experts_compute():
    """Another function, clamp or offset, or no biases, is further off than the gate."""
    whole = Form(Activation.QUICK_GELU, clamp_value=7.0, linear_offset=1.0, has_bias=True)
    problem = make_problem(SMALL, device=torch.device("cpu"), form=whole)
    for layer in (
        FusedLayer(problem, ReferenceBackend(problem.config), use_main_grad=False),
        UnfusedLayer(problem, use_main_grad=False),
    ):
        errors = relative_errors(problem, layer.results())
        assert {"grad_fc1_bias", "grad_fc2_bias"} < set(errors)
        assert max(errors.values()) < GATE
    for change in (
        {"activation": Activation.SILU},
        {"clamp_value": 1.0},
        {"linear_offset": 0.0},
        {"has_bias": False},
    ):
        form = replace(whole, **change)
        other = make_problem(SMALL, device=torch.device("cpu"), form=form)
        changed = FusedLayer(other, ReferenceBackend(other.config), use_main_grad=False)
        assert relative_errors(problem, changed.results())["out"] > GATE


def test_float16_passes_the_gate_by_more():
    errors = {}
    for dtype in DTYPES:
        problem = make(1, gated=True, dtype=dtype)
        assert problem.x.dtype == problem.parameters[0].dtype == DTYPES[dtype]
        layer = FusedLayer(problem, ReferenceBackend(problem.config), use_main_grad=True)
        errors[dtype] = max(relative_errors(problem, layer.results()).values())
    assert errors["fp16"] < errors["bf16"] / 4 < GATE / 4


def test_routers_keep_a_share_of_routes_on_their_rank_and_have_an_order():
    config = Shape(40, 64, 64, 32, 2, gated=True).config(4)
    device = torch.device("cpu")
    for locality in (0.25, 0.7):
        weights = Router(locality=locality).weights(config, 2, device)
        assert weights[16:24].sum() / weights.sum() == pytest.approx(locality)
    first, again, other = (Router(0.5, order).weights(config, 0, device) for order in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    in_order = Router(0.5).weights(config, 0, device)
    assert torch.equal(in_order, first.sort(descending=True).values)


def test_floors_of_few_tokens_are_their_weights():
    """A rank's 16 experts have 268 MB of weights, and 1,074 MB of sums of gradients pass twice."""
    rates = Rates(tflops=746.7, link_gbps=377.5, memory_gbps=4300.0)
    one = {"rates": rates, "remote_rows": 1200.0, "local_experts": 16.0}
    few = floors_of(SHAPES["paper-1k"], **one, grads="main_grad")
    assert few.forward == pytest.approx(268.4e6 / 4.3e9, rel=1e-3)
    assert few.backward == pytest.approx((268.4e6 + 1073.7e6) / 4.3e9, rel=1e-3)
    assert few.both == few.forward + few.backward
    in_bf16 = floors_of(SHAPES["paper-1k"], **one, grads="bf16")
    assert in_bf16.backward == pytest.approx(2 * 268.4e6 / 4.3e9, rel=1e-3)
    half = floors_of(SHAPES["paper-1k"], **one | {"local_experts": 8.0}, grads="bf16")
    assert half.forward == pytest.approx(34.36e9 / 746.7e9, rel=1e-3)  # its products take longer


def test_floors_of_many_tokens_are_products_or_links():
    one = {"remote_rows": 8192 * 1.2, "local_experts": 16.0, "grads": "main_grad"}
    fast = Rates(tflops=746.7, link_gbps=377.5, memory_gbps=4300.0)
    many = floors_of(SHAPES["paper-8k"], rates=fast, **one)
    assert many.forward == pytest.approx(274.9e9 / 746.7e9, rel=1e-3)
    assert many.backward == 2 * many.forward
    slow = Rates(tflops=746.7, link_gbps=100.0, memory_gbps=4300.0)
    links = floors_of(SHAPES["paper-8k"], rates=slow, **one)
    assert links.forward == pytest.approx(2 * 8192 * 1.2 * 4096 / 100e6)
    alone = Rates(tflops=746.7, link_gbps=None, memory_gbps=4300.0)
    assert floors_of(SHAPES["paper-8k"], rates=alone, **one) == many


def used_experts(group: dist.ProcessGroup) -> float:
    problem = make(dist.get_world_size(group), gated=False)
    problem.routing_map.zero_()
    problem.routing_map[3:5, [1, 4 + dist.get_rank() // 2]] = True
    return problem.used_experts()


def test_experts_are_used_where_any_rank_chooses_them(ranks: RankPool):
    """All four ranks choose expert 1, two of them expert 4, and two expert 5."""
    assert ranks.run(used_experts, num_ranks=4) == [3 / 4] * 4


@pytest.mark.parametrize("name", ODD_SHAPES)
def test_odd_shapes_fill_no_tiles_but_divide_among_four(name: str):
    shape = ODD_SHAPES[name]
    assert shape.num_experts % 4 == 0
    rows = shape.tokens * shape.topk * 4 / shape.num_experts
    assert any(size % 256 for size in (shape.tokens, rows, shape.intermediate, shape.hidden))


def test_shapes_are_the_published_ones():
    gflops = {name: round(shape.flops / 1e9) for name, shape in SHAPES.items()}
    assert gflops == {
        "paper-1k": 34,
        "paper-4k": 137,
        "paper-8k": 275,
        "paper-16k-e8": 550,
        "paper-16k-e64": 550,
        "paper-16k-e128": 550,
        "qwen3-30b": 618,
        "mixtral-8x7b": 5772,
        "deepseek-v3-e64": 2886,
    }


def test_a_shape_is_named_or_described():
    assert shape_of("8192x2048x2048x64x2") == shape_of("paper-8k") == SHAPES["paper-8k"]
    assert shape_of("8192x2048x768x128x8", gated=True) == SHAPES["qwen3-30b"]
    for name in ("paper-9k", "8192x2048x2048x64", "8192x2048x2048x64x0", "8192x2048x-1x64x2"):
        with pytest.raises(ValueError, match=f"shape {name}: wanted TOKENSx.* or one of paper-1k"):
            shape_of(name)


@pytest.mark.parametrize("gated", [False, True])
def test_a_described_shape_has_the_gate_that_is_asked_for(gated: bool):
    options = bench_layer.parse(["--shapes", "40x64x64x8x2", "mixtral-8x7b", *["--gated"] * gated])
    described, named = options.shapes.values()
    assert described == Shape(40, 64, 64, 8, 2, gated=gated)
    assert named == SHAPES["mixtral-8x7b"]


SMALL = Shape(40, 64, 64, 8, 2, gated=True)


class SpoiltLayer(FusedLayer):
    """A layer whose output is a hundredth too large."""

    def __call__(self) -> torch.Tensor:
        return super().__call__() * 1.01


def use_on_processor(monkeypatch: pytest.MonkeyPatch, tool: object, kind: type[FusedLayer]) -> None:
    """Has a tool measure the reference, at a small shape in the place of all that it names."""

    def layer(problem: Problem, **_: object) -> FusedLayer:
        return kind(problem, ReferenceBackend(problem.config), use_main_grad=True)

    monkeypatch.setattr(stopwatch, "HAS_GPU", False)
    monkeypatch.setattr(tool, "kernel_layer", layer)
    monkeypatch.setattr(tool, "SHAPES", dict.fromkeys(SHAPES, SMALL), raising=False)


ROWS = [
    ("fused", "gate"),
    ("fused", "forward"),
    ("fused", "forward+backward"),
    ("unfused", "gate"),
    ("unfused", "forward"),
    ("experts only", "forward"),
    ("unfused", "forward+backward"),
]


def measured_on_processor(out: Path, refused: str, *flags: str) -> list[dict[str, Any]]:
    """What bench_layer records of a small layer, until the gate ends it where ``refused`` says."""
    shape = "40x64x64x8x2"
    command = ["--allow-cpu", "--shapes", shape, "--iterations", "1", "--out", str(out), *flags]
    if refused:
        wanted = rf"{shape}, {refused}: relative L2 error 0\.01.*, wanted at most 0\.006"
        with pytest.raises(SystemExit, match=wanted):
            bench_layer.main(command)
    else:
        assert bench_layer.main(command) == 0
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


@pytest.mark.parametrize(
    ("spoilt", "num_rows"), [("reference", 0), ("unfused", 3), ("", len(ROWS))]
)
def test_a_wrong_layer_or_baseline_has_no_figures(
    tmp_path: Path, monkeypatch, spoilt: str, num_rows: int
):
    use_on_processor(monkeypatch, bench_layer, SpoiltLayer if spoilt == "reference" else FusedLayer)
    if spoilt == "unfused":
        right = layers.unfused_layer
        monkeypatch.setattr(layers, "unfused_layer", lambda *layer: right(*layer) * 1.01)
    rows = measured_on_processor(tmp_path / "out.jsonl", spoilt)
    assert [(row["implementation"], row["measurement"]) for row in rows] == ROWS[:num_rows]
    for row in rows:
        assert row["backend"] == "reference"
        if row["measurement"] == "forward":
            weights = 8 * 2 * 64 * 64 * 2
            assert row["floor_ms"] > 0.9 * weights / row["memory_gbps"] / 1e6


def test_no_other_backend_has_times_of_the_kernel(monkeypatch):
    monkeypatch.setattr(stopwatch, "HAS_GPU", True)
    with pytest.raises(SystemExit, match="--kernel wants the backend kernel, got scheduled"):
        bench_layer.main(["--allow-cpu", "--kernel", "--backend", "scheduled"])


@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize("kind", [FusedLayer, SpoiltLayer])
def test_a_library_that_computes_wrongly_gives_no_times(
    monkeypatch, kind: type[FusedLayer], is_zero: bool
):
    use_on_processor(monkeypatch, compare_libraries, kind)
    monkeypatch.setattr(compare_libraries, "replayed", lambda call: call)
    monkeypatch.setenv("FLASHMOE_LIBRARY", "")  # which ``work`` sets in a process of its own
    orders, theirs = multiprocessing.Pipe()
    orders.send(("paper-1k", SMALL, is_zero))
    orders.send(None)
    if kind is SpoiltLayer:
        with pytest.raises(SystemExit, match=r"paper-1k, now.so: relative L2 error 0\.01"):
            compare_libraries.work(Path("now.so"), theirs, launches=1, one_of=4)
        assert not orders.poll()
    else:
        compare_libraries.work(Path("now.so"), theirs, launches=1, one_of=4)
        turn = orders.recv()
        assert turn.times_ms.keys() == set(compare_libraries.PASSES)
        assert turn.bits.keys() == {"out", "grad_x", "grad_probs", "grad_fc1", "grad_fc2"}


class LayerOfCalls:
    """Stands for a layer: notes its calls, and whether they want gradients."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self) -> None:
        self.calls.append("training" if torch.is_grad_enabled() else "evaluation")

    def forward_and_backward(self) -> None:
        self.calls.append("both")


def test_turns_replay_passes_that_ran_before_they_were_captured(monkeypatch):
    layer = LayerOfCalls()

    def captured(call: Callable[[], object]) -> Callable[[], object]:
        layer.calls.append("capture")
        call()
        return partial(layer.calls.append, "replay")

    monkeypatch.setattr(compare_libraries, "replayed", captured)
    graphs = compare_libraries.graphs_of(layer)
    seen = ["evaluation", "both", "capture", "evaluation", "capture", "both"]
    assert (layer.calls, list(graphs)) == (seen, list(compare_libraries.PASSES))
    for graph in graphs.values():
        graph()
    assert layer.calls == [*seen, "replay", "replay"]


def test_a_result_with_one_other_bit_is_named():
    def results(flipped: int) -> LayerResults:
        weights = [torch.zeros(2, 2), torch.zeros(2, 2)]
        weights[1].view(torch.int32)[1, 0] ^= flipped
        return LayerResults(torch.ones(3, dtype=torch.bfloat16), grad_fc2=weights)

    bits = {name: bits_of(results(flipped)) for name, flipped in (("a", 0), ("b", 1), ("c", 0))}
    assert differing(bits, "a") == {"a": [], "b": ["grad_fc2"], "c": []}


def test_zeros_are_zeros_behind_the_gate_too():
    problem = make(1, gated=True)
    layer = FusedLayer(problem, ReferenceBackend(problem.config), use_main_grad=True)
    layer.results()
    problem.zero_values()
    assert not layer().any()
    assert not any(weight.main_grad.any() for weight in layer.parameters)


@pytest.mark.parametrize("kind", [FusedLayer, SpoiltLayer])
def test_a_wrong_layer_is_not_timed_beside_gathers(monkeypatch, kind: type[FusedLayer]):
    class BehindTheGate(Exception):
        """No group of GPUs is here for what follows."""

    def new_group(**_: object) -> None:
        raise BehindTheGate

    use_on_processor(monkeypatch, multipath, kind)
    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(SystemExit if kind is SpoiltLayer else BehindTheGate) as raised:
        multipath._beside_launch(3, {}, torch.device("cpu"))
    if kind is SpoiltLayer:
        assert str(raised.value).startswith("rank 3, qwen3-30b: relative L2 error 0.01")


@pytest.mark.parametrize("exists", [False, True])
def test_library_that_cannot_be_compared(tmp_path: Path, exists: bool):
    library = tmp_path / "now.so"
    if exists:  # its process ends when it is loaded
        library.write_bytes(b"no library")
    with pytest.raises(SystemExit, match="no library at" if not exists else "now ended at"):
        Worker(library, launches=1, one_of=4).turn("paper-1k", SMALL, True)


def routed(group: dist.ProcessGroup | None) -> list[dict[str, float]]:
    """Errors of both ways to route, and of results that are spoilt in one way each."""
    problem = make(1 if group is None else dist.get_world_size(group), gated=True)
    weight = router_weight_for(problem)
    calls = routed_calls(problem, ReferenceBackend(problem.config, group), weight)
    in_launch, in_torch = (without_grad(call)() for call in calls.values())
    torch.testing.assert_close(in_launch.out, in_torch.out)
    probs, chosen = in_launch.probs, in_launch.routing_map
    spoilt = [
        {"out": in_launch.out * 1.01},
        {"probs": probs * 1.01},
        {"routing_map": chosen.roll(1, 1)},
        {"routing_map": chosen | (chosen.cumsum(1) == 0)},
        {"routing_map": chosen & (chosen.cumsum(1) < 2)},
    ]
    results = [in_launch, in_torch, *(in_launch._replace(**change) for change in spoilt)]
    return [routed_errors(problem, weight, result) for result in results]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_both_ways_to_route_are_one_layer_and_errors_are_noticed(ranks: RankPool, num_ranks: int):
    found = [routed(None)] if num_ranks == 1 else ranks.run(routed, num_ranks=num_ranks)
    for in_launch, in_torch, out, probs, *choices in found:
        assert max(*in_launch.values(), *in_torch.values()) < GATE
        assert out["out"] > GATE > max(out["choice"], out["probs"])
        assert probs["probs"] > GATE > max(probs["choice"], probs["out"])
        assert all(choice["choice"] > 10 * GATE for choice in choices)


def test_equal_logits_may_exchange_their_experts():
    problem = make(1, gated=True)
    weight = router_weight_for(problem)
    weight[1] = weight[0]
    (in_launch, _) = routed_calls(problem, ReferenceBackend(problem.config), weight).values()
    got = in_launch()
    others = [1, 0, *range(2, problem.config.num_experts)]
    assert not torch.equal(got.routing_map[:, others], got.routing_map)
    exchanged = got._replace(routing_map=got.routing_map[:, others])
    assert routed_errors(problem, weight, exchanged)["choice"] < GATE


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_wrong_router_has_no_figures(tmp_path: Path, monkeypatch, spoilt: bool):
    use_on_processor(monkeypatch, bench_layer, FusedLayer)
    right = bench_layer.moe_router_forward

    def routed(*arguments: object, **named: object) -> object:
        found = right(*arguments, **named)
        return found._replace(out=found.out * 1.01) if spoilt else found

    monkeypatch.setattr(bench_layer, "moe_router_forward", routed)
    ways = ["router in the launch", "router of torch"]
    flags = ["--router", "--no-baselines", "--forward-only"]
    refused = f"reference, {ways[0]}" if spoilt else ""
    rows = measured_on_processor(tmp_path / "out.jsonl", refused, *flags)
    found = [row["measurement"] for row in rows]
    behind = [f"{what}, {way}" for way in ways for what in ("gate", "forward")]
    assert found == ["gate", "forward", *([] if spoilt else behind)]


@pytest.mark.parametrize("kind", [FusedLayer, SpoiltLayer])
def test_a_wrong_layer_is_not_recorded_over_time(
    tmp_path: Path, monkeypatch, kind: type[FusedLayer]
):
    class BehindTheGate(Exception):
        """No kernel is here for what follows."""

    def recorder(*_: object) -> None:
        raise BehindTheGate

    use_on_processor(monkeypatch, capture, kind)
    library = tmp_path / "libflashmoe_trace.so"
    library.touch()
    monkeypatch.setattr(capture, "LIBRARY", library)
    monkeypatch.setattr(capture, "KernelBackend", ReferenceBackend)
    monkeypatch.setattr(capture, "Recorder", recorder)
    monkeypatch.setattr("tools.bench.common.has_gpu", lambda: True)
    monkeypatch.setattr("tools.bench.common.use_library", lambda path: None)
    with pytest.raises(SystemExit if kind is SpoiltLayer else BehindTheGate) as raised:
        timeline.main(["capture", "--shape", "paper-1k", "--out", str(tmp_path)])
    if kind is SpoiltLayer:
        assert str(raised.value).startswith("paper-1k: relative L2 error 0.01")


def test_a_backend_without_early_gradients_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("tools.bench.bench_layer.wait_for_all", lambda: None)
    problem = make(1, gated=False)
    layer = FusedLayer(problem, ReferenceBackend(problem.config), use_main_grad=True)
    with pytest.raises(SystemExit, match="are not early"):
        early_timing(layer, 1)


def test_a_turn_is_timed_once_its_calls_have_run_for_a_while() -> None:
    """So its clock is one that its own calls have settled."""
    called: list[float] = []
    stopwatch.turn_ms(lambda: called.append(time.monotonic()), 3)
    assert len(called) == 4
    called.clear()
    begin = time.monotonic()
    stopwatch.turn_ms(lambda: called.append(time.monotonic()), 3, settle_ms=20)
    assert called[-4] - begin >= 0.02
    assert len(called) % 3 == 1


@pytest.mark.parametrize(("settle_ms", "warm_up"), [(0.0, "abc cba "), (0.5, "")])
def test_every_other_turn_has_the_opposite_order(settle_ms: float, warm_up: str) -> None:
    """So no kind is always timed after one that has left the GPU idle."""
    called: list[str] = []

    def take(name: str) -> int:
        called.append(name)
        return len(called)

    takers = {name: partial(take, name) for name in "abc"}
    taken = stopwatch.in_turns(takers, 4, settle_ms)
    assert "".join(called) == (warm_up + "abc cba abc cba").replace(" ", "")
    first = len(called) - 12
    found = {name: [at - first for at in times] for name, times in taken.items()}
    assert found == {"a": [1, 6, 7, 12], "b": [2, 5, 8, 11], "c": [3, 4, 9, 10]}


@pytest.mark.parametrize("turns", [-2, 0, 1, 7])
def test_turns_that_would_favour_a_kind_are_refused_before_any_is_taken(turns: int) -> None:
    called: list[int] = []
    wanted = f"got {turns}, wanted an even number, at least 2: every other turn has the opposite"
    with pytest.raises(ValueError, match=wanted):
        stopwatch.in_turns({"a": lambda: called.append(1)}, turns)
    assert not called
