"""The releases of DeepSpeed that this adapter is tested with."""

import re

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


def _text(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)
