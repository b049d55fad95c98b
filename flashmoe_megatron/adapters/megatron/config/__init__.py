"""Reads what Megatron's configuration and arguments ask for, and refuses what flashmoe lacks."""
