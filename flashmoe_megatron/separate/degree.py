"""The degrees of a layer: the number of parts with the shortest schedule of its stages.

A pass is a forward or a backward. A part goes through the stages of its pass one after the other,
and each stage runs on one of three streams: exchanges between hosts, exchanges within a host, and
products. A stage takes ``alpha + whole / degree`` for one part, as in FSMoE, by the times of a fit.
The model is exact: it has no closed forms, and says of every task what the streams would do. It
knows two things more than FSMoE's: a task begins no earlier than the host has issued it, and
streams slow each other down.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from flashmoe_megatron.config import Keep, MoEConfig
from flashmoe_megatron.errors import ConfigError, FlashMoEError
from flashmoe_megatron.hosts.grid import HostGrid
from flashmoe_megatron.measured.fit import (
    GATHER,
    Fit,
    Line,
    beside_gather,
    machine_of,
    read_fit,
)
from flashmoe_megatron.options import MAX_DEGREE, BackendOptions, read_degrees
from flashmoe_megatron.planner import choose_keep
from flashmoe_megatron.ranks import Ranks, by_rank
from flashmoe_megatron.separate.exchange import ONE_STEP, Kind, kind_of

Stream = Literal["between", "within", "compute"]


@dataclass(frozen=True)
class Stage:
    """One step of every part.

    Attributes:
        stream: Where it runs.
        alpha_s: Seconds that each part takes whatever its size.
        whole_s: Seconds that all parts take together in addition.
        cut_s: Seconds that they take more if there are several: copies between parts and the whole.
    """

    name: str
    stream: Stream
    alpha_s: float
    whole_s: float
    cut_s: float = 0.0

    def time_s(self, degree: int) -> float:
        """Returns the seconds of one part out of ``degree``."""
        whole_s = self.whole_s + self.cut_s if degree > 1 else self.whole_s
        return self.alpha_s + whole_s / degree


@dataclass(frozen=True)
class Slowdown:
    """How a stream's tasks are slowed down by another stream's.

    Attributes:
        stream: The stream that is slowed down.
        ``beside``: The other one, which slows it down.
        factor: How many times as long they take meanwhile, at least 1.
    """

    stream: Stream
    beside: Stream
    factor: float


@dataclass(frozen=True)
class Pass:
    """A forward or a backward. Stages that take no time are left out of its schedule.

    Attributes:
        there: What brings a part to its experts, in order.
        experts: What they do with it.
        back: What brings its results back, in order.
        slices_s: Seconds of transfers between hosts after the last part on its way there and
            before the first result: slices of gradients that are reduced, or rows that are fetched
            again.
        weights_s: Seconds of the computation after the last part: gradients of weights.
        issue_s: Seconds of the host, whatever the number of parts, before it issues the first task.
        part_s: Seconds of the host for all tasks of one part.
        slowdowns: How streams slow each other down; streams without an entry do not.
    """

    there: tuple[Stage, ...]
    experts: Stage
    back: tuple[Stage, ...]
    slices_s: float = 0.0
    weights_s: float = 0.0
    issue_s: float = 0.0
    part_s: float = 0.0
    slowdowns: tuple[Slowdown, ...] = ()


@dataclass(frozen=True)
class Task:
    """One stage of one part.

    Attributes:
        part: From 0; -1 for a task that is not of a part.
        stream: Where it runs.
        queue: Tasks of one queue of a stream run in their order. A stream runs the lowest queue
            whose next task can begin.
        time_s: How long it takes if no other stream runs.
        after: The tasks that have to end before, as positions in their list.
        issued_s: When the host has issued it.
    """

    name: str
    part: int
    stream: Stream
    queue: int
    time_s: float
    after: tuple[int, ...]
    issued_s: float = 0.0


@dataclass(frozen=True)
class Span:
    """A task with its times, in seconds from the beginning of the pass."""

    task: Task
    begin_s: float
    end_s: float


def tasks_of(one: Pass, degree: int) -> list[Task]:
    """The tasks of a pass in ``degree`` parts.

    What travels between hosts keeps its order, which all ranks need alike: all parts there, slices,
    all parts back. Within a host, what is on its way to experts goes first. The host issues
    all transfers there, part by part, then all later stages, part by part, and takes as long for
    every stage.
    """
    tasks: list[Task] = []
    previous: list[int] = []
    there, behind = len(one.there), 1 + len(one.back)
    step_s = one.part_s / (there + behind)

    def add(stages: Sequence[Stage], steps_before: int, steps_each: int) -> None:
        """Adds stages of every part, in front of whose first one the host takes some steps."""
        for place, stage in enumerate(stages, 1):
            time_s = stage.time_s(degree)
            if time_s > 0:
                queue = len(tasks) if stage.stream == "within" else 0
                first = len(tasks)
                for part in range(degree):
                    after = (previous[part],) if previous else ()
                    steps = steps_before + part * steps_each + place
                    issued_s = one.issue_s + steps * step_s
                    tasks.append(
                        Task(stage.name, part, stage.stream, queue, time_s, after, issued_s)
                    )
                previous[:] = range(first, len(tasks))

    def add_whole(name: str, stream: Stream, time_s: float, steps_before: int) -> None:
        if time_s:
            issued_s = one.issue_s + steps_before * step_s
            tasks.append(Task(name, -1, stream, 0, time_s, (), issued_s))

    all_there = degree * there
    add(one.there, 0, there)
    add_whole("slices", "between", one.slices_s, all_there)
    add([one.experts], all_there, behind)
    add_whole("weights", "compute", one.weights_s, degree * (there + behind))
    add(one.back, all_there + 1, behind)
    return tasks


def schedule(tasks: Sequence[Task], slowdowns: Sequence[Slowdown] = ()) -> list[Span]:
    """Plays every stream; returns when each task begins and ends, by position."""
    queues: dict[tuple[Stream, int], list[int]] = {}
    for place, task in enumerate(tasks):
        queues.setdefault((task.stream, task.queue), []).append(place)
    waiting = {queue: places[::-1] for queue, places in sorted(queues.items())}
    running: dict[Stream, int] = {}
    left_s: dict[Stream, float] = {}
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    now = 0.0
    while len(ends) < len(tasks):
        issued_next = math.inf
        for (stream, _), places in waiting.items():
            if stream in running or not places:
                continue
            task = tasks[places[-1]]
            if not all(other in ends for other in task.after):
                continue
            if task.issued_s > now:
                issued_next = min(issued_next, task.issued_s)
                continue
            running[stream], left_s[stream] = places[-1], task.time_s
            begins[places.pop()] = now
        factors = {
            stream: math.prod(
                one.factor for one in slowdowns if one.stream == stream and one.beside in running
            )
            for stream in running
        }
        ending = {stream: left_s[stream] * factors[stream] for stream in running}
        step_s = min([issued_next - now, *ending.values()])
        assert step_s < math.inf, "tasks wait for each other"
        now = issued_next if step_s == issued_next - now else now + step_s
        for stream, place in list(running.items()):
            if ending[stream] == step_s:
                ends[place] = now
                del running[stream]
            else:
                left_s[stream] = max(left_s[stream] - step_s / factors[stream], 0.0)
    return [Span(task, begins[place], ends[place]) for place, task in enumerate(tasks)]


def time_of(one: Pass, degree: int) -> float:
    """Seconds of a pass in ``degree`` parts."""
    spans = schedule(tasks_of(one, degree), one.slowdowns)
    issued_s = one.issue_s + degree * one.part_s
    return max([issued_s, *(span.end_s for span in spans)])


def best_degree(one: Pass, degrees: Iterable[int]) -> int:
    """The degree with the shortest schedule; of several, the lowest."""
    return min(degrees, key=lambda degree: (time_of(one, degree), degree))


def choose_degrees(
    config: MoEConfig,
    options: BackendOptions,
    *,
    group: dist.ProcessGroup | None,
    grid: HostGrid,
    device: torch.device,
    dtype: torch.dtype | None,
    tensor_group: dist.ProcessGroup | None = None,
) -> tuple[int, int]:
    """Returns parts in forward and backward, as the options say. Collective over both groups.

    The ranks of ``tensor_group`` share each expert. ``dtype`` is that of tokens, ``None`` if it is
    not known.

    Raises:
        ConfigError: On every rank, if a degree is more than a rank's routes, or none can be chosen
            since there is no fit, or one of another machine or dtype.
    """
    most = config.max_tokens * config.topk
    degrees = read_degrees(options.degree)
    if degrees is not None:
        if max(degrees) > most:
            raise options.refusal(
                "degree",
                options.degree,
                f"wanted at most {most}, the routes of max_tokens={config.max_tokens} tokens with "
                f"topk={config.topk}",
            )
        return degrees
    sharing = Ranks(tensor_group)

    def among_sharing() -> tuple[int, int]:
        return _agreed(
            sharing,
            lambda: _computed(config, options, grid, device, dtype, sharing.num_ranks),
        )

    try:
        found: tuple[int, int] | FlashMoEError = among_sharing()
    except FlashMoEError as error:
        found = error  # the ranks of the other group raise it, too
    return _agreed(Ranks(group), lambda: _value_of(found))


def _agreed(ranks: Ranks, compute: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """Returns what every rank has computed, if it is the same. Collective."""
    everyone = ranks.all(compute)
    if len(set(everyone)) > 1:
        raise ConfigError(
            f"the ranks' fits give different degrees: {by_rank(everyone)}; wanted one fit"
        )
    return everyone[0]


def _value_of(found: tuple[int, int] | FlashMoEError) -> tuple[int, int]:
    if isinstance(found, FlashMoEError):
        raise found
    return found


def _computed(
    config: MoEConfig,
    options: BackendOptions,
    grid: HostGrid,
    device: torch.device,
    dtype: torch.dtype | None,
    shared: int,
) -> tuple[int, int]:
    if options.degree_fit is None:
        raise options.refusal(
            "degree",
            options.degree,
            "wanted a degree_fit beside it, the file of python -m flashmoe_megatron.schedule fit, "
            "or numbers",
        )
    exchange = kind_of(options.exchange, grid, device)
    path = Path(options.degree_fit)
    if config.num_ranks * shared == 1:
        read_fit(path, None, dtype)  # what several ranks would refuse; it may be of their machine
        return 1, 1  # nothing travels
    fit = read_fit(path, machine_of(grid, device, exchange, shared), dtype)
    keep = choose_keep(options.keep, config)
    degrees = range(1, min(config.max_tokens * config.topk, MAX_DEGREE) + 1)
    forward, backward = passes_of(config, fit, exchange, keep)
    return best_degree(forward, degrees), best_degree(backward, degrees)


def passes_of(config: MoEConfig, fit: Fit, exchange: Kind, keep: Keep) -> tuple[Pass, Pass]:
    """Returns forward and backward with as many rows as tokens choose, spread evenly.

    Ranks that share experts compute the rows of all of them, each with its slice, so that rows are
    gathered after the exchange and results are summed and scattered before the way back.
    """
    lines, shared = fit.lines, fit.machine.shared
    product, copy = lines["product"], lines["copy"]
    rows, size = config.max_tokens * config.topk, fit.torch_dtype.itemsize
    hidden, wide, narrow = config.hidden, config.fc1_rows, config.intermediate

    def among_sharing(name: str, line: str) -> tuple[Stage, ...]:
        if shared == 1:
            return ()
        num_bytes = shared * rows * hidden * size
        return (Stage(name, "within", lines[line].alpha_s, num_bytes * lines[line].beta_s),)

    def travel(name: str) -> tuple[Stage, ...]:
        num_bytes = rows * hidden * size
        if config.num_ranks == 1:
            return ()
        if exchange in ONE_STEP:
            line = lines["all_to_all"]
            return (Stage(name, "between", line.alpha_s, num_bytes * line.beta_s),)
        within, rail = lines["all_to_all_within"], lines["all_to_all_rail"]
        return (
            Stage(f"{name} within", "within", within.alpha_s, num_bytes * within.beta_s),
            Stage(name, "between", rail.alpha_s, num_bytes * rail.beta_s),
        )

    def compute(name: str, copies: int, elements: float, cut: float = 0.0) -> Stage:
        """Two products, but for rows that are only copied, and copies of elements of every row."""
        each = rows if name == "rows" else shared * rows
        alpha_s, whole_s = copies * copy.alpha_s, each * size * elements * copy.beta_s
        if name == "experts":
            alpha_s += 2 * product.alpha_s
            whole_s += 2 * each * hidden * (wide + narrow) * product.beta_s
        return Stage(name, "compute", alpha_s, whole_s, each * size * cut * copy.beta_s)

    send = compute("rows", 1, hidden)
    dispatch = (*travel("dispatch"), *among_sharing("gather", GATHER))
    back = (*among_sharing("scatter", "reduce_scatter_shared"), *travel("combine"))
    there = (send, *dispatch)
    between = (wide + narrow) / 2  # read and written once, where a copy's are twice as many
    forward = Pass(there, compute("experts", 3, 2 * hidden + between, wide + hidden), back)
    backward = Pass(
        there,
        compute("experts", 3, 2 * hidden + 2 * between, 2 * wide + hidden + narrow),
        back,
        slices_s=sum(stage.time_s(1) for stage in dispatch) if keep == "preactivations" else 0.0,
        weights_s=compute("experts", 0, 0).time_s(1),
    )
    slowdowns = _slowdowns(fit, exchange)

    def issued(one: Pass, host: Line) -> Pass:
        return dataclasses.replace(
            one, issue_s=host.alpha_s, part_s=host.beta_s, slowdowns=slowdowns
        )

    return issued(forward, lines["host_forward"]), issued(backward, lines["host_backward"])


def _slowdowns(fit: Fit, exchange: Kind) -> tuple[Slowdown, ...]:
    """Returns how products and exchanges slow each other down."""
    carriers: dict[Stream, list[str]] = {
        "between": ["all_to_all_rail"],
        "within": ["all_to_all_within"],
    }
    if exchange in ONE_STEP:
        carriers = {"between": ["all_to_all"], "within": []}
    if fit.machine.shared > 1:
        carriers["within"].append(GATHER)
    found: list[Slowdown] = []
    for stream, names in carriers.items():
        both = [fit.beside[name] for name in names if name in fit.machine.carriers]
        if both:  # two exchanges that share a stream cost what the slower one does
            found.append(Slowdown("compute", stream, max(one.product for one in both)))
            found.append(Slowdown(stream, "compute", max(one.exchange for one in both)))
    if fit.machine.shared > 1 and fit.machine.exchanges:
        both_ways = fit.beside[beside_gather(carriers["between"][0])]
        found.append(Slowdown("within", "between", both_ways.product))
        found.append(Slowdown("between", "within", both_ways.exchange))
    return tuple(found)
