r"""Runs a Megatron training script with the flashmoe dispatcher added to Megatron.

::

    torchrun --nproc_per_node 8 -m flashmoe_megatron.run pretrain_gpt.py \
        --moe-token-dispatcher-type flashmoe ...

The script is the stock one; everything after its name is its own. With another dispatcher type it
runs as it does without this launcher.
"""

import runpy
import sys
from pathlib import Path

from flashmoe_megatron.adapters.megatron import install

USAGE = "usage: python -m flashmoe_megatron.run SCRIPT [ARGUMENTS]"


def main(arguments: list[str]) -> None:
    """Runs ``arguments[0]`` as Python would, with flashmoe installed.

    Args:
        arguments: The script's path and its arguments.

    Raises:
        SystemExit: There is no script, or it is not a file; the message says so.
    """
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit(f"{USAGE}: wanted a training script, got {arguments[:1] or 'nothing'}")
    script = Path(arguments[0])
    if not script.is_file():
        raise SystemExit(f"{script}: no such file; {USAGE}")
    install()
    sys.argv = arguments
    # As `python script` does: beside the script lies the Megatron that it belongs to.
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
