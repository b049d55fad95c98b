"""The fused kernel as a backend: the C library, its operators, and the memory that they share."""
