r"""Measures this machine for degrees that are computed.

::

    torchrun --nproc-per-node 8 -m flashmoe_megatron.schedule fit fit.json

Start it as the training will be started. The file then goes to ``--flashmoe-degree-fit``, or to
``"degree_fit"`` in DeepSpeed's section, with the degree ``auto``. Without a GPU, gloo is measured.

::

    torchrun --nproc-per-node 8 -m flashmoe_megatron.schedule trace trace.json \
        --degree auto --degree-fit fit.json \
        --hidden 2048 --intermediate 768 --num-experts 128 --topk 8 --gated --tokens 8192

writes time stamps of each stream for one layer, in one part and at its degree.
"""

import sys

from flashmoe_megatron.measured.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "flashmoe_megatron.schedule", __doc__, ["fit", "trace"]))
