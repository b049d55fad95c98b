"""Separate kernels: parts of the layer travel while others are computed; and the reference."""
