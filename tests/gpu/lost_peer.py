"""A program whose rank 1 publishes its routing and then never computes; loses its CUDA context.

Prints the error that explains it.
"""

# ruff: noqa: T201 - a program: it prints

import os
import sys
import time

import torch

from flashmoe_megatron.errors import PeerTimeoutError
from tests.gpu import steps
from tests.gpu.test_layer import TOKENS, make_config
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

TIMEOUT_S = 1.0


def main() -> int:
    config = make_config(2)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[2])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config, timeout_s=TIMEOUT_S, is_guarded=False)
    pending = layer.begin(inputs.x, inputs.probs, inputs.routing_map)
    start = time.monotonic()
    layer.finish(pending[:1], weights)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("CUDA:", str(error).splitlines()[0])
    else:
        print("the kernel returned although its peer never computed")
        return 1
    seconds = time.monotonic() - start
    if seconds > TIMEOUT_S + 4:
        print(f"the kernel gave up after {seconds:.1f} s, wanted {TIMEOUT_S} s")
        return 1
    try:
        layer.backends[0].raise_pending_fault()
    except PeerTimeoutError as error:
        print(f"PeerTimeoutError: {error}")
        return 0
    print("no fault was recorded")
    return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # torch cannot tidy up without a context
