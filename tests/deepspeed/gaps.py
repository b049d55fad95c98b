"""Trains in DeepSpeed over a link that a clock paces, with gradients in the gaps and without.

    torchrun --nproc-per-node 2 -m tests.deepspeed.gaps

Everything runs as it does, on two gloo processes, and a clock says how long it would take where
computation and one link between ranks are streams of their own, as the model of degrees has them:
the link takes exchanges and reductions in the order in which they are issued, products take their
operations' time, and all else takes none. So the figures do not depend on the machine. There is a
line for each size of reductions: milliseconds of a step where all gradients are reduced at the end
(one large bucket), where buckets are reduced when they are full, and where they wait for gaps.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import streams
from flashmoe_megatron.adapters.deepspeed.slices import travelling
from flashmoe_megatron.adapters.gradients import FLOPS_OF_BACKWARD
from flashmoe_megatron.measured.fit import write_fit
from flashmoe_megatron.separate.exchange import Exchange
from flashmoe_megatron.separate.steps import Steps
from tests.deepspeed.harness import Case, batch, build
from tests.fits import make_fit

TOKENS, LAYERS, STEPS = 128, 4, 3
FLOP_S = 1.2e-9  # products of a layer's experts take 10 ms, and so do gradients of weights
BYTE_S = 1.5e-7  # and each of its exchanges 10 ms
REDUCTIONS_MS = (2.5, 5.0, 10.0, 20.0, 40.0)
"""How long the gradients of one layer take to be reduced."""
ALPHA_S = 1e-5
DENSE_BYTES = 4 * (64 * 64 + 64 + 4 * 64)


class Clock:
    """Says when computation and the link are free.

    Attributes:
        now: Seconds until the computation has done what was issued.
        link: The same of the link.
        reduction_byte_s: What a reduction takes.
    """

    def __init__(self, reduction_byte_s: float) -> None:
        self.now = self.link = 0.0
        self.reduction_byte_s = reduction_byte_s

    def compute(self, flops: float) -> None:
        self.now += flops * FLOP_S

    def travel(self, seconds: float) -> float:
        """Takes the link behind what it has; returns when that is over."""
        self.link = max(self.link, self.now) + ALPHA_S + seconds
        return self.link

    def wait(self, moment: float) -> None:
        self.now = max(self.now, moment)


@contextmanager
def paced(clock: Clock) -> Iterator[None]:
    """Has a scheduled layer's exchanges and products tell the clock."""
    with pytest.MonkeyPatch.context() as patches:
        run, wait = Exchange.run, streams.wait

        def timed_run(self: Any, slot: Any, send: Any, *rest: Any) -> Any:
            run(self, slot, send, *rest)
            return clock.travel(send.numel() * send.element_size() * BYTE_S)

        def timed_wait(device: torch.device, moment: Any) -> None:
            if isinstance(moment, float):
                clock.wait(moment)
            else:
                wait(device, moment)

        patches.setattr(Exchange, "run", timed_run)
        patches.setattr(streams, "wait", timed_wait)
        for name in ("product", "grad_product"):
            method = getattr(Steps, name)

            def timed(self: Any, rows: Any, *rest: Any, method: Any = method) -> Any:
                found = method(self, rows, *rest)
                clock.compute(2 * len(rows) * rows.shape[1] * found.shape[1])
                return found

            patches.setattr(Steps, name, timed)
        weights = Steps.add_weight_grad

        def timed_weights(self: Any, targets: Any, left: Any, right: Any, *rest: Any) -> None:
            weights(self, targets, left, right, *rest)
            clock.compute(2 * len(left) * left.shape[1] * right.shape[1])

        patches.setattr(Steps, "add_weight_grad", timed_weights)
        yield


def pace_engine(engine: Any, clock: Clock) -> None:
    """Has dense layers and ZeRO's reductions tell the clock."""
    flops = FLOPS_OF_BACKWARD * TOKENS * DENSE_BYTES / 4
    for layer in engine.module.dense:
        layer.register_forward_hook(lambda *_: clock.compute(flops / 2))
        layer.register_full_backward_hook(lambda *_: clock.compute(flops))
    optimizer = engine.optimizer
    average, end = optimizer.average_tensor, optimizer.independent_gradient_partition_epilogue

    def timed_average(tensor: torch.Tensor, dtype: torch.dtype) -> None:
        average(tensor, dtype)
        if elements := travelling(optimizer, optimizer.ipg_buckets[dtype]):
            clock.travel(elements * tensor.element_size() * clock.reduction_byte_s)

    def timed_end() -> None:
        end()
        clock.wait(clock.link)

    optimizer.average_tensor = timed_average
    optimizer.independent_gradient_partition_epilogue = timed_end


def step_ms(reduction_ms: float, *, waits: bool, bucket: int | None) -> tuple[float, int]:
    """Returns milliseconds of the last step, and how many elements a bucket has."""
    byte_s = reduction_ms * 1e-3 / DENSE_BYTES
    with tempfile.TemporaryDirectory() as folder:
        fit = Path(folder) / "fit.json"
        line = (ALPHA_S, byte_s)
        lines = {"product": (0.0, FLOP_S), "copy": (0.0, 1e-15), "all_reduce": line}
        write_fit(fit, make_fit(**lines, all_to_all=(ALPHA_S, BYTE_S)))
        zero: dict[str, Any] = {"stage": 2, "overlap_comm": True}
        if bucket is not None:
            zero["reduce_bucket_size"] = bucket
        settings = {"backend": "scheduled", "keep": "all", "max_tokens": TOKENS}
        settings |= {"slice_gradients": waits, "degree_fit": str(fit)}
        model = {"ep_sizes": (2,) * LAYERS, "k": 2, "drop_tokens": False}
        case = Case(
            model=model,
            zero=2,
            config={"zero_optimization": zero},
            settings=settings,
            tokens=(TOKENS,),
        )
        engine = build(case, fused=True)
        clock = Clock(byte_s)
        with paced(clock):
            for step in range(STEPS):
                loss = engine(*batch(case, step, torch.float32))
                if step == 0:  # DeepSpeed has its own hooks by now
                    pace_engine(engine, clock)
                begin = clock.now
                engine.backward(loss)
                engine.step()
                took = clock.now - begin
        return took * 1e3, int(engine.optimizer.reduce_bucket_size)


def main() -> None:
    dist.init_process_group("gloo")
    for reduction_ms in REDUCTIONS_MS:
        in_gaps, bucket = step_ms(reduction_ms, waits=True, bucket=None)
        at_once, _ = step_ms(reduction_ms, waits=False, bucket=bucket)
        at_end, _ = step_ms(reduction_ms, waits=False, bucket=None)
        if dist.get_rank() == 0:
            sys.stdout.write(
                f"{reduction_ms} ms a layer, buckets of {bucket}: backward {at_end:.1f} ms at the "
                f"end, {at_once:.1f} when full, {in_gaps:.1f} in gaps: {at_once / in_gaps:.3f} and "
                f"{at_end / in_gaps:.3f} times\n"
            )
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
