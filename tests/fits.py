"""Fits that nobody has measured."""

import torch

from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.measured.fit import HOST, Beside, Fit, Line, machine_of


def make_fit(
    hosts: int = 1,
    ranks: int = 2,
    *,
    shared: int = 1,
    beside: tuple[float, float] = (1.0, 1.0),
    **changes: tuple[float, float],
) -> Fit:
    """A machine whose exchanges take about as long as a small layer's products.

    Args:
        hosts: Hosts of the group.
        ranks: Ranks on each.
        shared: Ranks that share each expert.
        beside: What a product and an exchange take beside each other.
        **changes: Alpha and beta of lines by name.
    """
    machine = machine_of(HostGrid(hosts, ranks, 0), torch.device("cpu"), shared=shared)
    terms = dict.fromkeys(machine.wanted, (1e-06, 1e-09)) | dict.fromkeys(HOST, (0.0, 0.0))
    terms |= {"product": (1e-6, 1e-11), "copy": (1e-6, 1e-12), **changes}
    lines = {name: Line(*pair, 1.0) for name, pair in terms.items()}
    samples = {name: [(1.0, 1.0)] for name in lines}
    both = dict.fromkeys(machine.carriers, Beside(*beside))
    return Fit(machine, "float32", lines, samples, both)
