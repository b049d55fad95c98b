r"""Measures this machine for degrees that are computed.

::

    torchrun --nproc-per-node 8 -m flashmoe_megatron.schedule fit fit.json

Start it as the training will be, on all ranks of one expert-parallel group, also of several
hosts, and with its ``--exchange`` where copy engines are to carry rows. The file then goes to
``--flashmoe-degree-fit``, or to ``"degree_fit"`` in DeepSpeed's section, together with the degree
``auto``. One rank alone measures products and copies. Without a GPU, gloo is measured.

::

    torchrun --nproc-per-node 8 -m flashmoe_megatron.schedule trace trace.json \
        --degree auto --degree-fit fit.json \
        --hidden 2048 --intermediate 768 --num-experts 128 --topk 8 --gated --tokens 8192

runs one layer in one part and at its degree, and writes time stamps of each stream.
"""

import sys

from flashmoe_megatron.measured.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "flashmoe_megatron.schedule", __doc__, ["fit", "trace"]))
