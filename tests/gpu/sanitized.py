"""A small forward and backward for compute-sanitizer: exact in its accesses, not in its results.

Run as ``compute-sanitizer --tool TOOL python -m tests.gpu.sanitized``. Prints one line for each
number of ranks. Virtual ranks need their launches to run side by side; a tool that runs one launch
after the other is told apart from an error by the timeout of the first plan.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from flashmoe_megatron.config import KEEPS, TILE_M
from flashmoe_megatron.errors import PeerTimeoutError
from flashmoe_megatron.kernel import ops
from tests.gpu import steps
from tests.gpu.layers import make_config
from tests.gpu.virtual import VirtualLayer
from tests.unit import cases

TOKENS = {1: [150], 2: [70, 33]}
INTERMEDIATE = 64


@contextlib.contextmanager
def zeros_where_copies_write(num_ranks: int) -> Iterator[None]:
    """Has every launch begin with zeros where TMA and bulk copies write.

    All of these are rows of ``hidden`` elements. What else the kernel reads it has written by
    ordinary stores: the plan, pre-activations, activations, the gradient of fc1's output, partial
    sums of the probabilities' gradient, each with its pad rows. That stays as it was allocated.
    """
    forward, backward = ops.forward, ops.backward

    def zero_rows(scratch: torch.Tensor, num_blocks: int, hidden: int, matrices: int) -> None:
        # Behind the activations: scratch_at of csrc/host/launch.cu.
        first, num_rows = 2 * num_blocks * TILE_M * INTERMEDIATE, num_blocks * TILE_M
        scratch[first : first + 2 * matrices * num_rows * hidden].zero_()

    def zeroed_forward(*given: Any) -> None:
        plan, _maps, _copies, _biases, rows, _preact, scratch, out, num_blocks = given[:9]
        scratch_at, rows_at = given[12:14]
        if scratch is None:
            scratch = plan[scratch_at:]
        if rows_at:
            rows = plan[rows_at:]
        if rows is not None:
            rows.zero_()
        zero_rows(scratch, num_blocks, out.shape[1], 1)  # results
        out.zero_()
        forward(*given)

    def zeroed_backward(*given: Any) -> None:
        *_, scratch, grad_x, _grad_probs, _table, num_blocks = given[:13]
        # Results, and received gradients, which narrow experts of one rank read in place.
        zero_rows(scratch, num_blocks, grad_x.shape[1], 1 if num_ranks == 1 else 2)
        grad_x.zero_()
        backward(*given)

    zeroed = {"forward": zeroed_forward, "backward": zeroed_backward}
    with mock.patch.multiple(ops, **zeroed):
        yield


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(TOKENS), default=[1, 2])
    parser.add_argument(
        "--zeroed",
        action="store_true",
        help="zero rows, results and outputs before each launch, since initcheck does not see that "
        "TMA and bulk copies write them; it does see what of a plan or of activations is missing",
    )
    parser.add_argument("--timeout", type=float, default=15.0, help="of a wait for a peer, seconds")
    options = parser.parse_args(arguments)
    # One rank reads its tokens in place of rows that it does not keep.
    runs = [(ranks, keep) for ranks in options.ranks for keep in KEEPS[: 2 if ranks == 1 else 1]]
    for num_ranks, keep in runs:
        config = make_config(
            num_ranks, hidden=128, intermediate=INTERMEDIATE, num_experts=4, topk=2, max_tokens=160
        )
        inputs = steps.make_inputs(config, cases.with_dropped_tokens, TOKENS[num_ranks])
        weights = steps.weights_of(config, inputs)
        layer = VirtualLayer(config, is_guarded=False, timeout_s=options.timeout, keep=keep)
        zeros = zeros_where_copies_write(num_ranks) if options.zeroed else contextlib.nullcontext()
        label = f"ranks {num_ranks}, keep {keep}"
        # Instrumented kernels need more of everything: a small grid is enough to be in step.
        for backend in layer.backends:
            backend.num_ctas = min(backend.num_ctas, 8)
        start = time.monotonic()
        try:
            with zeros:
                got = steps.step(layer, inputs, weights)
        except PeerTimeoutError as error:
            if num_ranks == 1:
                raise
            print(f"ranks {num_ranks}: serialized by the tool ({error})", flush=True)
            continue
        torch.cuda.synchronize()
        finite = all(bool(tensor.isfinite().all()) for tensor in vars(got).values())
        if not finite:
            print(f"{label}: not finite", flush=True)
            return 1
        print(f"{label}: ran in {time.monotonic() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
