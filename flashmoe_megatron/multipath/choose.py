"""Makes links by name."""

import logging
from collections.abc import Callable, Sequence

import torch

from flashmoe_megatron.errors import ConfigError, FlashMoEError, PeerTimeoutError
from flashmoe_megatron.multipath.links import GroupLink, Link
from flashmoe_megatron.multipath.peer_copies import PeerCopies
from flashmoe_megatron.multipath.queues import GpuQueues, Queues
from flashmoe_megatron.multipath.ring import HostRelay
from flashmoe_megatron.multipath.thread_queues import ThreadQueues
from flashmoe_megatron.ranks import StoreRanks

logger = logging.getLogger("flashmoe_megatron")

MakeLink = Callable[[StoreRanks, Queues], Link]
"""Makes a link; collective over the ranks."""

_LINKS: dict[str, MakeLink] = {
    "peer": PeerCopies,
    "nccl": GroupLink,
    "gloo": GroupLink,
    "host": HostRelay,
}
_USABLE = {"cuda": ("peer", "nccl", "host"), "cpu": ("peer", "gloo", "host")}


def queues_of(device: torch.device) -> Queues:
    """Makes the queues of a device: threads' for tensors of a CPU."""
    return GpuQueues(device) if device.type == "cuda" else ThreadQueues()


def make_links(
    ranks: StoreRanks, queues: Queues, wanted: str | Sequence[str | MakeLink]
) -> list[Link]:
    """Makes links between ranks. Collective; the same on every rank.

    Args:
        ranks: They agree on what can be made.
        queues: The queues of this rank's device.
        wanted: Names, or functions that make links; or "auto", which leaves out and logs what
            cannot be made: on GPUs "peer", "nccl" and "host", else "peer", "gloo" and "host".

    Raises:
        ConfigError: A name is unknown, or the link is for tensors on another device.
        PeerTimeoutError: A rank did not take part within the time limit.
        FlashMoEError: A link that was asked for by name cannot be made.
    """
    usable = _USABLE[queues.device.type]
    if isinstance(wanted, str) and wanted != "auto":
        wanted = [wanted]
    chosen = usable if wanted == "auto" else wanted
    for one in chosen:
        if isinstance(one, str) and one not in usable:
            raise ConfigError(
                f"link {one!r} for tensors on {queues.device}: wanted some of {', '.join(usable)}"
            )
    links: list[Link] = []
    try:
        for one in chosen:
            try:
                make = _LINKS[one] if isinstance(one, str) else one
                links.append(make(ranks, queues))
            except FlashMoEError as error:
                # All ranks know which link cannot be made; only this one knows of a late peer.
                if wanted != "auto" or isinstance(error, PeerTimeoutError):
                    raise
                logger.warning("multipath goes without the link %s: %s", one, error)
    except BaseException:
        for link in links:
            link.close()
        raise
    return links
