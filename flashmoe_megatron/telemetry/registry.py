"""Every metric by name: key, unit, which way is better, how it is defined and where that is from.

"Launches" below are training's, of all ranks since the last report, as far as backends still have
them: the kernel keeps its last 256, so that larger steps are sampled. On a backend without the
kernel a call of a layer takes the place of a launch. What layers do in evaluation mode is in no
metric (see :func:`~flashmoe_megatron.telemetry.record.launch_number`). Ranks may tell of different
numbers of launches; rows and bytes are per launch of the rank that counted them.

A phase is the mean over a launch's CTAs (see :class:`~flashmoe_megatron.telemetry.record.Phase`). A
metric whose ingredients were not measured is absent, never 0; so are the phases of a launch of the
kernel that takes longer than 0.36 s, as a backward does that waits for a late rank, because its
counters hold no more.

A forward and a backward each leave the record of one launch. What else they may launch leaves none:
a plan of its own, where training has no ``row_bound``; with ``keep`` "preactivations" the launch
that fetches tokens again for a backward; and the sum of the gradients of biases.
"""

from dataclasses import dataclass
from typing import Literal

from flashmoe_megatron.config import nearest
from flashmoe_megatron.errors import ConfigError

PREFIX = "flashmoe/"
"""Begins every key."""

Better = Literal["higher", "lower", "neither"]
Reduction = Literal["sum", "mean", "ratio of sums", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """The meaning of one name.

    Attributes:
        name: What a user chooses it by.
        key: Its name in loggers, without the prefix; one key for every value of a word in braces.
        unit: The value's unit; "1" for ratios and shares.
        better: Which way is better.
        reduction: How the figures of launches and ranks become one.
        source: Where the formula is from.
        definition: The formula, in words.
        is_detail: Left out unless asked for: one key for each layer, peer, expert or phase.
    """

    name: str
    key: str
    unit: str
    better: Better
    reduction: Reduction
    source: str
    definition: str
    is_detail: bool = False


_OURS = "this package"
_PAPER = "FlashMoE, arXiv:2506.04667"
_CLOCK = "the GPU's clock, read inside the launch or at moments of a call; a processor's own"
_COUNTED = "counted in the kernel"

# fmt: off
_ALL = (
    Metric("layer_ms", "{direction}/layer_ms", "ms", "lower", "mean", _CLOCK,
        "time of one layer's experts and exchanges: on the kernel of one launch, from its first "
        "CTA's begin to its last CTA's end, on other backends of one call; launches that leave no "
        "record are not in it"),
    Metric("layer_ms_max", "{direction}/layer_ms_max", "ms", "lower", "max", _CLOCK,
        "the longest of any rank and layer"),
    Metric("each_layer_ms", "{direction}/layer_{layer}/layer_ms", "ms", "lower", "mean",
        _CLOCK,
        "layer_ms of one layer", is_detail=True),
    Metric("hidden_communication", "{direction}/hidden_communication", "1", "higher",
        "ratio of sums", "measured inside one run; FlashMoE and its kin call it overlap",
        "1 - exposed_wait_ms / communication_ms, at least 0: the share of the communication's "
        "time that the processors did not spend waiting for it"),
    Metric("exposed_wait_ms", "{direction}/exposed_wait_ms", "ms", "lower", "mean", _OURS,
        "processors' time lost to communication: the smaller of ROWS_WAIT (the loader waited for "
        "rows) and HEAD + STAGE_WAIT (the processors had nothing to do), plus TAIL. In a forward "
        "the wait for peers that begin late is in its plan, before the first ROWS_WAIT, and not "
        "in it; a backward has no plan, so there it is"),
    Metric("communication_ms", "{direction}/communication_ms", "ms", "lower", "mean", _OURS,
        "time that a CTA's communication roles were busy: DISPATCH + DELIVER + REDUCE; of a "
        "backward with keep preactivations also while tokens were fetched again, which is not in "
        "its layer_ms"),
    Metric("phase_share", "{direction}/phase/{phase}", "1", "neither", "ratio of sums", _OURS,
        "a phase's time over the launch's; roles run beside each other, so shares do not add up "
        "to 1", is_detail=True),
    Metric("overlap_efficiency", "{direction}/overlap_efficiency", "1", "higher",
        "ratio of sums", f"{_PAPER}, section 4",
        "Oe = T(2) / T(N): the layer's time on 2 GPUs, from the calibration file, over layer_ms "
        "here, at equal tokens per GPU. Both have to be of the same launches: with or without "
        "row_bound, with the same keep, gradients of weights added to main_grad or not, and as "
        "many reserved SMs, of which calibration leaves the default"),
    Metric("sm_utilization", "{direction}/sm_utilization", "1", "higher", "ratio of sums",
        f"{_PAPER}, section 4",
        "share of the SMs' time in which they held a CTA, and so at least one warp in flight, a "
        "CTA that left early counted until the launch's end: CTAs over SMs. A persistent kernel "
        "has it constant by construction; what is missing to 1 is the SMs left to other kernels"),
    Metric("tensor_core_fed", "{direction}/tensor_core_fed", "1", "higher", "ratio of sums",
        _OURS,
        "share of the SMs' time in which the main loops ran with operands at hand: CTAs times "
        "GEMM (without STAGE_WAIT) over SMs times the launch's. Taken rather than FLOPs over "
        "peak because both sides are of one launch and clock, and no data sheet's rate that the "
        "GPU cannot hold is in it"),
    Metric("tflops", "{direction}/tflops", "TFLOP/s per GPU", "higher", "ratio of sums",
        "2 * rows * hidden * (fc1 rows + intermediate), in backward twice",
        "FLOPs of the routed rows' two projections, in backward of the rows' and the weights' "
        "gradients, pads left out, over layer_ms"),
    Metric("tokens_per_second", "tokens_per_second", "1/s", "higher", "sum", _OURS,
        "tokens that training put through each MoE layer on all ranks, recomputation left out, "
        "the mean over layers, over the host's time since the last report"),
    Metric("mib_sent", "{direction}/mib_sent", "MiB per rank and launch", "lower", "mean",
        _COUNTED,
        "rows that crossed a link, in dispatch and combine, times their bytes; in backward with "
        "keep preactivations also the tokens that were fetched again"),
    Metric("padded_mib", "{direction}/padded_mib", "MiB per rank and launch", "neither", "mean",
        "Megatron-Core's --moe-pad-expert-input-to-capacity",
        "what a padded all-to-all would have sent: every expert of another rank gets its "
        "capacity, filled or not, in dispatch and in combine. Capacity as Megatron's "
        "drop-and-pad has it, with the run's factor, else 1, at which it would drop tokens "
        "wherever routing is uneven"),
    Metric("aligned_mib", "{direction}/aligned_mib", "MiB per rank and launch", "neither",
        "mean", f"{_PAPER}, section 3.2.1",
        "the same with the capacity rounded up to tiles of 128 rows"),
    Metric("payload_share", "{direction}/payload_share", "1", "lower",
        "ratio of sums", f"{_PAPER}, section 3.2",
        "mib_sent / padded_mib"),
    Metric("aligned_payload_share", "{direction}/aligned_payload_share", "1", "lower",
        "ratio of sums", f"{_PAPER}, section 3.2.1",
        "mib_sent / aligned_mib"),
    Metric("mib_between", "mib/rank_{source}_to_{target}", "MiB per launch", "lower", "mean",
        _COUNTED,
        "bytes from one rank of an expert-parallel group to another, sent by the first and "
        "received by the second; rows alone, as in mib_sent. Groups of one size are averaged",
        is_detail=True),
    Metric("deduplication", "deduplication", "1", "lower", "ratio of sums", _COUNTED,
        "rows fetched over routed rows, of forwards: 1 if each of a token's experts gets its own "
        "copy, less where experts of one rank share one. A rank's own tokens are counted on both "
        "sides"),
    Metric("row_fill", "row_fill", "1", "higher", "ratio of sums", _OURS,
        "routed rows over rows of the tiles of 128 that hold them; pads are in the receiver's "
        "memory alone"),
    Metric("expert_rows_min", "expert_rows/min", "rows per launch", "neither", "min", _COUNTED,
        "rows of the emptiest expert of any layer"),
    Metric("expert_rows_mean", "expert_rows/mean", "rows per launch", "neither", "mean",
        _COUNTED,
        "rows of an expert, the mean over experts and layers"),
    Metric("expert_rows_max", "expert_rows/max", "rows per launch", "neither", "max", _COUNTED,
        "rows of the fullest expert of any layer"),
    Metric("expert_rows", "layer_{layer}/expert_rows/{expert}", "rows per launch", "neither",
        "mean", _COUNTED,
        "rows of each expert", is_detail=True),
    Metric("expert_imbalance", "expert_imbalance", "1", "lower", "max",
        "Megatron-Core's and DeepSpeed's load imbalance",
        "rows of a layer's fullest expert over the mean of its experts, in the worst of the "
        "layers of which every rank of a group has told"),
    Metric("rank_imbalance", "rank_imbalance", "1", "lower", "max", _OURS,
        "the same over ranks of the expert-parallel group, which wait for the fullest"),
    Metric("host_imbalance", "host_imbalance", "1", "lower", "max", _OURS,
        "the same over hosts, in groups over several: all cards wait for the fullest one"),
    Metric("host_rows", "layer_{layer}/host_rows/{host}", "rows per launch", "neither", "mean",
        _OURS,
        "rows that the ranks of a host compute in a launch of each", is_detail=True),
    Metric("rank_imbalance_before", "rank_imbalance_before", "1", "neither", "max", _OURS,
        "rank_imbalance as it would be without replicas, in layers with spare slots: every "
        "expert's rows on its owner"),
    Metric("locality", "locality", "1", "higher", "ratio of sums", "CCFuser, PPoPP 2025",
        "routes of forwards whose expert is computed on their token's rank, over all routes; on "
        "the kernel only where there are spare slots"),
    Metric("rank_locality", "layer_{layer}/locality/rank_{rank}", "1", "higher",
        "ratio of sums", "CCFuser, PPoPP 2025",
        "the same for the tokens of one rank of the groups, in one layer", is_detail=True),
    Metric("replicas", "replicas", "experts per rank and launch", "neither", "mean", _OURS,
        "experts of other ranks that a rank computes in its spare slots, of forwards"),
    Metric("replica_mib", "{direction}/replica_mib", "MiB per rank and launch", "lower", "mean",
        _OURS,
        "weights that have come to a rank's spare slots and, in backward, also gradients that "
        "have come back to its own experts"),
    Metric("dropped_routes", "dropped_routes", "1", "lower", "ratio of sums",
        "DeepSpeed's gates",
        "routes that the router gave up at its capacity over those that it chose, where the "
        "framework tells"),
    Metric("crossed_rows", "crossed_rows", "rows per rank and call", "lower", "mean",
        "counted where they are sent",
        "rows that a layer over several hosts sent to other hosts in a forward or a backward: "
        "tokens and shares, and the gradients of both"),
    Metric("crossed_mib", "crossed_mib", "MiB per rank and call", "lower", "mean",
        "counted where they are sent",
        "bytes of crossed_rows, and of the routes that go with them"),
    Metric("crossing_ms", "crossing_ms", "ms per call", "lower", "mean", _OURS,
        "time of the exchanges between hosts in a forward or a backward, with the wait for other "
        "hosts: on the GPU's stream, or on the host where tokens are on processors"),
    Metric("link_mib", "link/{link}/mib", "MiB", "neither", "sum", _OURS,
        "bytes that all ranks received by one link of a multipath since the last report"),
    Metric("link_share", "link/{link}/share", "1", "neither", "ratio of sums", _OURS,
        "a link's bytes over those of all links"),
    Metric("link_gbps", "link/{link}/gbps", "GB/s into a rank", "higher", "ratio of sums",
        _OURS,
        "a link's bytes over the time that it was at work, as the slowest rank saw it, of "
        "transfers whose times have become known: 64 to 96 transfers of a size later"),
    Metric("repeats", "repeats", "iterations", "lower", "max", _OURS,
        "iterations of Megatron's, and batches of its evaluations, that were repeated so far since "
        "some rank received more rows than row_bound allows"),
    Metric("heap_mib", "heap_mib", "MiB", "lower", "max", _OURS,
        "high-water mark of the symmetric heap on any rank; it never shrinks"),
)
# fmt: on
METRICS = {metric.name: metric for metric in _ALL}


FORMER = {
    "kernel_ms": "layer_ms",
    "kernel_ms_max": "layer_ms_max",
    "layer_kernel_ms": "each_layer_ms",
    "payload_efficiency": "payload_share",
    "aligned_payload_efficiency": "aligned_payload_share",
}
"""Names that metrics had in version 0.1, and the ones that they have."""


def find_metric(name: str) -> Metric:
    """A metric by its name.

    Raises:
        ConfigError: There is none; names a similar one, or what it is called now.
    """
    if name not in METRICS:
        now = f", which is called {FORMER[name]!r} now" if name in FORMER else ""
        raise ConfigError(
            f"unknown metric {name!r}{now or nearest(name, METRICS)}: wanted some of "
            f"{', '.join(METRICS)}, or default, all, none"
        )
    return METRICS[name]


def choose_metrics(choice: str) -> frozenset[str]:
    """Reads what a user chose.

    Args:
        choice: "default" (all but details), "all", "none", or names with commas between them; one
            of them may be "default".

    Returns:
        Names of metrics.

    Raises:
        ConfigError: A name is unknown, there is none, or it is no text.
    """
    if not isinstance(choice, str):
        raise ConfigError(f"metrics are {choice!r}, wanted names with commas between them")
    if choice == "none":
        return frozenset()
    chosen: set[str] = set()
    for name in (part.strip() for part in choice.split(",")):
        if name in ("default", "all"):
            chosen |= {key for key, one in METRICS.items() if name == "all" or not one.is_detail}
        else:
            chosen.add(find_metric(name).name)
    return frozenset(chosen)


def key_of(name: str, **values: object) -> str:
    """Returns the name of a metric in loggers; the values fill the braces of its key."""
    return PREFIX + find_metric(name).key.format(**values)
