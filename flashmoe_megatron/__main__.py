r"""Says what runs here and why: versions, GPUs, the library, and the backend of a bf16 layer.

::

    python -m flashmoe_megatron
    torchrun --nproc-per-node 8 -m flashmoe_megatron --require kernel

Exit status 0: a bf16 layer ran forward and backward. 1: ``--require kernel`` asked for the kernel,
and the layer ran without it, or GPUs do not reach each other. 2: a broken installation. Under
torchrun the layer spans all ranks.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence

from flashmoe_megatron.doctor.fact import Fact, as_json, as_screen
from flashmoe_megatron.doctor.installed import (
    driver,
    environment,
    frameworks,
    installation,
    software,
)

BROKEN = 2
NO_KERNEL = 1


def facts() -> Iterator[Fact]:
    """Yields all facts; ends early where torch is missing, too old or broken."""
    found = [software(), driver()]
    yield from found
    yield installation()
    yield environment()
    yield from frameworks()
    if found[0].is_broken:
        return
    try:
        import torch  # noqa: F401 - whether it can be imported
    except (ImportError, OSError) as error:
        problem = f"torch is installed, but its import fails: {error}"
        yield Fact("torch_import", False, "fails", problem, is_broken=True)
        return
    from flashmoe_megatron.doctor import machine, trial
    from flashmoe_megatron.doctor.attention import attention
    from flashmoe_megatron.measured.reach import count_gpus

    yield machine.gpus(has_driver=found[1].value is not None)
    yield machine.library()
    yield machine.peer_access()
    yield machine.symmetric_memory()
    yield trial.layer()
    if is_first():
        yield attention(has_gpu=count_gpus() > 0)


def is_first() -> bool:
    """Returns whether this is the first of torchrun's ranks, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def main(arguments: Sequence[str]) -> int:
    """Prints the facts, on the first rank; see the module for the status.

    Args:
        arguments: The command line without the program.
    """
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m flashmoe_megatron", description=summary)
    parser.add_argument("--json", action="store_true", help="print JSON in place of a screen")
    parser.add_argument(
        "--require",
        choices=["kernel"],
        help="the backend without which the exit status is 1",
    )
    options = parser.parse_args(arguments)
    found = list(facts())
    lack = ""
    status = BROKEN if any(fact.is_broken for fact in found) else 0
    if options.require and not status:
        lack = _lack_of_kernel(found)
        status = NO_KERNEL if lack else 0
    if is_first():
        answer = {**as_json(found), "status": status}
        screen = json.dumps(answer, indent=2) if options.json else as_screen(found)
        sys.stdout.write(f"{screen}\n")
        if lack:
            sys.stderr.write(f"{parser.prog}: wanted the kernel: {lack}\n")
    return status


def _lack_of_kernel(found: Sequence[Fact]) -> str:
    """Says why the kernel does not serve all of the machine's GPUs, empty if it does."""
    by_name = {fact.name: fact for fact in found}
    layer = by_name["bf16_layer"].value
    if layer["backend"] != "kernel":
        return f"the layer ran on the backend {layer['backend']}, since {layer['why_not_kernel']}"
    return by_name["peer_access"].problem


if __name__ == "__main__":
    logging.getLogger("flashmoe_megatron").setLevel(logging.ERROR)  # the screen names the backend
    sys.exit(main(sys.argv[1:]))
