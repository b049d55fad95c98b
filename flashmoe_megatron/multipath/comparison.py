"""Decides whether gathers go by links or by torch.distributed."""

import functools
import statistics
from collections.abc import Callable

from flashmoe_megatron.multipath.balancer import Balancer, size_class
from flashmoe_megatron.multipath.control import Control, greatest
from flashmoe_megatron.multipath.queues import Queues
from flashmoe_megatron.multipath.transfers import Load, Transfers
from flashmoe_megatron.multipath.trials import row_of

_ROUNDS = 5
"""How often both are tried; medians count."""
_MARGIN = 0.05
"""How much less time links have to take: a host that is late is in a trial by chance, and links
cost it more than torch.distributed does."""


class Comparison:
    """Tries gathers by links and by torch.distributed alternately, once for each size class.

    Args:
        control: The ranks.
        transfers: Moves bytes over the links.
        queues: The GPU's.
    """

    def __init__(self, control: Control, transfers: Transfers, queues: Queues) -> None:
        self._control, self._transfers, self._queues = control, transfers, queues
        self._is_won: dict[tuple[Balancer, int], bool] = {}

    def is_won(self, load: Load, plain: Callable[[], object]) -> bool:
        """Returns whether links are faster. The first time, it is collective and waits for the GPU.

        Args:
            load: The gather by links.
            plain: Does the same by torch.distributed, in the current stream.
        """
        key = load.balancer, size_class(load.inbound)
        if key not in self._is_won:
            links = functools.partial(self._transfers.exchange, load)
            links()  # which tunes
            rounds = [
                (row_of(links, self._queues)[1], row_of(plain, self._queues)[1])
                for _ in range(_ROUNDS)
            ]
            own = [statistics.median(column) for column in zip(*rounds, strict=True)]
            by_links, by_plain = greatest(self._control.gather(own))
            self._is_won[key] = by_links <= (1 - _MARGIN) * by_plain
        return self._is_won[key]
