"""The layer as a model calls it, on one GPU: through autograd, hooks and profilers watching."""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from flashmoe_megatron.autograd import accumulator_of, moe_apply
from flashmoe_megatron.config import Keep
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.backend import KernelBackend
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu import steps
from tests.gpu.expected import assert_as_good, expected
from tests.gpu.layers import make_config
from tests.gpu.virtual import device
from tests.unit import cases

pytestmark = pytest.mark.gpu

CONFIG = make_config(1)


class Model:
    """One layer with parameters, and what its backward should leave.

    Args:
        routing: Which experts tokens choose.
        stacked: Whether there is one parameter for all experts instead of one for each.
        row_bound: See :class:`BackendOptions`.
    """

    def __init__(
        self,
        routing: cases.Routing = cases.with_empty_experts,
        *,
        stacked: bool = False,
        row_bound: float | None = None,
    ) -> None:
        options = BackendOptions(row_bound=row_bound)
        memory = GroupMemory(None, device(), options)
        self.backend = KernelBackend(CONFIG, None, device(), memory=memory, rank=0, options=options)
        self.inputs = steps.make_inputs(CONFIG, routing, [300])
        self.want = expected(CONFIG, self.inputs)
        self.x = self.inputs.x[0].clone().requires_grad_()
        self.probs = self.inputs.probs[0].clone().requires_grad_()
        self.fc1, self.fc2 = (
            [torch.nn.Parameter(one) for one in ([torch.stack(each)] if stacked else each)]
            for each in (self.inputs.fc1, self.inputs.fc2)
        )

    def forward(self, *, accumulate_into_main_grad: bool = False) -> torch.Tensor:
        return moe_apply(
            self.backend,
            self.x,
            self.probs,
            self.inputs.routing_map[0],
            ExpertWeights(tuple(self.fc1), tuple(self.fc2)),
            accumulate_into_main_grad=accumulate_into_main_grad,
        )

    def make_main_grads(
        self, dtype: torch.dtype = torch.float32
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Gives each weight a ``main_grad`` of zeros; returns fc1's and fc2's."""
        fc1, fc2 = (steps.make_main_grads(each, dtype) for each in (self.fc1, self.fc2))
        return fc1, fc2

    def check(self, out: torch.Tensor, fc1: list[torch.Tensor], fc2: list[torch.Tensor]) -> None:
        per_expert = (
            torch.cat([grad.view(-1, *grad.shape[-2:]) for grad in each]) for each in (fc1, fc2)
        )
        got = steps.Results(out.detach(), self.x.grad, self.probs.grad, *per_expert)
        assert_as_good(got, self.want)


@pytest.mark.parametrize("stacked", [False, True], ids=["per expert", "stacked"])
def test_ordinary_gradients(stacked: bool):
    model = Model(stacked=stacked)
    out = model.forward()
    out.backward(model.inputs.grad_out[0])
    for results in (model.want.unfused,):
        results.grad_fc1 = results.grad_fc1.bfloat16()
        results.grad_fc2 = results.grad_fc2.bfloat16()
    grads = ([w.grad for w in each] for each in (model.fc1, model.fc2))
    model.check(out, *grads)


@pytest.mark.parametrize("stacked", [False, True], ids=["per expert", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_main_grad(dtype: torch.dtype, stacked: bool):
    model = Model(stacked=stacked)
    main_grads = model.make_main_grads(dtype)
    parameters = model.fc1 + model.fc2
    for parameter in parameters:
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    out = model.forward(accumulate_into_main_grad=True)
    out.backward(model.inputs.grad_out[0])
    assert all(vars(parameter)["grad_added_to_main_grad"] for parameter in parameters)
    model.want.unfused.grad_fc1 = model.want.unfused.grad_fc1.to(dtype)
    model.want.unfused.grad_fc2 = model.want.unfused.grad_fc2.to(dtype)
    model.check(out, *main_grads)


def test_a_thread_may_begin_with_the_library():
    """Autograd's thread does where a layer's backward is the first: it has no current context."""
    model = Model()
    backend, array = model.backend, ctypes.c_void_p * CONFIG.num_local_experts
    problem, buffer = backend._describe(), torch.empty(2**20, dtype=torch.uint8)
    fc1, fc2 = (array(*(weight.data_ptr() for weight in each)) for each in (model.fc1, model.fc2))
    with ThreadPoolExecutor(1) as pool:
        given = problem, fc1, fc2, None, buffer.data_ptr()
        pool.submit(bindings.call, "encode_weights", *given).result()


@pytest.mark.parametrize(
    ("keep", "launches"),
    [
        ("preactivations", [("forward", 1), ("backward", 2)]),  # it reads tokens, and fetches none
        ("inputs", [("forward", 1), ("forward", 2), ("backward", 3)]),
    ],
)
def test_what_is_not_kept_is_the_same_again(keep: Keep, launches: list[tuple[str, int]]):
    whole, lean = Model(), Model()
    lean.backend.keep = keep
    outs = []
    for model in (whole, lean):
        outs.append(model.forward())
        outs[-1].backward(model.inputs.grad_out[0])
    assert torch.equal(*outs)
    parameters = ([m.x, m.probs, *m.fc1, *m.fc2] for m in (whole, lean))
    for want, got in zip(*parameters, strict=True):
        assert torch.equal(got.grad, want.grad)
    torch.cuda.synchronize()
    for model, made in ((whole, [("forward", 1), ("backward", 2)]), (lean, launches)):
        records = model.backend.take_records()
        assert [(record.direction, record.epoch) for record in records] == made


@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
def test_torch_never_synchronizes(accumulate: bool):
    """The only wait of the host is the plan's, for a word in its own memory."""
    model = Model()
    model.make_main_grads()
    for is_checked in (False, True):  # the first call may allocate and encode
        torch.cuda.set_sync_debug_mode("error" if is_checked else "default")
        try:
            out = model.forward(accumulate_into_main_grad=accumulate)
            out.backward(model.inputs.grad_out[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_forward_that_keeps_nothing_is_one_kernel():
    model = Model()
    with torch.no_grad():
        for _ in range(2):
            model.forward()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            model.forward()
            torch.cuda.synchronize()
    on_gpu = [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]
    kernels = [name for name in on_gpu if not name.startswith(("Memcpy", "Memset"))]
    assert len(kernels) == 1, on_gpu
    assert "layer_kernel" in kernels[0], on_gpu
    assert len(on_gpu) == 1, on_gpu


class AllInMainGrad:
    """Has every backward add all weights' gradients to ``main_grad``, as behind Megatron's DDP."""

    gives_dummies = False

    def begin(self, accumulators: Sequence[Any] | None) -> None:
        assert accumulators is None, "the pass runs all accumulators"

    def is_due(self) -> bool:
        return False


def test_a_graph_is_captured_after_steps_on_another_stream() -> None:
    """As with Megatron's graphs of whole iterations, whose first iterations run without a graph."""
    model = Model(row_bound=4.0)
    weights = [*model.fc1, *model.fc2]
    capturing = torch.cuda.Stream()
    with torch.cuda.stream(capturing):
        accumulators = [accumulator_of(weight) for weight in weights]  # as DDP does
    main_grads = model.make_main_grads()

    def step() -> torch.Tensor:
        model.x.grad = model.probs.grad = None
        out = moe_apply(
            model.backend,
            model.x,
            model.probs,
            model.inputs.routing_map[0],
            ExpertWeights(tuple(model.fc1), tuple(model.fc2)),
            main_grads=AllInMainGrad(),
        )
        out.backward(model.inputs.grad_out[0])
        return out

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capturing):
        out = step()
    for one in (*main_grads[0], *main_grads[1]):
        one.zero_()
    graph.replay()
    torch.cuda.synchronize()
    model.check(out, *main_grads)
    del accumulators
