r"""Measures a layer on 2 GPUs, once, for the overlap efficiency of runs on more of them.

::

    torchrun --nproc-per-node 2 -m flashmoe_megatron.calibrate t2.json \
        --hidden 2048 --intermediate 768 --num-experts 128 --topk 8 --gated --tokens 8192 \
        --grads main_grad

The file then goes to ``--flashmoe-calibration``, or to ``"calibration"`` in DeepSpeed's section.
Tokens are those of one rank and call, as in the run; routing is uniform at random. ``--grads``,
``--row-bound`` and ``--keep`` have to be as in the run, too, since they change what a launch does
and what is a launch of its own: a run refuses a file that differs in them. What ``--keep auto``
takes depends on the number of ranks: give the mode that the run's log names. Backends, degrees and
exchanges are not compared. Measuring another layer into the same file adds it, and the same layer
in another way replaces it.
Without a GPU the reference backend is measured.
"""

import sys

from flashmoe_megatron.measured.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "flashmoe_megatron.calibrate", __doc__, ["layer"]))
