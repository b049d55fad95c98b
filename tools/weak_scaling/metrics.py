"""Figures of a layer's points: the columns of the report, and the curves of wandb."""

from dataclasses import replace

from flashmoe_megatron.bench.shapes import Shape
from flashmoe_megatron.errors import DeviceError
from flashmoe_megatron.kernel.memory import plan_memory
from tools.weak_scaling.machine import machine_of
from tools.weak_scaling.points import IMPLEMENTATIONS, PASSES, Measured, Point

MIB = 2**20
EXPLAINED = {
    "_ms": "is the median of the slowest rank's calls, each from an idle device",
    "_spread": "is the difference of the longest and the shortest call over the median",
    "_mtokens_per_s": "has the million tokens a second of all ranks",
    "_efficiency": "is Oe, the time on 2 ranks over this one: 1 if more ranks cost nothing",
    "_exposed_ms": "is the exposed communication: what this takes longer than one rank alone at "
    "equal tokens per rank",
    "/speedup": "is the unfused time over ours",
    "kernel/": "has what launches record that follow one another without a pause, without the "
    "hosts",
    "planned/": "has the MiB that the kernel's plan has for a rank: its tokens, the symmetric heap "
    "of all layers, and what a forward keeps",
    "floor_ms": "is the least time of a forward, of products, weights or bytes over links",
    "imbalance": "has the rows of the busiest rank over the mean",
    "error": "is the largest relative L2 distance of our results from float32",
}
"""Columns by a part of their names, and what they hold."""


def metrics_of(measured: Measured, point: Point) -> dict[str, float]:
    """Returns a point's figures; ours are named ``reference`` where no GPU is.

    Efficiencies are T(2) / T(N) at equal tokens per rank, and exposed communication is T(N) - T(1),
    where these points are measured.
    """
    records = measured[point]
    ours = machine_of(records["fused", "forward"]).ours
    labels = dict(zip(IMPLEMENTATIONS, (ours, "unfused"), strict=True))
    times = times_of(measured, point)
    found: dict[str, float] = {}
    for what in PASSES:
        for name, label in labels.items():
            key, record = f"{what}/{label}", records[name, what]
            found[f"{key}_ms"] = time = times[key]
            found[f"{key}_spread"] = (record["max_ms"] - record["min_ms"]) / time
            found[f"{key}_mtokens_per_s"] = point.tokens * point.ranks / time / 1e3
        found[f"{what}/speedup"] = times[f"{what}/unfused"] / times[f"{what}/{ours}"]
    found |= {f"{name}_ms": time for name, time in times.items() if name.startswith("kernel/")}
    for ranks, ending in ((2, "efficiency"), (1, "exposed_ms")):
        other = replace(point, ranks=ranks)
        if other not in measured or point.ranks < 2:
            continue
        before = times_of(measured, other)
        for name in (name for name in times if name in before):
            pair = before[name], times[name]
            found[f"{name}_{ending}"] = pair[0] / pair[1] if ranks == 2 else pair[1] - pair[0]
    found["floor_ms"] = records["fused", "forward"]["floor_ms"]
    found["imbalance"] = records["fused", "forward"]["imbalance"]
    found["error"] = max(records["fused", "gate"]["relative_l2"].values())
    return {**found, **planned_mib(point)}


def times_of(measured: Measured, point: Point) -> dict[str, float]:
    """Returns a point's median milliseconds, by the measurement and the implementation."""
    records = measured[point]
    ours = machine_of(records["fused", "forward"]).ours
    found = {
        f"{what}/{label}": float(records[name, what]["median_ms"])
        for what in PASSES
        for name, label in zip(IMPLEMENTATIONS, (ours, "unfused"), strict=True)
    }
    for direction in ("forward", "backward"):
        record = records.get(("fused", f"{direction} kernel"))
        if record is not None:
            found[f"kernel/{direction}"] = float(record["median_ms"])
    return found


def planned_mib(point: Point) -> dict[str, float]:
    """Returns what the kernel plans for one rank; nothing without the library, which plans."""
    shape = Shape(
        point.tokens, point.hidden, point.intermediate, point.num_experts, point.topk, gated=False
    )
    try:
        plan = plan_memory(shape.config(point.ranks), keep="all")
    except DeviceError:
        return {}
    return {
        "planned/tokens_mib": plan.token_buffer / MIB,
        "planned/symmetric_mib": plan.symmetric / MIB,
        "planned/kept_mib": plan.kept / MIB,
    }
