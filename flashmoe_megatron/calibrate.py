r"""Measures a layer on 2 GPUs, once, for the overlap efficiency of runs on more of them.

::

    torchrun --nproc-per-node 2 -m flashmoe_megatron.calibrate t2.json \
        --hidden 2048 --intermediate 768 --num-experts 128 --topk 8 --gated --tokens 8192 \
        --grads main_grad

The file then goes to ``--flashmoe-calibration``, or to ``"calibration"`` in DeepSpeed's section.
Tokens are those of one rank and call, as in the run. A run refuses a file that differs from it in
``--grads``, ``--row-bound`` or ``--keep``. Another layer is added to the file, and the same layer
in another way replaces it. Without a GPU the reference backend is measured.
"""

import sys

from flashmoe_megatron.measured.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "flashmoe_megatron.calibrate", __doc__, ["layer"]))
