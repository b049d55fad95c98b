"""Shows what happens inside one launch, on every SM of every rank.

    python tools/build.py --trace
    torchrun --nproc-per-node 4 -m tools.timeline capture --shape paper-8k --out runs/timeline

records a forward and a backward with the library that stamps the time, one ``.npz`` each, in a
folder without an earlier capture and after the correctness gate of ``bench_layer``; and then, on
any machine,

    python -m tools.timeline draw runs/timeline/forward.npz

writes next to it a picture (PNG and SVG: the work of tensor cores and links over time, all ranks
above each other, and a few SMs role by role) and ``forward.trace.json.gz`` for Perfetto
(https://ui.perfetto.dev) or chrome://tracing, with a track per SM and role.

    python -m tools.timeline summarize runs/timeline/forward.npz

prints tables: tile by tile how long products take and what they wait for, how long epilogues take,
and when what ends.
"""
