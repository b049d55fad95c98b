"""What a layer should compute, and how close to it an unfused path in 16 bits comes.

The bound on the kernel's error is the error of a plain torch path on the same inputs that rounds to
16 bits at the same points, wherever a product of matrices leaves an unfused layer's kernel: fc1's
output, the scaled activation, fc2's output and the gradient of its input, fc1's output's gradient,
each rank's share of a token and the token's sum. Products are accumulated in float32 by both.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.oracle import FUNCTIONS, Difference, assert_close, moe_reference
from tests.unit.cases import Inputs, form_of

SLACK = 1.1
CLAMPED_ROWS = 2.0
"""Times the unfused path's worst row, where values are clamped: other values are rounded to the
other side of the clamp there, where the slope is another."""
FLOOR = 1e-4
"""Added to every bound: what fast exponentials and another order of sums may cost."""


@dataclass
class Results:
    """What one call of a layer yields, for the tokens and experts of all ranks or of some.

    Attributes:
        out: ``[num_tokens, hidden]``.
        grad_x: ``[num_tokens, hidden]``.
        grad_probs: ``[num_tokens, num_experts]``.
        grad_fc1: ``[experts, fc1_rows, hidden]``.
        grad_fc2: ``[experts, hidden, intermediate]``.
    """

    out: torch.Tensor
    grad_x: torch.Tensor
    grad_probs: torch.Tensor
    grad_fc1: torch.Tensor
    grad_fc2: torch.Tensor

    def share(self, config: MoEConfig, tokens_per_rank: list[int], rank: int) -> "Results":
        """One rank's part of the results of all."""
        first_token = sum(tokens_per_rank[:rank])
        tokens = slice(first_token, first_token + tokens_per_rank[rank])
        first_expert = rank * config.num_local_experts
        experts = slice(first_expert, first_expert + config.num_local_experts)
        return Results(
            self.out[tokens],
            self.grad_x[tokens],
            self.grad_probs[tokens],
            self.grad_fc1[experts],
            self.grad_fc2[experts],
        )


@dataclass
class Expected:
    """The oracle's results and those of the unfused path."""

    exact: Results
    unfused: Results
    is_clamped: bool = False

    def share(self, config: MoEConfig, tokens_per_rank: list[int], rank: int) -> "Expected":
        return Expected(
            self.exact.share(config, tokens_per_rank, rank),
            self.unfused.share(config, tokens_per_rank, rank),
            self.is_clamped,
        )


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    return Inputs(
        **{name: [tensor.to(device) for tensor in values] for name, values in vars(inputs).items()}
    )


def expected(config: MoEConfig, inputs: Inputs) -> Expected:
    """Both paths over all tokens and experts, on the device of the inputs."""
    routing_map = torch.cat(inputs.routing_map)
    if config.skip_zero_probs:
        routing_map = routing_map & (torch.cat(inputs.probs) != 0)
    return Expected(
        _exact(config, inputs, routing_map),
        _unfused(config, inputs, routing_map),
        is_clamped=config.clamp_value is not None,
    )


def assert_as_good(got: Results, want: Expected, *, times: float = 1.0) -> dict[str, Difference]:
    """Fails if any result is further from the oracle's than the unfused path allows.

    Args:
        got: The results.
        want: Both paths'.
        times: What the bounds are multiplied by.

    Returns:
        The errors found, by name.
    """
    found = {}
    for name, tensor in vars(got).items():
        exact, unfused = getattr(want.exact, name), getattr(want.unfused, name)
        found[name] = assert_close(
            name,
            tensor,
            exact,
            rel_l2=times * _bound(unfused, exact),
            worst_row=CLAMPED_ROWS * _worst_row(unfused, exact) if want.is_clamped else 0.0,
        )
    return found


def assert_void(results: Iterable[object]) -> None:
    """Fails if a tensor among what a failed pass gives has anything but NaN."""
    for result in results:
        if isinstance(result, torch.Tensor):
            assert result.isnan().all(), f"{result.shape}: a value of a failed pass is a number"


def _worst_row(unfused: torch.Tensor, exact: torch.Tensor) -> float:
    anything = assert_close("unfused", unfused, exact, rel_l2=math.inf)
    return anything.worst_row


def _bound(unfused: torch.Tensor, exact: torch.Tensor) -> float:
    norm = exact.double().norm()
    if not norm:
        return FLOOR
    error = float((unfused.double() - exact.double()).norm() / norm)
    # In a small tensor a few values that round the other way show.
    return error * (SLACK + 2 / exact.numel() ** 0.5) + FLOOR


def _exact(config: MoEConfig, inputs: Inputs, routing_map: torch.Tensor) -> Results:
    x = torch.cat(inputs.x).double().requires_grad_()
    probs = torch.cat(inputs.probs).double().requires_grad_()
    fc1 = [weight.double().requires_grad_() for weight in inputs.fc1]
    fc2 = [weight.double().requires_grad_() for weight in inputs.fc2]
    out = moe_reference(x, probs, routing_map, fc1, fc2, **form_of(config))
    grads = torch.autograd.grad(
        out, (x, probs, *fc1, *fc2), torch.cat(inputs.grad_out).double(), materialize_grads=True
    )
    num_experts = config.num_experts
    return Results(
        out.detach(),
        grads[0],
        grads[1],
        torch.stack(grads[2 : 2 + num_experts]),
        torch.stack(grads[2 + num_experts :]),
    )


def _activated(config: MoEConfig, projected: torch.Tensor) -> torch.Tensor:
    function = FUNCTIONS[config.activation]
    if not config.gated:
        return function(projected)
    block = config.glu_interleave or config.intermediate
    gate, up = projected.unflatten(1, (-1, 2, block)).transpose(1, 2).flatten(2).unbind(1)
    if config.clamp_value is not None:
        gate, up = (
            gate.clamp(max=config.clamp_value),
            up.clamp(-config.clamp_value, config.clamp_value),
        )
    return function(gate) * (up + config.linear_offset)


def _unfused(config: MoEConfig, inputs: Inputs, routing_map: torch.Tensor) -> Results:
    x = torch.cat(inputs.x).float()
    dtype = inputs.x[0].dtype

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype).float()

    grad_out = torch.cat(inputs.grad_out).float()
    given_probs = torch.cat(inputs.probs)
    probs = given_probs.float()
    grad_probs = torch.zeros_like(probs)
    shares = x.new_zeros(2, config.num_ranks, *x.shape)  # what each rank adds to out and to grad x
    grad_fc1, grad_fc2 = [], []
    for expert in range(config.num_experts):
        rank = expert // config.num_local_experts
        tokens = routing_map[:, expert].nonzero().squeeze(1)
        fc1, fc2 = inputs.fc1[expert].float(), inputs.fc2[expert].float()
        rows, grad_rows = x[tokens], grad_out[tokens]
        prob = probs[tokens, expert].unsqueeze(1)
        projected = rounded(rows @ fc1.t()).requires_grad_()
        value = _activated(config, projected)
        scaled = rounded(value.detach() * prob)
        shares[0, rank].index_add_(0, tokens, rounded(scaled @ fc2.t()))

        grad_value = rounded(grad_rows @ fc2)
        grad_probs[tokens, expert] = (grad_value * value.detach()).sum(1)
        grad_projected = rounded(torch.autograd.grad(value, projected, grad_value * prob)[0])
        shares[1, rank].index_add_(0, tokens, rounded(grad_projected @ fc1))
        grad_fc1.append(grad_projected.t() @ rows)
        grad_fc2.append(grad_rows.t() @ scaled)
    out, grad_x = rounded(rounded(shares).sum(1)).unbind(0)
    return Results(
        out,
        grad_x,
        grad_probs.to(given_probs.dtype),
        torch.stack(grad_fc1),
        torch.stack(grad_fc2),
    )
