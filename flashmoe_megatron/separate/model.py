"""When every task of one pass of a layer begins and ends, if its rows are cut into parts.

A pass is a forward or a backward. A part goes through the stages of its pass one after the other,
and each stage runs on one of three streams: exchanges between hosts, exchanges within a host, and
products. A stage takes ``alpha + whole / degree`` for one part, as in FSMoE. The model is exact:
it has no closed forms, and says of every task what the streams would do. It knows two things
more than FSMoE's: a task begins no earlier than the host has issued it, and streams slow each other
down.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Stream = Literal["between", "within", "compute"]


@dataclass(frozen=True)
class Stage:
    """One step of every part.

    Attributes:
        name: What it does.
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
        name: The stage's.
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
    """When each task begins and ends, by position, if every stream runs what it can."""
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
