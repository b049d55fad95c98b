"""Measures what this machine takes, for files that trainings read.

``python -m flashmoe_megatron.measured`` has all commands. Their older names say how they are
called: :mod:`flashmoe_megatron.calibrate` is ``layer``, and :mod:`flashmoe_megatron.schedule` has
``fit`` and ``trace``.
"""

import argparse
import sys
from collections.abc import Sequence

import torch.distributed as dist

from flashmoe_megatron.errors import FlashMoEError
from flashmoe_megatron.measured import machine, trace, two_gpus

COMMANDS = {
    "layer": ("times a layer on 2 GPUs", two_gpus),
    "fit": ("measures alpha and beta of all that a layer does", machine),
    "trace": ("stamps one layer, in one part and at its degree", trace),
}


def main(
    arguments: Sequence[str],
    name: str = "flashmoe_megatron.measured",
    about: str | None = __doc__,
    commands: Sequence[str] = tuple(COMMANDS),
) -> int:
    """Runs from the command line; under torchrun, one process for each rank.

    Args:
        arguments: The command line without the program.
        name: How the program is called.
        about: Its docstring, whose first line is in the help.
        commands: Its commands. A single one is not named in the arguments.
    """
    parser = argparse.ArgumentParser(name, description=(about or "").partition("\n")[0])
    subparsers = None
    if len(commands) > 1:
        subparsers = parser.add_subparsers(dest="command", required=True)
    for command in commands:
        text, module = COMMANDS[command]
        own = subparsers.add_parser(command, help=text) if subparsers else parser
        module.add_arguments(own)
        own.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except FlashMoEError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
