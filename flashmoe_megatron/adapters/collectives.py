"""Tells from the environment whether a collective of NCCL and a launch may wait for each other.

A launch needs almost all multiprocessors of all of its GPUs at once, and so does a collective with
its CTAs. On one GPU a launch may leave too few for the collective, while on another the collective
leaves too few for the launch. A collective whose CTAs fit into what launches leave can always run,
and one hardware queue keeps both in the same order on all GPUs.
"""

import os


def has_one_queue() -> bool:
    """Tells whether all streams of a GPU share one hardware queue."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def allowed_ctas() -> int | None:
    """The CTAs that the environment allows a collective, ``None`` where it does not say."""
    most = os.environ.get("NCCL_MAX_CTAS", "")
    return int(most) if most.isdigit() else None


def is_small(most: int) -> bool:
    """Tells whether the environment allows a collective no more than so many CTAs."""
    allowed = allowed_ctas()
    return allowed is not None and allowed <= most


def circle(timeout: str) -> str:
    """Says what may happen otherwise, and which option ends it."""
    return (
        "a launch may each wait for room that the other holds on another GPU, until "
        f"{timeout} ends it"
    )
