"""What the fused layers report through DeepSpeed's monitor, on its own axis of steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flashmoe_megatron.adapters.deepspeed.routed import GroupBackends

Event = tuple[str, float, int]


class RouteCounter:
    """Counts the routes of one layer on the device, without waiting for it.

    Args:
        num_experts: Of the layer, on all ranks.
        device: Where its routes are.

    Attributes:
        is_on: Whether to count.
        per_expert: ``[num_experts]`` int64, routes that the router chose.
        kept: ``[1]`` int64, those that were not dropped.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.is_on = False
        self.per_expert = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.kept = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def count(self, per_expert: torch.Tensor, expert_idx: torch.Tensor) -> None:
        """Adds one call's routes.

        Args:
            per_expert: ``[num_experts]``, this rank's routes before dropping.
            expert_idx: Each route's expert, -1 where it was dropped.
        """
        if self.is_on:
            self.per_expert += per_expert
            self.kept += (expert_idx >= 0).sum()

    def take(self) -> torch.Tensor:
        """The counts since the last call, kept routes last, ``[num_experts + 1]``."""
        counts = torch.cat((self.per_expert, self.kept))
        self.per_expert.zero_()
        self.kept.zero_()
        return counts


class Reporter:
    """Writes events every few optimizer steps, before the forward that follows them.

    Args:
        engine: DeepSpeed's.
        counters: Those of all fused layers of this rank.
        backends: Those of all their groups.
        interval: Optimizer steps between events, above 0.
    """

    def __init__(
        self,
        engine: Any,
        counters: Sequence[RouteCounter],
        backends: Callable[[], Sequence[GroupBackends]],
        interval: int,
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._backends = backends
        self._interval = interval
        self._last_step = int(engine.global_steps)
        self._last_traffic = (0, 0)
        for counter in counters:
            counter.is_on = True

    def __call__(self) -> None:
        """Reports if it is time. Collective over the data-parallel group, whose steps agree."""
        step = int(self._engine.global_steps)
        if step == self._last_step or step % self._interval:
            return
        events = self._events(step - self._last_step)
        self._last_step = step
        self._engine.monitor.write_events(events)

    def _events(self, num_steps: int) -> list[Event]:
        rows = [counter.take() for counter in self._counters]
        sent_bytes, pad_rows = (sum(values) for values in zip(*self._traffic(), strict=True))
        traffic = [sent_bytes - self._last_traffic[0], pad_rows - self._last_traffic[1]]
        self._last_traffic = (sent_bytes, pad_rows)
        counts = torch.cat((*rows, torch.tensor(traffic, device=rows[0].device)))
        group = self._engine.data_parallel_group
        dist.all_reduce(counts, group=group)
        *layers, totals = torch.split(counts, [len(row) for row in rows] + [2])
        loads = [layer[:-1].double() for layer in layers]
        wanted = sum(int(load.sum()) for load in loads)
        kept = sum(int(layer[-1]) for layer in layers)
        megabytes = float(totals[0]) / 2**20 / num_steps / dist.get_world_size(group)
        values = {
            "load_imbalance": max(float(load.max() / load.mean().clamp(min=1)) for load in loads),
            "dropped_share": 1 - kept / wanted if wanted else 0.0,
            "mib_sent_per_rank_and_step": megabytes,
            "pad_rows_sent": float(totals[1]),
        }
        samples = int(self._engine.global_samples)
        return [(f"FlashMoE/{name}", value, samples) for name, value in values.items()]

    def _traffic(self) -> list[tuple[int, int]]:
        counted = [backend.traffic for group in self._backends() for backend in group.backends()]
        return [(traffic.bytes_sent, traffic.pad_rows_sent) for traffic in counted] or [(0, 0)]
