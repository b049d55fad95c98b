"""Other libraries' layers on one GPU, and ours: each is one small function, entered in ``PEERS``.

An adapter takes a problem whose experts are one stack each, and gives the layer as its library
offers it: for training, with the routing that all of them get, and gradients of weights as tensors
of their own. It imports its library when it is called; a missing library is an ImportError.
The comments say which versions an adapter was written for.
"""

import atexit
import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.problem import Problem
from flashmoe_megatron.bench.unfused import GroupedWeights, unfused_layer
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.weights import ExpertWeights

ROW_BOUND = 1.05
"""Rows of one of our launches, as a multiple of the routes, which are all on this GPU."""

Grads = Sequence[torch.Tensor]


class Layer(NamedTuple):
    """One library's layer.

    Attributes:
        forward: Computes ``[tokens, hidden]``.
        leaves: What gets gradients: tokens, routing weights ``[tokens, topk]``, and then the
            weights as the library holds them.
        stacks: Makes ``[num_experts, fc1_rows, hidden]`` and ``[num_experts, hidden,
            intermediate]`` of the gradients of the weights.
        tells_kept: Whether what a forward keeps is allocated by torch, and can be counted.
    """

    forward: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, ...]
    stacks: Callable[[Grads], Grads] = tuple
    tells_kept: bool = True


def stacked(problem: Problem) -> Problem:
    """The same problem with all experts in one tensor for each projection."""
    fc1, fc2 = (
        torch.stack([weight.detach() for weight in weights]).requires_grad_()
        for weights in (problem.weights.fc1, problem.weights.fc2)
    )
    return dataclasses.replace(problem, weights=ExpertWeights((fc1,), (fc2,)))


def _flashmoe(problem: Problem, **options: Any) -> Layer:
    kind = "kernel" if stopwatch.HAS_GPU else "reference"
    options |= {"kind": kind, "row_bound": ROW_BOUND, "reserved_sms": 0}
    backend = select_backend(problem.config, None, problem.x.device, **options)
    routing = {"topk_idx": problem.topk_idx, "topk_weight": problem.topk_weight}
    leaves = (problem.x, problem.topk_weight, *problem.parameters)
    return Layer(
        partial(moe_apply, backend, problem.x, None, None, problem.weights, **routing), leaves
    )


def _torch(problem: Problem) -> Layer:
    """Torch's grouped products between permutations."""
    weights = GroupedWeights.of(dataclasses.replace(problem, weights=problem.weights.per_expert()))
    leaves = (problem.x, problem.topk_weight, weights.fc1, weights.fc2)

    def stacks(grads: Grads) -> Grads:
        return [grad.transpose(1, 2) for grad in grads]

    return Layer(partial(unfused_layer, problem, weights), leaves, stacks)


SONICMOE_TILES = {"256x128": False, "256x192": False, "128x256": False, "128x192": True}
"""The tiles that QuACK tries for each product, and whether two warpgroups alternate with them; it
would try 44 variants."""


def _sonicmoe(problem: Problem) -> Layer:
    """SonicMoE 0.1.2.post1 with quack-kernels 0.3.11 and nvidia-cutlass-dsl 4.4.2 (cu13)."""
    os.environ.setdefault("QUACK_COMPILE_WORKERS", "1")  # others import everything once a product
    from quack import gemm_config

    few = []
    for name, takes_turns in SONICMOE_TILES.items():
        config = gemm_config.GemmConfig(*map(int, name.split("x")), takes_turns)
        few.append(dataclasses.replace(config, is_dynamic_persistent=False))  # as on any Hopper GPU
    gemm_config.get_all_configs = lambda *_, **__: few  # asked once, in the import below
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import TC_topk_router_metadata_triton as sort_choices
    from sonicmoe.functional import _DownProjection, _UpProjection

    x, weight = problem.x, problem.topk_weight
    choices = problem.topk_idx.int()
    (fc1,), (fc2,) = problem.weights.fc1, problem.weights.fc2
    tokens, topk = choices.shape
    num_experts = problem.config.num_experts
    swiglu = ActivationType.SWIGLU

    def indices(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=x.device)

    def forward() -> torch.Tensor:
        counts, ends = indices(num_experts), indices(num_experts + 1)
        order = [indices(tokens * topk) for _ in range(3)]
        sort_choices(choices, num_experts, counts, ends, *order)
        is_inference = not torch.is_grad_enabled()
        hidden = _UpProjection.apply(
            *(x, fc1.permute(1, 2, 0), None, ends, tokens * topk, topk, *order),
            *(None, False, swiglu, is_inference, True),  # the last: gate rows before up rows
        )
        out: torch.Tensor = _DownProjection.apply(
            *(*hidden, fc2.permute(1, 2, 0), None, weight, ends, tokens, topk, *order),
            *(None, False, swiglu),
        )
        return out

    return Layer(forward, (x, weight, fc1, fc2))


def _liger(problem: Problem) -> Layer:
    """The Triton kernels of liger-kernel 0.8.5, with few of their 270 variants a layer."""
    from liger_kernel.ops import fused_moe_kernels
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    for tuner in vars(fused_moe_kernels).values():
        if hasattr(tuner, "configs"):
            wide = [
                one
                for one in tuner.configs
                if one.num_warps == 8
                and one.kwargs.get("BLOCK_N", 128) == 128
                and one.kwargs.get("BLOCK_H", 512) == 512
            ]
            tuner.configs = [one for one in wide if one.num_stages in (3, 4)] or wide
    choices = problem.topk_idx.int()
    leaves = (problem.x, problem.topk_weight, *problem.parameters)
    x, weight, fc1, fc2 = leaves
    return Layer(partial(LigerFusedMoEFunction.apply, x, fc1, fc2, choices, weight), leaves)


def _ligercute(problem: Problem) -> Layer:
    """liger-cute-kernels 0.8.5 with what it was linked against: NVSHMEM 3.6.5 and CUDA 12."""
    import liger_cute_kernels
    from liger_cute_kernels import nvshmem
    from liger_kernel.ops.cute.ops.moe import moe_fused

    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        atexit.register(nvshmem.finalize)
    else:
        nvshmem.pool_clear_all()  # the last shape's sizes
    tokens, topk = problem.topk_idx.shape
    num_experts, intermediate = problem.config.num_experts, problem.config.intermediate
    hosts = {"num_hosts": 1, "gpus_per_host": 1}
    sizes = liger_cute_kernels.MoEConfig(tokens, problem.config.hidden, num_experts, topk, **hosts)
    liger_cute_kernels.configure(device=problem.x.device, moe=sizes)
    (fc1,), (fc2,) = problem.weights.fc1, problem.weights.fc2
    gate, up = (
        half.contiguous().requires_grad_() for half in fc1.detach().split(intermediate, dim=1)
    )
    choices = problem.topk_idx.int()
    leaves = (problem.x, problem.topk_weight, gate, up, fc2)
    inputs = (problem.x, choices, *leaves[1:], num_experts, topk, None)

    def stacks(grads: Grads) -> Grads:
        return torch.cat(list(grads[:2]), dim=1), grads[2]

    return Layer(partial(moe_fused, *inputs), leaves, stacks, tells_kept=False)


PEERS: dict[str, Callable[[Problem], Layer]] = {
    "flashmoe": partial(_flashmoe, keep="all"),
    "flashmoe-preactivations": partial(_flashmoe, keep="preactivations"),
    "sonicmoe": _sonicmoe,
    "liger": _liger,
    "torch": _torch,
    "ligercute": _ligercute,
}
"""By name, in the order of the tables."""
