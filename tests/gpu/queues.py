"""Tells what begins behind a launch that waits for room, as a line of JSON.

    CUDA_DEVICE_MAX_CONNECTIONS=1 python -m tests.gpu.queues

CUDA reads the number of hardware queues when a process starts, so that each needs one of its own.
"""

# ruff: noqa: T201 - a program: it prints

import json
import time

import torch

from tests.gpu import steps
from tests.gpu.layers import TOKENS, make_config
from tests.gpu.spinner import Spinner
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

HELD_SMS = 40
"""Too many for a launch to find its room beside them."""
LATE_SMS = 2
BEGINNING_S = 2.0
"""How long a kernel may take to begin where there is room, beside other processes, too."""


def main() -> None:
    """Launches a layer beside a kernel that holds its room, and another kernel behind it."""
    config = make_config(1)
    inputs = steps.make_inputs(config, cases.uniform, TOKENS[1])
    weights = steps.weights_of(config, inputs)
    layer = VirtualLayer(config)
    layer.prepare()
    (backend,), (routing_map,) = layer.backends, inputs.routing_map
    blocks = int(backend._sizes.max_row_blocks)
    early, late = Spinner(), Spinner()
    outputs = []

    def forward() -> torch.cuda.Event:
        with layer._on_stream(0):
            pending = backend.begin(inputs.x[0], inputs.probs[0], routing_map, blocks)
            outputs.append(backend.finish(pending, weights[0], training=False)[0])
            return torch.cuda.current_stream().record_event()

    forward()
    for spinner in (early, late):  # a kernel's first launch may wait for running ones
        with spinner.hold(LATE_SMS):
            pass
    with early.hold(HELD_SMS):
        end = forward()
        late.launch(LATE_SMS)
        deadline = time.monotonic() + BEGINNING_S
        while late.num_begun < LATE_SMS and time.monotonic() < deadline:
            time.sleep(0.01)
        told = {"is_launch_over": end.query(), "num_begun": late.num_begun}
        assert early.is_running
    late.leave()
    torch.cuda.synchronize()
    told["num_begun_at_last"] = late.num_begun
    told["is_same"] = torch.equal(*outputs)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
