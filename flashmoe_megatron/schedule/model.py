"""When every task of one pass of a layer begins and ends, if its rows are cut into parts.

A pass is a forward or a backward. A part goes through the stages of its pass one after the other,
and each stage runs on one of three streams: exchanges between hosts, exchanges within a host, and
products. A stage takes ``alpha + whole / degree`` for one part, as in FSMoE. The model is exact:
it has no closed forms, and says of every task what the streams would do.
"""

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
        whole_s: Seconds that all parts take together beside that.
        cut_s: Seconds that they take more if there are several: copies between parts and the whole.
    """

    name: str
    stream: Stream
    alpha_s: float
    whole_s: float
    cut_s: float = 0.0

    def time_s(self, degree: int) -> float:
        """Seconds of one of ``degree`` parts."""
        whole_s = self.whole_s + self.cut_s if degree > 1 else self.whole_s
        return self.alpha_s + whole_s / degree


@dataclass(frozen=True)
class Pass:
    """A forward or a backward. Stages that take no time are left out of its schedule.

    Attributes:
        there: What brings a part to its experts, in order.
        experts: What they do with it.
        back: What brings its results back, in order.
        slices_s: Seconds of what travels between hosts behind the last part on its way there and
            before the first result: slices of gradients that are reduced, or rows that are fetched
            again.
        weights_s: Seconds of what is computed behind the last part: gradients of weights.
    """

    there: tuple[Stage, ...]
    experts: Stage
    back: tuple[Stage, ...]
    slices_s: float = 0.0
    weights_s: float = 0.0


@dataclass(frozen=True)
class Task:
    """One stage of one part.

    Attributes:
        name: The stage's.
        part: From 0; -1 for what no part is.
        stream: Where it runs.
        queue: Tasks of one queue of a stream run in their order. A stream runs the queue whose next
            task can begin first, the lowest of several.
        time_s: How long it takes.
        after: The tasks that have to end before, as positions in their list.
    """

    name: str
    part: int
    stream: Stream
    queue: int
    time_s: float
    after: tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """A task with its times, in seconds from the beginning of the pass."""

    task: Task
    begin_s: float
    end_s: float


def tasks_of(one: Pass, degree: int) -> list[Task]:
    """The tasks of a pass in ``degree`` parts.

    What travels between hosts keeps its order, which all ranks need alike: all parts there, slices,
    all parts back. Within a host, what is on its way to experts goes first.
    """
    tasks: list[Task] = []
    previous: list[int] = []

    def add(stages: Sequence[Stage]) -> None:
        for stage in stages:
            time_s = stage.time_s(degree)
            if time_s > 0:
                queue = len(tasks) if stage.stream == "within" else 0
                first = len(tasks)
                for part in range(degree):
                    after = (previous[part],) if previous else ()
                    tasks.append(Task(stage.name, part, stage.stream, queue, time_s, after))
                previous[:] = range(first, len(tasks))

    add(one.there)
    if one.slices_s:
        tasks.append(Task("slices", -1, "between", 0, one.slices_s, ()))
    add([one.experts])
    if one.weights_s:
        tasks.append(Task("weights", -1, "compute", 0, one.weights_s, ()))
    add(one.back)
    return tasks


def schedule(tasks: Sequence[Task]) -> list[Span]:
    """When each task begins and ends, by position, if every stream runs what it can."""
    queues: dict[tuple[Stream, int], list[int]] = {}
    for place, task in enumerate(tasks):
        queues.setdefault((task.stream, task.queue), []).append(place)
    heads = dict.fromkeys(sorted(queues), 0)
    free: dict[Stream, float] = dict.fromkeys((task.stream for task in tasks), 0.0)
    ends: dict[int, float] = {}
    spans: dict[int, Span] = {}
    while len(spans) < len(tasks):
        # Whatever is not known to be ready yet waits for a task that begins no earlier.
        found: tuple[float, tuple[Stream, int], int] | None = None
        for queue, head in heads.items():
            if head == len(queues[queue]):
                continue
            place = queues[queue][head]
            after = tasks[place].after
            if all(other in ends for other in after):
                begin = max((free[queue[0]], *(ends[other] for other in after)))
                if found is None or begin < found[0]:
                    found = begin, queue, place
        assert found is not None, "tasks wait for each other"
        begin, queue, place = found
        end = begin + tasks[place].time_s
        heads[queue] += 1
        free[queue[0]] = ends[place] = end
        spans[place] = Span(tasks[place], begin, end)
    return [spans[place] for place in range(len(tasks))]


def time_of(one: Pass, degree: int) -> float:
    """Seconds of a pass in ``degree`` parts."""
    return max((span.end_s for span in schedule(tasks_of(one, degree))), default=0.0)


def best_degree(one: Pass, degrees: Iterable[int]) -> int:
    """The degree with the shortest schedule; of several, the lowest."""
    return min(degrees, key=lambda degree: (time_of(one, degree), degree))
