"""Trains the tests' small model with each gate, on two gloo processes.

    python -m tests.megatron.gates

Prints a line for each gate: the first loss, the mean of the last ten, and that of an evaluation.
Needs no GPU and no checkout of Megatron-LM.
"""

import contextlib
import sys
from statistics import mean

from tests.distributed import RankPool
from tests.forks import ForkServer
from tests.megatron.harness import Case, Layout, train

STEPS = 60


def main() -> None:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(contextlib.closing(ForkServer("tests.megatron.preloaded")))
            for _ in range(2)
        ]
        pool = stack.enter_context(contextlib.closing(RankPool(2, servers)))
        for gate in ("router", "gshard", "sigmoid", "xmoe"):
            case = Case(Layout(expert=2), steps=STEPS, micro_batches=1, settings={"gate": gate})
            outcomes = pool.run(train, case, True)
            losses = [mean(step) for step in zip(*(one.losses for one in outcomes), strict=True)]
            evaluated = mean(one.eval_losses[0] for one in outcomes)
            values = (losses[0], mean(losses[-10:]), evaluated)
            sys.stdout.write(f"{gate}: {' '.join(f'{value:.3f}' for value in values)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
