"""The reference backend: plain torch on any device, ``torch.distributed`` between ranks.

It keeps the promises of the kernel that can be kept without one: rows travel unpadded, every sum
has a fixed order, nothing is dropped, and a route's bits depend neither on the other routes nor on
the number of ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from flashmoe_megatron.call import TrafficCounters
from flashmoe_megatron.config import TILE_M, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.replicas.placement import Counts, Hosts, Placement
from flashmoe_megatron.replicas.policy import check_slots, plan_replicas
from flashmoe_megatron.separate.agreement import ranks_of
from flashmoe_megatron.separate.backend import SeparateBackend, options_and_device
from flashmoe_megatron.separate.exchange import Exchange
from flashmoe_megatron.separate.plan import Routes, rows_of_experts
from flashmoe_megatron.separate.records import IN_TURN
from flashmoe_megatron.separate.replicas import Planner, Replicas
from flashmoe_megatron.separate.steps import PLAIN, Steps
from flashmoe_megatron.weights import ExpertWeights


class ReferenceBackend(SeparateBackend):
    """The backend by the name "reference": plain steps in one part, and spare slots.

    Everything runs on the current stream. :attr:`traffic` counts the pad rows that experts' rows
    have in the kernel's blocks.
    """

    kind = "reference"

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        options: BackendOptions | None = None,
        planner: Planner | None = None,
    ) -> None:
        """Binds the layer to a process group.

        Args:
            config: The layer's shape.
            group: The expert-parallel group, gloo for CPU tensors or NCCL for GPU tensors; ``None``
                for one rank.
            device: Where tokens will be, by default the CPU; a rank that refuses a call before its
                first forward sends its error from there.
            options: How the layer runs; the reference heeds ``keep``, ``row_bound`` and the options
                of replicas.
            planner: Plans replicas in place of the options' policy; the same on every rank.

        Raises:
            ConfigError: The group's size is not ``config.num_ranks``, a rank cannot have the spare
                slots, or an argument is of another class.
        """
        options, device = options_and_device(options, device)
        if planner is not None and not callable(planner):
            raise ConfigError(f"planner={planner!r}: wanted a function, or None")
        ranks = ranks_of(config, group)
        spare_slots = options.filled_slots
        check_slots(config, spare_slots, options.placement)
        if planner is None and spare_slots:

            def planner(counts: Counts, hosts: Hosts | None) -> Placement:
                return plan_replicas(options.replica_policy, counts, spare_slots, hosts)

        super().__init__(
            config,
            ranks,
            Exchange(ranks, TrafficCounters(), torch.device("cpu")),  # no stream of its own
            options=options,
            device=device,
            moments=IN_TURN,
            replicas=None if planner is None else Replicas(config, spare_slots, planner),
            takes_split=not spare_slots,
        )

    def settle(
        self,
        routing_map: torch.Tensor,
        read_weights: Callable[[], ExpertWeights],
        *,
        layer: int,
    ) -> None:
        """See :class:`~flashmoe_megatron.call.LooksAhead`; weights travel in the forward."""
        assert self._replicas is not None, "there are spare slots"
        self._replicas.settle(self._agreement.gather(routing_map.sum(0)), layer)

    def _steps_for(self, x: torch.Tensor) -> Steps:
        """Takes torch's operators on any device."""
        return PLAIN

    def _count_pads(self, routes: Routes) -> None:
        """Counts the rows that fill up each expert's last block."""
        traffic = self._exchange.traffic
        for count in rows_of_experts(routes.host_received):
            traffic.pad_rows_local += -count % TILE_M
