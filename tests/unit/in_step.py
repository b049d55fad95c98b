"""A training on threads as ranks, in which one call is bad, and how each rank hears of it."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import Backend, LooksAhead
from flashmoe_megatron.errors import ConfigError, FlashMoEError
from flashmoe_megatron.layer import moe_forward
from flashmoe_megatron.weights import ExpertWeights
from tests.unit import cases

RANKS, TOKENS, TOPK, LAYERS, STEPS = 3, 4, 2, 2, 12
WAIT_EVERY = 4
"""Steps between those whose losses are read, as trainings do."""
BAD_STEP, BAD_RANK = 5, 1
CONFIG = cases.make_config(num_ranks=RANKS, num_experts=6, topk=TOPK, max_tokens=16)

Call = dict[str, Any]


def nan_weight(call: Call) -> Call:
    call["topk_weight"] = torch.full_like(call["topk_weight"], torch.nan)
    return call


BAD: dict[str, tuple[Callable[[Call], Call], str]] = {
    "values": (nan_weight, "topk_weight[0, 0] is NaN"),
    "found by the GPU": (lambda call: nan_weight({**call, "check_routing": False}), "is NaN"),
    "tokens": (
        lambda call: {
            **call,
            **{name: torch.cat([call[name]] * 5) for name in ("x", "topk_idx", "topk_weight")},
        },
        "x has 20 tokens, the layer was built for at most max_tokens=16 per rank",
    ),
    "dtype": (lambda call: {**call, "x": call["x"].float()}, "x is torch.float32, wanted"),
    "width": (lambda call: {**call, "x": call["x"][:, :32].contiguous()}, "x has shape (4, 32)"),
    "numbers": (lambda call: {**call, "x": call["x"].long()}, "x is torch.int64"),
    "no tensor": (lambda call: {**call, "topk_idx": None}, "topk_idx is a NoneType"),
}


class Rank(threading.Thread):
    """One rank's host: steps of several layers, of which one step is bad on one rank.

    Args:
        backend: The rank's.
        change: Makes the call bad.
        wait: Waits for the rank's GPU.
        waits: Whether the host does so in every call; else it does after some steps.
        device: Where tensors are.
    """

    def __init__(
        self,
        backend: Backend,
        change: Callable[[Call], Call],
        wait: Callable[[], None],
        *,
        waits: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(daemon=True)
        self.rank, self.backend, self.change = backend.rank, backend, change
        self.looks_ahead = False
        """Whether it settles on each call's replicas before the call."""
        self.wait, self.waits, self.device = wait, waits, device
        shapes = (
            (CONFIG.num_local_experts, CONFIG.fc1_rows, CONFIG.hidden),
            (CONFIG.num_local_experts, CONFIG.hidden, CONFIG.intermediate),
        )
        stacks = [
            torch.zeros(shape, dtype=torch.bfloat16, device=device).requires_grad_()
            for shape in shapes
        ]
        self.weights = ExpertWeights((stacks[0],), (stacks[1],))
        self.errors: list[tuple[int, int, str]] = []
        """Steps, calls of the steps, and what they raised."""
        self.outputs: list[tuple[int, torch.Tensor]] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for step in range(STEPS):
                self.step(step)
                if step % WAIT_EVERY == WAIT_EVERY - 1:
                    self.wait()
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.failure = error

    def step(self, step: int) -> None:
        hidden = torch.ones(
            TOKENS, CONFIG.hidden, dtype=torch.bfloat16, device=self.device
        ).requires_grad_()
        number = 0
        try:
            for number in range(LAYERS):
                call: Call = {
                    "x": hidden,
                    "topk_idx": torch.arange(TOPK, device=self.device).repeat(TOKENS, 1),
                    "topk_weight": torch.ones(TOKENS, TOPK, device=self.device),
                    "weights": self.weights,
                    "backend": self.backend,
                    "check_routing": number == 0,
                }
                if (step, number, self.rank) == (BAD_STEP, 0, BAD_RANK):
                    call = self.change(call)
                if self.looks_ahead:
                    self.settle(number, call["weights"])
                out = self.apply(**call)
                self.outputs.append((step, out.detach()))
                hidden = out if out.shape == hidden.shape else out.mean() * hidden
                hidden = hidden.to(torch.bfloat16)
                if self.waits:
                    self.wait()
            hidden.sum().backward()
        except FlashMoEError as error:
            self.errors.append((step, number, str(error)))

    def settle(self, number: int, weights: ExpertWeights) -> None:
        """Settles on a call's replicas; on one rank the weights of one call cannot be used."""
        is_bad = (number, self.rank) == (1, BAD_RANK)

        def read() -> ExpertWeights:
            if is_bad:
                raise ConfigError("a module of the experts has hooks")
            return weights

        assert isinstance(self.backend, LooksAhead)
        routing_map = torch.ones(TOKENS, CONFIG.num_experts, dtype=torch.bool, device=self.device)
        self.backend.settle(routing_map, read, layer=0)

    def apply(self, accumulate: bool = False, **call: Any) -> torch.Tensor:
        """Applies one layer, on one rank possibly with gradients for ``main_grad``."""
        if not accumulate:
            return moe_forward(**call)
        call.pop("check_routing")
        call |= {"probs": None, "routing_map": None, "accumulate_into_main_grad": True}
        return moe_apply(**call)


def run_ranks(ranks: list[Rank]) -> None:
    """Runs them side by side, and raises what was no error of the package's."""
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
    for one in ranks:
        if one.failure is not None:
            raise one.failure
        assert not one.is_alive(), f"rank {one.rank} hangs"


def check_in_step(ranks: list[Rank], message: str) -> None:
    """All have raised one error, in one call; outputs from the bad step to that one are NaN."""
    for one in ranks:
        assert one.errors == ranks[0].errors
        ((step, _, told),) = one.errors
        assert message in told
        assert "rank 1" in told
        assert step >= BAD_STEP
        for of_step, out in one.outputs:
            is_void = BAD_STEP <= of_step <= step
            assert bool(out.isnan().all()) == is_void, of_step
            assert bool(out.isnan().any()) == is_void, of_step
