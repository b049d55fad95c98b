"""How a function of a framework's experts is put to the proof against a formula of ours."""

import torch

PROBE_ROWS = 8
PROBE_SCALES = (1.0, 32.0, 1000.0)
"""How large the probe's rows are: functions differ around 1, and clamps act far from there."""

PROBE_TOLERANCE = 1e-5
"""Relative error; the two forms of GELU differ by 1e-4, and the probe computes in float64."""


def is_close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether a tensor is another up to rounding in float64."""
    return bool((got - want).norm() <= PROBE_TOLERANCE * want.norm())
