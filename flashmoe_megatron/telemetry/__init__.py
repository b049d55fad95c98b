"""Shows what happens inside the kernel, as records, metrics and their reduction over ranks.

``record`` is what a launch tells; ``totals`` adds launches up; ``registry`` says what each metric
is and ``metrics`` computes them, with the times of ``calibration``; ``reporter`` takes records,
adds up ranks and writes metrics to ``sinks``.
"""
