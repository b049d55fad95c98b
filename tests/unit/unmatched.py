"""A training on threads as ranks, in which one rank lacks a backward, and how each hears of it."""

from typing import Any

import torch

from flashmoe_megatron.errors import ConfigError
from tests.unit.in_step import CONFIG, TOKENS, TOPK, Rank

WITHOUT = 1
UNMATCHED_STEP = 3
REASON = f"none follows this forward on rank {WITHOUT}"


class Trained(Rank):
    """A rank's host, which in one step has two micro-batches of which one rank has no backward.

    Attributes:
        told: In which step and where the rank was told the reason: in the "backward" of that step,
            or in a later "forward".
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: list[tuple[int, str]] = []

    def forward(self) -> torch.Tensor:
        """What the layer makes of tokens that require a gradient."""
        x = torch.ones(TOKENS, CONFIG.hidden, dtype=torch.bfloat16, device=self.device)
        x.requires_grad_()
        out = self.apply(
            x=x,
            topk_idx=torch.arange(TOPK, device=self.device).repeat(TOKENS, 1),
            topk_weight=torch.ones(TOKENS, TOPK, device=self.device),
            weights=self.weights,
            backend=self.backend,
            check_routing=False,
        )
        self.outputs.append((0, out.detach()))
        return out

    def step(self, step: int) -> None:
        where = "forward"
        try:
            if step == UNMATCHED_STEP and self.rank == WITHOUT:
                with torch.no_grad():
                    self.forward(), self.forward()
                return
            calls = [self.forward(), self.forward()]
            where = "backward"
            raised: ConfigError | None = None
            for out in reversed(calls):
                try:
                    out.sum().backward()
                except ConfigError as error:
                    if step != UNMATCHED_STEP:
                        raise
                    raised = error  # the other micro-batch has the same reason
            if raised is not None:
                raise raised
        except ConfigError as error:
            if REASON not in str(error):
                raise
            is_own = step == UNMATCHED_STEP  # with keep="inputs" others' backwards have forwards
            self.told.append((step, where if is_own else "forward"))
            if not is_own:
                self.outputs.clear()  # what follows is right again


def check_told(ranks: list[Trained], *, raises_at_once: bool) -> None:
    """All hear it; whoever has a backward hears it at once where its host waits for plans."""
    for one in ranks:
        backwards = [step for step, where in one.told if where == "backward"]
        forwards = [step for step, where in one.told if where == "forward"]
        has_backward = one.rank != WITHOUT
        assert backwards == [UNMATCHED_STEP] * (has_backward and raises_at_once)
        assert len(forwards) == 1, one.told
        assert forwards[0] > UNMATCHED_STEP
        assert forwards == [step for step, where in ranks[0].told if where == "forward"]
        if raises_at_once:
            assert forwards[0] == UNMATCHED_STEP + 1
        assert one.outputs, "the group goes on"
        assert not any(bool(out.isnan().any()) for _, out in one.outputs)
