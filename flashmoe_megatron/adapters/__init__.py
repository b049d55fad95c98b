"""Connections to training frameworks; each imports its framework, nothing else does."""
