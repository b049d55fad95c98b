"""Holds experts' gradients behind Megatron's DDP on a GPU against alltoall's.

    python -m tests.megatron.gradients_on_gpu

Needs one GPU and Transformer Engine. A layer is called once, twice and three times in the backward
passes of three iterations of two micro-batches, whose last ones have a penalty on the experts'
weights. With Megatron's fusion, alltoall adds nothing of the penalty, and neither may flashmoe.
Every case is a line with the largest relative error of an expert's gradient; the exit status is 1
if one is too large, or if the gradients did not go through the kernel.
"""

import contextlib
import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron.layers import make_layer
from tools.bench import common

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 2048, 1024, 512, 16, 4
CALLS = (1, 2, 3)
TOLERANCE = 2e-2
"""Both sides compute in bfloat16 and round in other places."""


def experts_of(model: str) -> dict[str, Any]:
    """Returns the fields of Megatron's configuration that give a model's experts."""
    if model == "SwiGLU":
        silu = torch.nn.functional.silu
        return {"activation_func": silu, "add_bias_linear": False, "moe_router_dtype": "fp32"}
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    # The router's bias is bfloat16, which its product in float32 would misread.
    return {
        "activation_func": quick_gelu,
        "add_bias_linear": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
    }


def make_model(
    dispatcher: str, model: str, *, fuses: bool, overlap: bool, distributed: bool
) -> Any:
    """One layer in Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=16,
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=INTERMEDIATE,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        gated_linear_unit=True,
        bias_activation_fusion=True,
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=fuses,
        moe_token_dispatcher_type=dispatcher,
        **experts_of(model),
    )
    layer = make_layer(config, use_te=True).cuda()
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=distributed,
        bucket_size=3_000_000,
    )
    return DistributedDataParallel(config, ddp_config, layer)


def gradients(ddp: Any, *, overlap: bool) -> list[dict[str, torch.Tensor]]:
    """Every expert's gradient after each iteration."""
    found = []
    experts = ddp.module.experts
    for iteration, calls in enumerate(CALLS):
        ddp.zero_grad_buffer()
        for micro_batch in range(2):
            with ddp.no_sync() if overlap and not micro_batch else contextlib.nullcontext():
                torch.manual_seed(100 * iteration + micro_batch)
                # Tokens of their own for each call: from another call's output, whose rounding
                # differs between dispatchers, some tokens would get other experts.
                shape = (calls, TOKENS, 1, HIDDEN)
                xs = torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_()
                loss = sum((x + ddp(x)[0]).float().square().mean() for x in xs)
                if micro_batch:
                    loss = loss + 1e-3 * sum(
                        each.float().square().sum() for each in experts.parameters()
                    )
                loss.backward()
        ddp.finish_grad_sync()
        named = experts.named_parameters()
        found.append({name: each.main_grad.clone() for name, each in named})
    return found


def largest_error(
    model: str, *, fuses: bool, overlap: bool, distributed: bool
) -> tuple[float, str]:
    """Compares a case's gradients with alltoall's without overlap; names the worst, too."""
    kinds = {"fuses": fuses, "distributed": distributed}
    stock = gradients(make_model("alltoall", model, overlap=False, **kinds), overlap=False)
    fused = make_model("flashmoe", model, overlap=overlap, **kinds)
    found = gradients(fused, overlap=overlap)
    routed = fused.module.flashmoe_routed_experts
    if type(routed.backend).__name__ != "KernelBackend" or routed._hooks is None:
        raise SystemExit(f"{routed.backend} did not add to main_grad, wanted the kernel")
    errors = {
        f"{name}, iteration {iteration}": float((got[name] - want[name]).norm() / want[name].norm())
        for iteration, (got, want) in enumerate(zip(found, stock, strict=True), 1)
        for name in want
    }
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def main() -> int:
    """The command line."""
    if not common.has_gpu():
        return 2
    from megatron.core import parallel_state

    from flashmoe_megatron.adapters.megatron import configure, install

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    install()
    configure(max_tokens=TOKENS)
    is_right = True
    print("| experts | fusion | overlap | distributed optimizer | largest error | of |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model, *kinds in itertools.product(("SwiGLU", "GPT-OSS's"), *[(False, True)] * 3):
        fuses, overlap, distributed = kinds
        error, worst = largest_error(model, fuses=fuses, overlap=overlap, distributed=distributed)
        is_right &= error < TOLERANCE
        print(
            f"| {model} | {fuses} | {overlap} | {distributed} | {error:.1e} | {worst} |", flush=True
        )
    dist.destroy_process_group()
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
