"""Ends a tool where a layer does not pass the correctness gate, before anything is timed."""

import torch

from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.correctness import GATE, worst_of
from tools.bench.common import log


def require_gate(name: str, errors: dict[str, float], most: float = GATE) -> None:
    """Refuses results that are further from float32's than a correctness gate allows.

    Raises:
        SystemExit: They are.
    """
    worst = worst_of(errors.values())
    if not worst <= most:
        raise SystemExit(f"{name}: relative L2 error {worst:.3g}, wanted at most {most}")


def pass_gate(name: str, errors: dict[str, float], most: float = GATE) -> None:
    """Logs how far a layer is from float32, before it is timed.

    Args:
        name: What was compared, for messages.
        errors: By result, from a function of ``correctness.py``.
        most: The largest that any may be.

    Raises:
        SystemExit: They are larger than the gate allows.
    """
    log(f"{name}: relative L2 {', '.join(f'{key} {error:.2e}' for key, error in errors.items())}")
    require_gate(name, errors, most)
    if stopwatch.HAS_GPU:
        torch.cuda.empty_cache()
