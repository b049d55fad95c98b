"""Makes the name "flashmoe" known to transformers. Imported after it."""

import importlib.util

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from flashmoe_megatron.adapters.transformers.experts import experts_forward

NAME = "flashmoe"
SEAM = "transformers.distributed.expert_parallel"


def register() -> None:
    """Registers the experts' implementation, and that of expert parallelism where there is one."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    if importlib.util.find_spec(SEAM) is None:
        return
    from transformers.distributed import expert_parallel

    if hasattr(expert_parallel, "EPImplementationInterface"):
        from flashmoe_megatron.adapters.transformers.parallel import FlashMoEParallel

        expert_parallel.EPImplementationInterface.register(NAME, FlashMoEParallel)
