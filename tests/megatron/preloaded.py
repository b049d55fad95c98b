"""Imports what ranks of Megatron's need, in the process from which they are forked."""

import importlib

from examples import cpu_bridge

importlib.import_module("tools.bench.stopwatch")  # asks for a GPU, which the bridge then answers
cpu_bridge.enable()  # has to come before Megatron
for name in (
    "core.dist_checkpointing",
    "core.distributed",
    "core.models.gpt",
    "core.optimizer",
    "core.pipeline_parallel",
    "core.transformer.moe.moe_layer",
):
    importlib.import_module(f"megatron.{name}")
importlib.import_module("tests.megatron.harness")
