"""Imports what ranks of Megatron's need, in the process from which they are forked."""

import importlib

from examples import cpu_bridge

# This asks for a GPU before the bridge answers in its place.
importlib.import_module("flashmoe_megatron.bench.stopwatch")
cpu_bridge.enable()  # has to come before Megatron
for name in (
    "core.dist_checkpointing",
    "core.distributed",
    "core.models.gpt",
    "core.models.gpt.gpt_layer_specs",
    "core.optimizer",
    "core.pipeline_parallel",
    "core.transformer.moe.moe_layer",
):
    importlib.import_module(f"megatron.{name}")
importlib.import_module("tests.megatron.harness")
# Attaching imports these.
for name in ("buckets.ddp", "config.refusals", "layer"):
    importlib.import_module(f"flashmoe_megatron.adapters.megatron.{name}")
