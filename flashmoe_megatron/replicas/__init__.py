"""Where a launch computes each expert, if hot ones may be computed on several ranks."""
