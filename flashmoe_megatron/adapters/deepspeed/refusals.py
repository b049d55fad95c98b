"""Why a layer of the right structure cannot be served on this machine or in this engine."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashmoe_megatron.adapters.deepspeed.layers import LayerInfo
from flashmoe_megatron.adapters.deepspeed.settings import SECTION, Settings
from flashmoe_megatron.checks import KERNEL_DTYPES, check_fp8, check_kernel_experts
from flashmoe_megatron.errors import ConfigError, FlashMoEError
from flashmoe_megatron.hosts.grid import arrange
from flashmoe_megatron.replicas.policy import check_slots
from flashmoe_megatron.select import resolve_kind


def engine_problem(engine: Any) -> str | None:
    """Says what about an engine keeps all of its layers from being served."""
    if engine.torch_autocast_enabled():
        return (
            "torch_autocast is enabled; enable bf16 or fp16 instead, with parameters in that dtype"
        )
    return None


def layer_problem(info: LayerInfo, settings: Settings, device: torch.device) -> str | None:
    """Says what keeps this rank's device from serving a layer, with the way out."""
    try:
        kind = resolve_kind(settings.backend, device, info.dtype)
        shape = dataclasses.replace(info.shape, experts=settings.experts)
        check_fp8(shape, info.dtype, transposed=False, has_biases=any(info.biases))
        if kind == "kernel":
            check_kernel_experts(shape)
            from flashmoe_megatron.kernel import bindings

            bindings.load_on_gpu()
    except FlashMoEError as error:
        return str(error)
    try:
        check_slots(shape, settings.spare_slots, settings.placement)
    except FlashMoEError as error:
        return str(error)
    if kind == "kernel":
        return kernel_problem(info)
    if info.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return None
    return (
        f"its experts are {info.dtype}, wanted bfloat16, float16 or float32; enable bf16 or fp16 "
        "in the DeepSpeed configuration"
    )


def replicas_problem(info: LayerInfo, zero_stage: int, settings: Settings) -> str | None:
    """Says what keeps a layer's experts from having replicas, if these are asked for."""
    if not settings.filled_slots and not settings.host_slots:
        return None
    name = "spare_slots" if settings.filled_slots else "host_slots"
    asked = f"{SECTION}.{name} is {getattr(settings, name)}"
    if settings.filled_slots and settings.placement == "lookahead":
        return (
            f'{SECTION}.placement is "lookahead", which needs to see a layer\'s input before its '
            'attention, and DeepSpeed has no layer around both; wanted "launch" or "off"'
        )
    if zero_stage == 3:
        return (
            f"{asked} with ZeRO stage 3, which frees the experts' weights between calls; wanted "
            f"stage 2 or less, or {SECTION}.{name} 0"
        )
    if info.is_split:
        return (
            f"{asked} and its experts' gate and up projections are not one parameter with the gate "
            "first, and of others DeepSpeed's layers have no replicas; wanted "
            f"{SECTION}.{name} 0"
        )
    return None


def kernel_problem(info: LayerInfo) -> str | None:
    """Says what keeps the kernel from serving a layer that other backends may serve."""
    if info.dtype not in KERNEL_DTYPES:
        return (
            f"its experts are {info.dtype} and the kernel computes in bfloat16 or float16; enable "
            f'bf16 or fp16 in the DeepSpeed configuration, or set {SECTION}.backend to "auto"'
        )
    if info.biases[0] != info.biases[1]:
        has, lacks = ("first", "second") if info.biases[0] else ("second", "first")
        return (
            f"its experts have a bias in the {has} projection and none in the {lacks}, and the "
            "kernel computes biases of both; give both one or none, or set "
            f'{SECTION}.backend to "scheduled"'
        )
    return None


def hosts_problem(ranks: Sequence[int], hosts: Mapping[int, str], settings: Settings) -> str | None:
    """Says what keeps an expert-parallel group from spanning its ranks' hosts."""
    try:
        grid = arrange([hosts[rank] for rank in ranks], 0)
    except ConfigError as error:
        return str(error)
    if settings.filled_slots and grid.num_hosts > 1 and grid.ranks_per_host == 1:
        return (
            f"its expert-parallel group {list(ranks)} spans {grid.num_hosts} hosts of one rank, "
            f"which has all of its host's experts; set {SECTION}.spare_slots to 0"
        )
    return None
