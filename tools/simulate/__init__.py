"""A model of the layer on one host and far beyond it, fed by measured figures.

    python -m tools.simulate compare                      # measured against simulated times
    python -m tools.simulate fit RESULTS.jsonl ...        # the same, fitted again to figures.json
    python -m tools.simulate predict --out runs/simulate  # weak scaling to 4096 GPUs, with plots
    python -m tools.simulate fsmoe                        # FSMoE's layers and its ablation

Why a discrete-event simulation of our own, in plain Python and numpy: the kernel hands out tiles in
one total order from one counter, so that one rank is a list of tickets and a heap of the times at
which its clusters become free. That is what decides the waves of tiles, the wait for the first rows
and the tail, and a formula of bandwidths has none of these. It is twenty lines, and a library of
processes and events would add only overhead. All ranks are alike but for the number of
rows, so that the busiest one is simulated and the links are servers that it does not share.
"""
