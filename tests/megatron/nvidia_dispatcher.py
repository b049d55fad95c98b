r"""Runs NVIDIA's own dispatcher tests on a dispatcher type. A program for torchrun.

Their package is named ``tests`` like ours, so this needs processes in which the checkout of
Megatron-LM comes first on the path::

    PYTHONPATH=MEGATRON_LM:. torchrun --nproc_per_node 2 \
        examples/cpu_bridge.py tests/megatron/nvidia_dispatcher.py flashmoe 2 1

The arguments are the dispatcher type, the expert and the tensor parallel size. On machines with
GPUs leave the bridge out.
"""

import sys
from typing import Any

TESTS: dict[str, dict[str, Any]] = {
    "dispatcher_dropless_test": {},
    "dispatcher_capacity_test": {
        "moe_token_drop_policy": "probs",
        "moe_expert_capacity_factor": 0.5,
    },
    "dispatcher_drop_and_pad_test": {
        "moe_expert_capacity_factor": 0.6,
        "moe_pad_expert_input_to_capacity": True,
    },
}


def main(dispatcher_type: str, expert_size: int, tensor_size: int) -> None:
    from flashmoe_megatron.adapters.megatron import install

    install()
    import torch.distributed as dist
    from megatron.core import utils
    from packaging.version import Version

    if utils.get_te_version() is None:
        # Their module asks for a minimum at import, also where Transformer Engine is missing.
        utils._te_version = Version("0")
    from tests.unit_tests.transformer.moe.test_token_dispatcher import MoEModelTestContainer

    # The others expect the experts to be sharded as attention is, over all tensor ranks.
    names = list(TESTS) if tensor_size == 1 else ["dispatcher_dropless_test"]
    for name in names:
        container = MoEModelTestContainer(
            tp_size=tensor_size,
            ep_size=expert_size,
            pp_size=1,
            moe_tp_size=1,
            hidden_size=64,
            moe_token_dispatcher_type=dispatcher_type,
            **TESTS[name],
        )
        used = type(container.moe_layer.token_dispatcher).__name__
        getattr(container, name)()
        if dist.get_rank() == 0:
            sys.stdout.write(f"PASSED {name} {used}\n")
            sys.stdout.flush()
        # Its end destroys the parallel state, which the next one makes anew.
        del container
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
