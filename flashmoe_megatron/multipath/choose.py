"""Makes links by name."""

import logging
from collections.abc import Callable, Sequence

import torch

from flashmoe_megatron.errors import ConfigError, FlashMoEError, PeerTimeoutError
from flashmoe_megatron.multipath.control import Control
from flashmoe_megatron.multipath.group_link import GroupLink
from flashmoe_megatron.multipath.links import Link
from flashmoe_megatron.multipath.peer_copies import PeerCopies
from flashmoe_megatron.multipath.ring import HostRelay
from flashmoe_megatron.multipath.sockets import SocketLink

logger = logging.getLogger("flashmoe_megatron")

MakeLink = Callable[[Control], Link]
"""Makes a link; collective over the ranks."""

_ON_GPUS = ("peer", "nccl", "host")
_ON_CPUS = ("gloo", "sockets")


def make_links(
    control: Control, device: torch.device, wanted: str | Sequence[str | MakeLink]
) -> list[Link]:
    """Makes links between ranks. Collective; the same on every rank.

    Args:
        control: The ranks.
        device: This rank's device.
        wanted: Names, or functions that make links; or "auto", which leaves out and logs what
            cannot be made: on GPUs "peer", "nccl" and "host", else "gloo" and "sockets".

    Raises:
        ConfigError: A name is unknown, or the link is for tensors on another device.
        PeerTimeoutError: A rank did not take part within the time limit.
        FlashMoEError: A link that was asked for by name cannot be made.
    """
    names: dict[str, MakeLink] = {
        "peer": lambda control: PeerCopies(control, device),
        "host": lambda control: HostRelay(control, device),
        "nccl": lambda control: GroupLink(control, "nccl", device),
        "gloo": lambda control: GroupLink(control, "gloo", device),
        "sockets": lambda control: SocketLink(control),
    }
    usable = _ON_GPUS if device.type == "cuda" else _ON_CPUS
    if isinstance(wanted, str) and wanted != "auto":
        wanted = [wanted]
    chosen = usable if wanted == "auto" else wanted
    for one in chosen:
        if isinstance(one, str) and one not in usable:
            raise ConfigError(
                f"link {one!r} for tensors on {device}: wanted some of {', '.join(usable)}"
            )
    links: list[Link] = []
    try:
        for one in chosen:
            try:
                links.append(names[one](control) if isinstance(one, str) else one(control))
            except FlashMoEError as error:
                # What cannot be made all ranks know alike; that a peer was late, this one alone.
                if wanted != "auto" or isinstance(error, PeerTimeoutError):
                    raise
                logger.warning("multipath goes without the link %s: %s", one, error)
    except BaseException:
        for link in links:
            link.close()
        raise
    return links
