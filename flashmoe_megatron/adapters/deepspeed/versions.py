"""The releases of DeepSpeed that this adapter is tested with."""

import re
from collections.abc import Sequence

OLDEST = (0, 19, 5)
"""The first release whose gate names the route of each token instead of masks."""

NEWEST = (0, 19, 8)


def version_problem(version: str) -> str | None:
    """Says what is wrong with a release of DeepSpeed.

    Args:
        version: A release's, as ``deepspeed.__version__`` says it.

    Returns:
        A sentence that names the tested range, ``None`` for a release within it.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(int(part) for part in match.groups()) if match else ()
    if numbers and OLDEST <= numbers <= NEWEST:
        return None
    age = "older" if numbers and numbers < OLDEST else "newer"
    return (
        f"DeepSpeed {version} is {age} than the tested releases {_text(OLDEST)} to "
        f"{_text(NEWEST)}; install one of these"
    )


def versions_problem(versions: Sequence[str]) -> str | None:
    """Says what is wrong with the releases of DeepSpeed that ranks have.

    Args:
        versions: Each rank's, in order.

    Returns:
        As :func:`version_problem`, of the first rank whose release is not within the range.
    """
    for rank, version in enumerate(versions):
        problem = version_problem(version)
        if problem is not None:
            return problem if len(set(versions)) == 1 else f"{problem} (on rank {rank})"
    return None


def _text(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)
