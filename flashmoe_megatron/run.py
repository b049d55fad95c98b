r"""Runs a Megatron training script with the flashmoe dispatcher added to Megatron.

::

    torchrun --nproc_per_node 8 -m flashmoe_megatron.run pretrain_gpt.py \
        --moe-token-dispatcher-type flashmoe ...

The script is the stock one; everything after its name is its own. With another dispatcher type it
runs as it does without this launcher.
"""

import argparse
import runpy
import sys
from pathlib import Path

from flashmoe_megatron.adapters.megatron import install
from flashmoe_megatron.adapters.megatron.arguments import add_flag_group

USAGE = "python -m flashmoe_megatron.run SCRIPT [ARGUMENTS]"


def main(arguments: list[str]) -> None:
    """Runs ``arguments[0]`` as Python would, with flashmoe installed.

    The rest are the script's; ``--help`` in its place prints the flags that a script gets.

    Raises:
        SystemExit: Help was asked for; or there is no script, or it is not a file, and the message
            says so.
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
    install()
    sys.argv = arguments
    # As `python script` does: its Megatron lies in the same folder as the script. With -P or
    # PYTHONSAFEPATH neither Python puts a folder there, and the first path is one of the user's.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
