r"""Runs a Megatron training script with the flashmoe dispatcher added to Megatron.

::

    torchrun --nproc_per_node 8 -m flashmoe_megatron.run pretrain_gpt.py \
        --moe-token-dispatcher-type flashmoe ...

The script is the stock one; everything after its name is its own. With another dispatcher type it
runs as it does without this launcher. An error of this package ends it with one line; the log has
the trace at the level DEBUG.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from flashmoe_megatron.adapters.megatron import attach
from flashmoe_megatron.adapters.megatron.arguments import add_flag_group, expect_flags
from flashmoe_megatron.adapters.megatron.settings import check_flags_are_read
from flashmoe_megatron.errors import FlashMoEError, original_of
from flashmoe_megatron.releases import MEGATRON

USAGE = "python -m flashmoe_megatron.run SCRIPT [ARGUMENTS]"


def main(arguments: list[str]) -> None:
    """Runs ``arguments[0]`` as Python would, with flashmoe installed.

    The rest are the script's; ``--help`` in its place prints the flags that a script gets.

    Raises:
        SystemExit: Help was asked for; or there is no script, or it is not a file, and the message
            says so; or the script has ended with an error of this package, which was printed as one
            line, by the first of all ranks that has one.
    """
    if arguments[:1] in (["--help"], ["-h"]):
        summary = (__doc__ or "").partition("\n")[0]
        parser = argparse.ArgumentParser(usage=USAGE, description=summary, add_help=False)
        add_flag_group(parser)
        parser.print_help()
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        got = arguments[0] if arguments else "nothing"
        raise SystemExit(f"usage: {USAGE}: wanted a training script, got {got}")
    script = Path(arguments[0])
    if not script.is_file():
        raise SystemExit(f"{script}: no such file; usage: {USAGE}")
    attach()
    sys.argv = arguments
    # As `python script` does: its Megatron lies in the same folder as the script. With -P or
    # PYTHONSAFEPATH neither Python puts a folder there, and the first path is one of the user's.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(script.resolve().parent)
    expect_flags(arguments[1:])
    try:
        with MEGATRON.needed():
            runpy.run_path(str(script), run_name="__main__")
        check_flags_are_read()
    except FlashMoEError as error:
        _end(error)


def _end(error: FlashMoEError) -> NoReturn:
    """Ends the process after an error of this package, which one rank prints for all."""
    import logging

    from flashmoe_megatron.ranks import is_first  # imports torch, as the script does in its time

    logging.getLogger("flashmoe_megatron").debug("the trace of the error:", exc_info=error)
    if is_first("print an error"):
        first = original_of(error)
        message = str(first)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not message.startswith("rank "):
            message = f"rank {os.environ['RANK']}: {message}"
        sys.stderr.write(f"flashmoe_megatron.run: {type(first).__name__}: {message}\n")
        sys.stderr.flush()
    raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
