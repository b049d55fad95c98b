"""Imports what ranks of DeepSpeed's need, in the process from which they are forked.

Engines and optimizers import PyTorch's compiler and transformers when they are made, which takes
each rank three seconds; and all later collections of garbage would look at them.
"""

import contextlib
import importlib

for name in ("torch._dynamo", "transformers", "tests.deepspeed.harness", "deepspeed"):
    importlib.import_module(name)
for name in (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "flashmoe_megatron.adapters.deepspeed.attach",
    "flashmoe_megatron.adapters.deepspeed.metrics",
):
    with contextlib.suppress(ImportError):  # older releases of DeepSpeed have not all of them
        importlib.import_module(name)
