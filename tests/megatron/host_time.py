"""How long a layer keeps the host, forward and backward, without a GPU.

    python -m tests.megatron.host_time --experts te_grouped one_weight sequential

What runs on the host in a training is real: the layer and its experts, Megatron's DDP with both
overlaps and its hooks, autograd, tables and operators. Only the library's functions that launch do
nothing, and processors stand for the GPU. Times are of micro-batches that are not the last ones;
with ``--last`` of last ones, without what reduces their gradients.
"""

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.megatron.grouped import grouped_experts
from tests.megatron.harness import Layout, prepare, transformer_config
from tests.megatron.layers import make_layer

KINDS = ("te_grouped", "one_weight", "sequential")
"""Experts with a parameter for each weight in one module, for all weights, or in many modules."""
TOKENS, WIDTH = 64, 128


def stand_in_for_the_gpu() -> None:
    """Lets the kernel's backend run on processors, and its library launch nothing."""
    from flashmoe_megatron.adapters import experts
    from flashmoe_megatron.adapters.megatron import routed
    from flashmoe_megatron.kernel import backend, bindings, symmetric
    from flashmoe_megatron.options import BackendOptions

    library = bindings.load()

    def await_plan(problem: Any, group: Any, blocks: Any, *_: Any) -> int:
        blocks._obj.value = 4
        return bindings.OK

    def function(name: str) -> Callable[..., int]:
        if name == "sizes":
            found: Callable[..., int] = library.flashmoe_sizes
            return found
        return await_plan if name == "await_plan" else lambda *_: bindings.OK

    class OnProcessor(backend.KernelBackend):
        def __init__(self, config: Any, **options: Any) -> None:
            super().__init__(config, None, "cpu:0", options=BackendOptions(**options))
            self.device = self.memory.device = self._tables._device = torch.device("cpu")

    replaced: list[tuple[Any, str, Any]] = [
        (bindings, "function", functools.cache(function)),
        (symmetric, "allocate", lambda *_: symmetric.SymmetricAllocation(torch.empty(0), (4096,))),
        (
            experts,
            "select_backend",
            lambda config, *_, kind, dtype, tensor_group, **more: OnProcessor(config, **more),
        ),
        (routed, "read_calibration", lambda *_, **__: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (
            torch.cuda,
            "get_device_properties",
            lambda *_: SimpleNamespace(multi_processor_count=132),
        ),
        (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
        (torch.Tensor, "pin_memory", lambda tensor: tensor),
    ]
    for owner, name, replacement in replaced:
        setattr(owner, name, replacement)


def make_experts_one_weight(layer: Any) -> None:
    """Holds each projection's weights as Transformer Engine's one parameter for all does."""
    for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        names = [f"weight{index}" for index in range(linear.num_gemms)]
        stack = torch.nn.Parameter(torch.stack([getattr(linear, name).detach() for name in names]))
        for name in names:
            linear.register_parameter(name, None)
        linear.single_grouped_weight, stack.rowwise_data = True, stack.detach().view(-1)
        linear.register_parameter("weight", stack)


def microseconds(
    kind: str, num_experts: int, calls: int, *, is_last: bool = False
) -> tuple[list[float], list[float]]:
    """The times of forwards and of their backwards."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    config = transformer_config(
        Layout(),
        "flashmoe",
        hidden_size=WIDTH,
        moe_ffn_hidden_size=WIDTH,
        num_moe_experts=num_experts,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    experts = None if kind == "sequential" else grouped_experts("te_grouped")
    layer = make_layer(config, experts).bfloat16()
    if kind == "one_weight":
        make_experts_one_weight(layer)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        grad_reduce_in_fp32=True,
    )
    model = DistributedDataParallel(config, ddp_config, layer)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(TOKENS, num_experts, requires_grad=True)
    routing_map = torch.zeros(TOKENS, num_experts, dtype=torch.bool)
    routing_map[:, :2] = True
    forwards, backwards = [], []
    # The backend compares it with its device's number, and "cpu" has none.
    with (
        contextlib.nullcontext() if is_last else model.no_sync(),
        mock.patch.object(torch._C, "_cuda_getDevice", return_value=None, create=True),
        mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync"),
    ):
        for _ in range(calls + 20):  # the first ones make tables
            begin = time.perf_counter()
            out = layer.flashmoe_routed_experts(x, probs, routing_map)
            middle = time.perf_counter()
            out.backward(torch.ones_like(out))
            forwards.append(1e6 * (middle - begin))
            backwards.append(1e6 * (time.perf_counter() - middle))
    if layer.flashmoe_routed_experts._hooks is None:
        raise RuntimeError("gradients go through autograd, wanted them in main_grad")
    return forwards[20:], backwards[20:]


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--last", action="store_true", help="time last micro-batches")
    parser.add_argument("--keep", default="all", help="as --flashmoe-keep")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    prepare(Layout(), max_tokens=TOKENS, keep=options.keep)
    stand_in_for_the_gpu()
    print("| experts | forward, best (median), us | backward, best (median), us |", flush=True)
    print("| --- | --- | --- |")
    for kind in options.experts:
        times = microseconds(kind, options.num_experts, options.calls, is_last=options.last)
        told = " | ".join(f"{min(each):.0f} ({statistics.median(each):.0f})" for each in times)
        print(f"| {kind} | {told} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
