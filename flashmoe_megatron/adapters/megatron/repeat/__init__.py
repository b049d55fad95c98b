"""Repeats an iteration of Megatron in which a rank received more rows than the bound."""
