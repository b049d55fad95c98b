"""A small forward and backward for compute-sanitizer: exact in its accesses, not in its results.

Run as ``compute-sanitizer --tool TOOL python -m tests.gpu.sanitized``. Prints one line for each
number of ranks. Virtual ranks need their launches to run side by side; a tool that runs one launch
after the other is told apart from an error by the timeout of the first plan.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import sys
import time

import torch

from flashmoe_megatron.errors import PeerTimeoutError
from flashmoe_megatron.runtime import KernelBackend
from tests.gpu import steps
from tests.gpu.test_layer import make_config
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

TOKENS = {1: [150], 2: [70, 33]}


def zeroed(
    backend: KernelBackend, *shape: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=backend.device)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(TOKENS), default=[1, 2])
    parser.add_argument(
        "--zeroed",
        action="store_true",
        help="hand out zeroed rows and results: initcheck does not see what TMA writes",
    )
    parser.add_argument("--timeout", type=float, default=15.0, help="of a wait for a peer, seconds")
    options = parser.parse_args(arguments)
    if options.zeroed:
        KernelBackend._empty = zeroed  # type: ignore[method-assign]
        torch.empty_like = torch.zeros_like
    for num_ranks in options.ranks:
        config = make_config(
            num_ranks, hidden=128, intermediate=64, num_experts=4, topk=2, max_tokens=160
        )
        inputs = steps.make_inputs(config, cases.with_dropped_tokens, TOKENS[num_ranks])
        weights = steps.weights_of(config, inputs)
        layer = VirtualLayer(config, is_guarded=False, timeout_s=options.timeout)
        # Instrumented kernels need more of everything: a small grid is enough to be in step.
        for backend in layer.backends:
            backend.num_ctas = min(backend.num_ctas, 8)
        start = time.monotonic()
        try:
            got = steps.step(layer, inputs, weights)
        except PeerTimeoutError as error:
            if num_ranks == 1:
                raise
            print(f"ranks {num_ranks}: serialized by the tool ({error})", flush=True)
            continue
        torch.cuda.synchronize()
        finite = all(bool(tensor.isfinite().all()) for tensor in vars(got).values())
        if not finite:
            print(f"ranks {num_ranks}: not finite", flush=True)
            return 1
        print(f"ranks {num_ranks}: ran in {time.monotonic() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
