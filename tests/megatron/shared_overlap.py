"""Times a MoE layer of Megatron with a shared expert, its overlap on and off.

    python -m tests.megatron.shared_overlap --dispatcher flashmoe alltoall

Needs one GPU and Transformer Engine. Forward and backward of one layer on all its experts, as it
trains: the experts' gradients are added to ``main_grad`` where flashmoe computes them. With and
without take turns, each a row of calls that follow one another without a pause.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flashmoe_megatron.bench import stopwatch
from tests.megatron.layers import make_layer
from tools.arguments import fair_turns
from tools.bench import common

CALLS = 8
"""Calls of a turn."""


class Sizes(NamedTuple):
    """A layer's sizes; ``shared`` is the intermediate size of its shared expert."""

    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    shared: int


LAYERS = {
    "Moonlight": Sizes(8192, 2048, 1408, 64, 6, 2816),
    "DeepSeek-V3 with 64 experts": Sizes(4096, 7168, 2048, 64, 8, 2048),
}


def settings(sizes: Sizes, dispatcher: str, *, overlaps: bool) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig."""
    return {
        "hidden_size": sizes.hidden,
        "moe_ffn_hidden_size": sizes.intermediate,
        "num_moe_experts": sizes.num_experts,
        "moe_router_topk": sizes.topk,
        "moe_shared_expert_intermediate_size": sizes.shared,
        "moe_shared_expert_overlap": overlaps,
        "moe_token_dispatcher_type": dispatcher,
    }


def turns_of(
    layers: dict[str, Any], shape: tuple[int, ...], turns: int, calls: int = CALLS
) -> dict[str, list[float]]:
    """Milliseconds of forward and backward of each layer in every turn.

    Args:
        layers: MoE layers of Megatron.
        shape: The tokens', ``[sequence, batch, hidden]``.
        turns: How often the layers take turns.
        calls: Calls of a turn.
    """
    torch.manual_seed(11)
    like = next(next(iter(layers.values())).parameters())
    x = torch.randn(shape, dtype=like.dtype, device=like.device).requires_grad_()
    grad_out = torch.randn_like(x)

    def stepper(layer: Any) -> Callable[[], float]:
        def step() -> None:
            x.grad = None
            for parameter in layer.parameters():
                parameter.grad = None
            layer(x)[0].backward(grad_out)

        return lambda: stopwatch.turn_ms(step, calls)

    return stopwatch.in_turns({name: stepper(layer) for name, layer in layers.items()}, turns)


def both(sizes: Sizes, dispatcher: str, turns: int) -> dict[str, list[float]]:
    """The times of a layer with the flag and without, on the GPU."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    layers = {}
    for overlaps in (False, True):
        config = TransformerConfig(
            num_layers=1,
            num_attention_heads=16,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            bias_activation_fusion=True,
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            moe_grouped_gemm=True,
            moe_permute_fusion=True,
            bf16=True,
            params_dtype=torch.bfloat16,
            **settings(sizes, dispatcher, overlaps=overlaps),
        )
        layer = layers["with" if overlaps else "without"] = make_layer(config, use_te=True).cuda()
        if dispatcher == "flashmoe":
            layer.config.gradient_accumulation_fusion = True
            for parameter in layer.experts.parameters():
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                parameter.grad_added_to_main_grad = False
    return turns_of(layers, (sizes.num_tokens, 1, sizes.hidden), turns)


def row(name: str, dispatcher: str, times: dict[str, list[float]]) -> str:
    """A layer's line of the table, medians in milliseconds."""
    without, overlapped = (statistics.median(times[key]) for key in ("without", "with"))
    change = 100 * (overlapped / without - 1)
    return f"| {name} | {dispatcher} | {without:.3f} | {overlapped:.3f} | {change:+.1f} % |"


HEADER = """| layer, forward + backward | dispatcher | without, ms | with, ms | |
| --- | --- | --- | --- | --- |"""


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dispatcher", nargs="+", default=["flashmoe"])
    parser.add_argument("--turns", type=fair_turns, default=16)
    parser.add_argument("--out", type=Path, default=Path("runs/shared_overlap.jsonl"))
    options = parser.parse_args(arguments)
    if not common.has_gpu():
        return 2
    from megatron.core import parallel_state

    from flashmoe_megatron.adapters.megatron import configure, install

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    install()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print(HEADER, flush=True)
    for name, sizes in LAYERS.items():
        configure(max_tokens=sizes.num_tokens)
        for dispatcher in options.dispatcher:
            times = both(sizes, dispatcher, options.turns)
            print(row(name, dispatcher, times), flush=True)
            record = {"layer": name, "dispatcher": dispatcher, "ms": times, **common.machine()}
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
