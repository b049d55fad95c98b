"""Decides where a launch computes each expert, if hot ones may be on several ranks."""
