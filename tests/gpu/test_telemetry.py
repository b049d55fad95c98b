"""Records of real launches, and that reading and reducing them waits for nothing, on one GPU."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.telemetry.metrics import compute_metrics
from flashmoe_megatron.telemetry.record import LaunchRecord, Phase
from flashmoe_megatron.telemetry.registry import METRICS
from flashmoe_megatron.telemetry.reporter import Reduction, Reporter
from flashmoe_megatron.telemetry.totals import LayerPlace, Layout, Totals
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps
from tests.gpu.layers import make_config
from tests.gpu.spinner import Spinner
from tests.gpu.virtual import device
from tests.unit import cases

pytestmark = pytest.mark.gpu

CONFIG = make_config(1)
LAYER = 7
NUM_TOKENS = 300


class Run:
    """One layer that can be called again and again."""

    def __init__(
        self, config: MoEConfig = CONFIG, num_tokens: int = NUM_TOKENS, *, counters: bool = True
    ) -> None:
        memory = GroupMemory(None, device(), BackendOptions(counters=counters))
        self.backend = KernelBackend(config, None, device(), memory=memory, rank=0)
        self.inputs = steps.make_inputs(config, cases.with_empty_experts, [num_tokens])
        num_sms = torch.cuda.get_device_properties(device()).multi_processor_count
        self.places = {LAYER: LayerPlace(config, 0, num_sms=num_sms)}

    def __call__(self) -> None:
        x = self.inputs.x[0].clone().requires_grad_()
        weights = ExpertWeights(tuple(self.inputs.fc1), tuple(self.inputs.fc2))
        probs, routing_map = self.inputs.probs[0], self.inputs.routing_map[0]
        out = moe_apply(self.backend, x, probs, routing_map, weights, layer=LAYER)
        out.backward(self.inputs.grad_out[0])

    def records(self, times: int = 1) -> list[LaunchRecord]:
        for _ in range(times):
            self()
        torch.cuda.synchronize()
        return self.backend.take_records()


def test_a_launch_that_does_not_count_tells_nothing() -> None:
    run = Run(counters=False)
    assert run.records(times=2) == []
    assert run.backend.traffic.pad_rows_local == 0


def test_a_launch_tells_of_itself() -> None:
    run = Run()
    taken = run.records(times=2)
    assert run.backend.take_records() == []
    assert [(one.layer, one.direction) for one in taken] == [
        (LAYER, "forward"),
        (LAYER, "backward"),
    ] * 2
    epochs = [one.epoch for one in taken]
    assert epochs == sorted(set(epochs))
    selected = run.inputs.routing_map[0]
    for one in taken:
        assert one.num_tokens == NUM_TOKENS
        assert list(one.expert_rows) == selected.sum(0).tolist()
        assert one.num_rows == int(selected.sum())
        assert one.num_row_blocks == sum(-(-rows // 128) for rows in one.expert_rows)
        assert one.rows_pulled == (0,), "narrow experts on one GPU read rows where they are"
        assert one.num_ctas == run.backend.num_ctas
    for earlier, later in itertools.pairwise(taken):
        assert 0 < earlier.begin_ns < earlier.end_ns <= later.begin_ns


def test_the_phases_of_the_processors_are_the_launch() -> None:
    # Several tiles for every CTA: to one that has none nearly all of a launch is tail.
    config = make_config(1, hidden=2048, intermediate=768, num_experts=8, topk=2, max_tokens=4096)
    for one in Run(config, 4096).records(times=3)[2:]:
        assert set(Phase) - {Phase.REDUCE} <= set(one.phase_ns)
        assert all(spent >= 0 for spent in one.phase_ns.values()), one.phase_ns
        for phase in (Phase.HEAD, Phase.STAGE_WAIT, Phase.GEMM):
            assert one.phase_ns[phase] > 0, one.phase_ns
        # The tail is what these leave of the launch, and would be 0 if they left less than nothing.
        counted = (Phase.HEAD, Phase.STAGE_WAIT, Phase.GEMM, Phase.EPILOGUE)
        assert sum(one.phase_ns[phase] for phase in counted) <= one.duration_ns, one.phase_ns
        assert one.phase_ns[Phase.TAIL] < one.duration_ns / 2, one.phase_ns


def test_metrics_of_real_launches() -> None:
    run = Run(make_config(1, intermediate=704))  # which fetches rows
    selected = run.inputs.routing_map[0]
    totals = Totals(Layout(run.places), run.places)
    for one in run.records(times=4):
        # A token's row is fetched once, whatever the number of its experts here.
        assert one.rows_pulled == (int(selected.any(1).sum()),)
        totals.add(one)
    values = compute_metrics(totals, METRICS)
    for direction in ("forward", "backward"):
        for name in ("hidden_communication", "sm_utilization", "tensor_core_fed"):
            assert 0 <= values[f"flashmoe/{direction}/{name}"] <= 1
        assert values[f"flashmoe/{direction}/sm_utilization"] > 0.8
        assert values[f"flashmoe/{direction}/layer_ms"] > 0
        assert values[f"flashmoe/{direction}/mib_sent"] == 0
    shared = float(selected.any(1).sum() / selected.sum())
    assert values["flashmoe/deduplication"] == pytest.approx(shared)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of NCCL with this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_reduction_on_the_gpu(world: dist.ProcessGroup) -> None:
    run = Run()
    totals = Totals(Layout(run.places), run.places)
    for one in run.records():
        totals.add(one)
    reduced = Reduction(totals, world, device()).result()
    assert reduced.sums() == totals.sums()
    assert reduced.maxima() == totals.maxima()


def test_reports_wait_for_no_device(world: dist.ProcessGroup) -> None:
    """While the GPU is busy, steps return, and what it has not finished comes later."""
    run, written = Run(), []

    class Sink:
        def write(self, values: dict[str, float], *, step: int, now: int) -> None:
            written.append((step, now, values))

    reporter = Reporter(
        run.places,
        world,
        device(),
        chosen=frozenset({"layer_ms"}),
        take_records=run.backend.take_records,
        sinks=[Sink()],
    )
    run()
    torch.cuda.synchronize()
    reporter.step(1)
    torch.cuda.synchronize()
    spinner = Spinner()
    with spinner.hold(1):
        torch.cuda.current_stream().wait_stream(spinner.stream)
        torch.cuda.set_sync_debug_mode("error")
        try:
            reporter.step(2)  # after the kernel that holds the stream up
            reporter.step(3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert spinner.is_running, "a step waited for the GPU"
    assert [(step, now) for step, now, _ in written] == [(1, 2)]
    reporter.step(4, is_last=True)
    assert [(step, now) for step, now, _ in written] == [(1, 2), (2, 4), (3, 4), (4, 4)]
    assert set(written[0][2]) == {
        "flashmoe/forward/layer_ms",
        "flashmoe/backward/layer_ms",
    }


def test_routes_are_read_late() -> None:
    pytest.importorskip("deepspeed")
    from flashmoe_megatron.adapters.deepspeed.routes import RouteCounter, RouteReader

    counter = RouteCounter(device())
    reader = RouteReader([counter])
    counter.count(torch.tensor([3, 1], device=device()), torch.tensor([0, -1], device=device()))
    assert reader.read() == (0, 0)
    torch.cuda.synchronize()
    assert reader.read() == (4, 1)
