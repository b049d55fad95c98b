"""A small bf16 layer that runs forward and backward, compared with the oracle."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from flashmoe_megatron.call import Backend
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.doctor.fact import Fact
from flashmoe_megatron.errors import DeviceError, FlashMoEError
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.measured.reach import check_peers
from flashmoe_megatron.measured.start import Started, join
from flashmoe_megatron.oracle import MismatchError, assert_close, moe_reference
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.select import resolve_kind

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS_OF_A_RANK, TOPK = 256, 256, 128, 8, 2
PATIENCE_S = 60.0
"""For a rank that does not come."""
REL_L2 = 2e-2
"""Most error of a result in bf16, where a right one has some 4e-3."""


def layer() -> Fact:
    """Runs the layer on all ranks, and names its backend. Collective over torchrun's ranks."""
    value: dict[str, Any] = {"backend": None, "ranks": int(os.environ.get("WORLD_SIZE", "1"))}
    try:
        started = join()
        value["device"] = str(started.device)
        value["why_not_kernel"] = _why_not_kernel(started.device)
        if value["ranks"] > 1:
            Ranks(started.group).all(
                lambda: check_peers(
                    resolve_kind("auto", started.device, torch.bfloat16), value["ranks"]
                )
            )
        value["backend"], value["rel_l2"], value["host_rows"] = _run(started)
    except (FlashMoEError, MismatchError, ImportError, RuntimeError, ValueError) as error:
        what = "computes wrong values" if isinstance(error, MismatchError) else "does not run"
        problem = f"a bf16 layer {what}: {' '.join(str(error).split())}"
        return Fact("bf16_layer", value, what, problem, is_broken=True)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    over = f" on {value['ranks']} ranks" if value["ranks"] > 1 else ""
    text = f"runs forward and backward{over} by the backend {value['backend']}"
    if value["host_rows"]:
        text += f"\n{_of_hosts(value['host_rows'])}"
    if value["why_not_kernel"]:
        text += f"\n{value['why_not_kernel']}"
    return Fact("bf16_layer", value, text)


def _why_not_kernel(device: torch.device) -> str | None:
    try:
        resolve_kind("kernel", device, torch.bfloat16)
    except DeviceError as error:
        return str(error).partition(";")[0]
    return None


def _of_hosts(rows: list[int]) -> str:
    busiest = max(rows) * len(rows) / max(sum(rows), 1)
    each = ", ".join(map(str, rows))
    return f"{len(rows)} hosts compute {each} rows; the busiest has {busiest:.2f} times the mean"


def _run(started: Started) -> tuple[str, float, list[int]]:
    """Returns the backend's name, the largest relative error of outputs and gradients, and rows.

    The rows are each host's, in the forward; none where all ranks are on one.

    Raises:
        MismatchError: An error is too large.
    """
    num_ranks = Ranks(started.group).num_ranks
    config = MoEConfig(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=EXPERTS_OF_A_RANK * num_ranks,
        topk=TOPK,
        activation=Activation.SILU,
        gated=True,
        num_ranks=num_ranks,
        max_tokens=TOKENS,
    )
    moe = FlashMoELayer(
        config,
        group=started.group,
        device=started.device,
        dtype=torch.bfloat16,
        timeout=PATIENCE_S,
    )
    generator = torch.Generator().manual_seed(Ranks(started.group).rank)
    rows = torch.randn(TOKENS, HIDDEN, generator=generator)
    x = rows.to(started.device, torch.bfloat16).requires_grad_()
    scores = torch.rand(TOKENS, config.num_experts, generator=generator).to(started.device)
    weight, idx = scores.topk(TOPK, dim=1)
    out = moe(x, idx, weight)
    out.backward(torch.ones_like(out))

    parameters = moe.fc1, moe.fc2
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in parameters]
    inputs = [one.detach().requires_grad_() for one in (x, *whole)]
    probs = torch.zeros_like(scores).scatter(1, idx, weight)
    wanted = moe_reference(
        inputs[0],
        probs,
        probs > 0,
        list(inputs[1]),
        list(inputs[2]),
        activation=config.activation,
        gated=config.gated,
        dtype=torch.float32,
    )
    wanted_grads = torch.autograd.grad(wanted.sum(), inputs)
    results = [("the output", out, wanted), ("the gradient of tokens", x.grad, wanted_grads[0])]
    if num_ranks == 1:  # else gradients of weights are sums over the tokens of all ranks
        results.append(("the gradient of fc1", moe.fc1.grad, wanted_grads[1]))
        results.append(("the gradient of fc2", moe.fc2.grad, wanted_grads[2]))
    error = max(_error_of(*result) for result in results)
    return moe.backend.within.kind, error, _host_rows(started, moe.backend)


def _host_rows(started: Started, backend: Backend) -> list[int]:
    if backend.num_hosts == 1:
        return []
    rows = sum(one.num_rows for one in backend.take_records() if one.direction == "forward")
    of_ranks = Ranks(started.group).gather(rows)
    step = len(of_ranks) // backend.num_hosts
    return [sum(of_ranks[first : first + step]) for first in range(0, len(of_ranks), step)]


def _error_of(name: str, got: torch.Tensor | None, wanted: torch.Tensor) -> float:
    if got is None:
        raise MismatchError(f"{name} is missing")
    return assert_close(name, got, wanted, rel_l2=REL_L2).rel_l2
