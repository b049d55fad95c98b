"""Decides how much of a transfer each link carries. Plain Python, without torch or a GPU.

Stage one, before a size is used: the links' latencies and rates give the first shares; then bytes
move from the slowest link to the fastest, in steps that are halved whenever their order flips.
Stage two, while a program runs: the times of a window of transfers move the shares on.

Two traps are avoided by rule. A link that carries nothing is never the fastest, and a link whose
latency alone is longer than what the others take carries nothing.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from flashmoe_megatron.errors import ConfigError

GRAIN = 4096
"""Shares are cut at multiples of this many bytes."""

CHUNKS = tuple(2**20 * size for size in (1, 2, 4, 8, 16, 32))
"""Chunk sizes that are tried for a link alone, in bytes."""

FEWER_CHUNKS = 0.03
"""A link alone may take so much longer with larger chunks, which cost the host less."""

MOST_CHUNKS = 16
"""Chunks of a transfer by a link alone, as far as :data:`CHUNKS` go: each one costs the host."""

MAX_TRIALS = 64
"""Most trials of stage one for a size."""

WINDOW = 8
"""Transfers of one size between two looks at their times."""

_FIRST_STEP = 0.05
_LEAST_SHARE = 0.002
"""A smaller share is no share, and no smaller step is tried."""
_BALANCED = 0.02
"""The search of stage one ends where the slowest and the fastest link differ by less."""
_CHUNK_FACTORS = (1.0, 0.5, 0.25)
"""The sizes of chunks, relative to the usual one, that are tried for links with small shares."""
_NEIGHBOURS = (0.005, 0.01, 0.02)
"""The last comparison of stage one looks so far from the best shares, to both sides."""
LEAST_GAIN = 0.03
"""Several links have to be so much faster than one alone, as the others cost the host time and
since the best of several trials is in part the luckiest."""
LEAST_SECONDS = 16e-6
"""They have to take so much less time besides: they cost the host some 180 us more, a transfer."""
_ROUNDS = 3
"""That comparison tries each so often; the least counts, since what disturbs a trial only makes it
longer."""
_LAST_ROUNDS = 5
"""Its fastest shares and one link alone are tried again so often; there the median counts, since a
caller is disturbed, too."""
_THRESHOLD, _RETURN_THRESHOLD = 0.10, 0.03
"""Stage two moves bytes where links are at least so far apart: off the fastest link, and back."""
_GAIN, _RETURN_GAIN = 0.5, 1.0
"""The part of the levelling amount that is moved at once."""
_RETRY_WINDOWS = 50
"""Windows until a link that stage two has switched off is tried again."""


@dataclass(frozen=True)
class LinkModel:
    """The speed of a link: seconds before a transfer's first byte, and bytes per second then.

    It moves ``chunk`` bytes at once if it carries a whole transfer.
    """

    latency: float
    rate: float
    chunk: int = CHUNKS[-1]

    def chunk_of(self, share: float) -> int:
        """Bytes that it moves at once for a share of a transfer.

        Every chunk has the same cost in addition to its bytes, and the first has to arrive before
        it can be passed on. Where both cost least in sum, chunks grow with the root of the bytes.
        """
        grains = round(self.chunk * math.sqrt(share) / GRAIN)
        return max(min(self.chunk, CHUNKS[0]), grains * GRAIN)


_NEVER = LinkModel(math.inf, 1.0)
"""A link that carries nothing, at any size."""


@dataclass(frozen=True)
class Trial:
    """A transfer of stage one: the links' shares, in sum 1, and their seconds, 0 without bytes."""

    shares: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass
class _Class:
    """The tuned state of one size class of transfers."""

    models: list[LinkModel]
    shares: tuple[float, ...]
    trials: int = 0
    window: list[Sequence[float]] = field(default_factory=list)
    off_since: dict[int, int] = field(default_factory=dict)
    num_windows: int = 0


Measure = Callable[[Sequence[int], Sequence[int]], Sequence[float]]
"""Moves so many bytes over each link at once, in chunks of so many; returns each link's seconds."""


@functools.lru_cache(maxsize=1024)
def size_class(nbytes: int) -> int:
    """The size class of a transfer: sizes up to a power of two share what was learned."""
    return max(nbytes - 1, 1).bit_length()


def shares_of(models: Sequence[LinkModel], nbytes: int) -> tuple[float, ...]:
    """Returns a share of so many bytes for each link, 0 for links that are better left out.

    All links end together, if each is as its model says.
    """
    chosen = range(len(models))
    while True:
        # All of these end at once if together they move everything after their latencies.
        rate = sum(models[i].rate for i in chosen)
        end = (nbytes + sum(models[i].latency * models[i].rate for i in chosen)) / rate
        left = [i for i in chosen if models[i].latency < end]
        if len(left) == len(chosen):
            break
        chosen = left  # type: ignore[assignment]
    carried = {i: (end - models[i].latency) * models[i].rate for i in chosen}
    total = sum(carried.values())
    return tuple(carried.get(i, 0.0) / total for i in range(len(models)))


def chunks_of(models: Sequence[LinkModel], shares: Sequence[float]) -> list[int]:
    """The bytes that each link moves at once by its share."""
    pairs = zip(models, shares, strict=True)
    return [model.chunk_of(share) for model, share in pairs]


def cut(shares: Sequence[float], nbytes: int) -> list[int]:
    """The bytes that each link carries: multiples of :data:`GRAIN`, but for the last of all."""
    bounds, total = [0], 0.0
    for share in shares:
        total += share
        bounds.append(min(nbytes, round(total * nbytes / GRAIN) * GRAIN))
    last = max((i for i, share in enumerate(shares) if share > 0), default=0)
    bounds[last + 1 :] = [nbytes] * (len(bounds) - last - 1)
    return [end - begin for begin, end in itertools.pairwise(bounds)]


class Balancer:
    """Shares of links, for every size class.

    Args:
        names: The links' names; used in messages and results.
        without: Links that never carry anything.
        least_gain: How much faster several links have to be than the best one alone to be used.

    Raises:
        ConfigError: No link is left, or two have one name.
    """

    def __init__(
        self,
        names: Sequence[str],
        without: Collection[str] = (),
        least_gain: float = LEAST_GAIN,
    ) -> None:
        if not set(names) - set(without) or len(set(names)) < len(names):
            raise ConfigError(
                f"links {list(names)} without {list(without)}: wanted at least one, each with its "
                "own name"
            )
        self.names = tuple(names)
        self._left_out = frozenset(i for i, name in enumerate(names) if name in without)
        self._least_gain = least_gain
        self._classes: dict[int, _Class] = {}

    def is_tuned(self, nbytes: int) -> bool:
        """Returns whether stage one has been run for this size's class."""
        return size_class(nbytes) in self._classes

    def shares(self, nbytes: int) -> tuple[float, ...]:
        """Each link's share of a transfer of a size whose class is tuned."""
        return self._classes[size_class(nbytes)].shares

    def models(self, nbytes: int) -> list[LinkModel]:
        """Returns the measured speeds of the links for a size whose class is tuned."""
        return self._classes[size_class(nbytes)].models

    def chunks(self, nbytes: int) -> list[int]:
        """The bytes that each link moves at once by its share, for a size whose class is tuned."""
        known = self._classes[size_class(nbytes)]
        return chunks_of(known.models, known.shares)

    def trials(self, nbytes: int) -> int:
        """The number of trials that stage one took for this size's class."""
        return self._classes[size_class(nbytes)].trials

    def tune(self, nbytes: int, measure: Measure) -> tuple[float, ...]:
        """Stage one for the class of a size.

        Args:
            nbytes: Bytes that each rank receives.
            measure: Runs one trial; the same result on every rank.

        Returns:
            The shares that were fastest in trials of their own and in a last comparison with
            their neighbours; or the best link alone, if they gain too little over it.
        """
        tuning = _Tuning(len(self.names), self._left_out, nbytes, measure)
        tuning.shrink_chunks()
        shares = tuning.settled(tuning.refined(), self._least_gain)
        self._classes[size_class(nbytes)] = _Class(tuning.models, shares, tuning.trials)
        return shares

    def observe(self, nbytes: int, shares: tuple[float, ...], seconds: Sequence[float]) -> bool:
        """Stage two: takes note of a transfer's times; a full window may move shares.

        Args:
            nbytes: As in :meth:`tune`.
            shares: The shares that it used. If they have moved since, its times do not count: they
                would move shares once more, and a link that is tried again has none in them.
            seconds: Each link's; what a link without a share has is not looked at. The same on
                every rank, where there are several.

        Returns:
            Whether shares have moved.
        """
        known = self._classes[size_class(nbytes)]
        if shares != known.shares:
            return False
        if max(known.shares) == 1 and not known.off_since:
            return False  # there is nothing to compare it with
        known.window.append(tuple(seconds))
        if len(known.window) < WINDOW:
            return False
        window, known.window = known.window, []
        known.num_windows += 1
        before = known.shares
        known.shares = _rebalanced(known, window)
        return known.shares != before


class _Tuning:
    """The trials of stage one for one size."""

    def __init__(
        self, num_links: int, left_out: Collection[int], nbytes: int, measure: Measure
    ) -> None:
        self.trials = 0
        self._num_links, self._nbytes, self._measure = num_links, nbytes, measure
        self._alone: list[Trial] = []
        each = (MAX_TRIALS * 5 // 8) // (num_links - len(left_out)) - 1
        self.models = [
            _NEVER if link in left_out else self._model_of(link, each) for link in range(num_links)
        ]

    def _model_of(self, link: int, room: int) -> LinkModel:
        """Tries a link alone: each chunk size that there is room for, then an eighth of the bytes.

        Links share the trials, and those of the share search have to remain.
        """
        tried = {}
        least_chunk = min(self._nbytes / MOST_CHUNKS, CHUNKS[-1])
        candidates = [chunk for chunk in CHUNKS if chunk >= least_chunk]
        for chunk in candidates[-max(1, room) :]:
            tried[chunk] = self._alone_for(link, self._nbytes, chunk)
        least = min(tried.values())
        chunk = max(size for size, took in tried.items() if took <= (1 + FEWER_CHUNKS) * least)
        of_part = LinkModel(0.0, 1.0, chunk).chunk_of(1 / 8)
        whole, part = tried[chunk], self._alone_for(link, self._nbytes // 8, of_part)
        shares = tuple(float(i == link) for i in range(self._num_links))
        self._alone.append(Trial(shares, tuple(whole * share for share in shares)))
        moved = self._nbytes - self._nbytes // 8
        rate = moved / max(whole - part, whole * moved / self._nbytes * 0.1, 1e-9)
        return LinkModel(max(0.0, whole - self._nbytes / rate), rate, chunk)

    def shrink_chunks(self) -> None:
        """Takes smaller chunks for links with small shares, where that makes these links faster.

        Alone, a link hides the time of its first chunk in that of many others.
        """
        shares, models = shares_of(self.models, self._nbytes), self.models
        main = max(range(self._num_links), key=lambda i: shares[i])
        least, best = math.inf, models
        for factor in _CHUNK_FACTORS if shares[main] < 1 else ():
            self.models = [
                model if i == main else replace(model, chunk=int(model.chunk * factor))
                for i, model in enumerate(models)
            ]
            seconds = self._try(shares).seconds
            took = sum(seconds) - seconds[main]
            if took < (1 - _BALANCED) * least:
                least, best = took, self.models
        self.models = best

    def refined(self) -> Trial:
        """Moves bytes from the slowest to the fastest link, from the models' shares on.

        Returns:
            The fastest trial, which is one link alone only if the models leave out all others.
        """
        shares, step, order = shares_of(self.models, self._nbytes), _FIRST_STEP, None
        tried: list[Trial] = []
        # The last comparison needs trials, too.
        most = MAX_TRIALS - 5 * self._num_links - 2 * _LAST_ROUNDS
        while not tried or (step >= _LEAST_SHARE and self.trials < most):
            trial = self._try(shares)
            tried.append(trial)
            live = [i for i, share in enumerate(shares) if share > 0]
            slow = max(live, key=lambda i: trial.seconds[i])
            fast = min(live, key=lambda i: trial.seconds[i])
            gap = trial.seconds[slow] - trial.seconds[fast]
            if gap <= _BALANCED * trial.seconds[slow]:
                break
            if order == (fast, slow):
                step /= 2
            order = (slow, fast)
            shares = _moved(shares, slow, fast, step)
        return min(tried, key=lambda one: max(one.seconds))

    def settled(self, best: Trial, least_gain: float) -> tuple[float, ...]:
        """Returns the best of a trial's shares, their neighbours and one link alone.

        They are tried alternately; the fastest of them and one link alone are then tried again.
        """
        alone = min(self._alone, key=lambda one: max(one.seconds))
        candidates = {best.shares: None, alone.shares: None}  # each once, in this order
        main = max(range(self._num_links), key=lambda i: best.shares[i])
        for other in range(self._num_links):
            if other != main and best.shares[other] > 0:
                for amount in _NEIGHBOURS:
                    candidates[_moved(best.shares, main, other, amount)] = None
                    candidates[_moved(best.shares, other, main, amount)] = None
        room = MAX_TRIALS - self.trials - 2 * _LAST_ROUNDS
        rounds = min(_ROUNDS, room // len(candidates))
        if rounds <= 0 or len(candidates) == 1:
            gains = _gains(max(best.seconds), max(alone.seconds), least_gain)
            return best.shares if gains else alone.shares
        least = self._in_turns(list(candidates), rounds, min)
        fastest = min(candidates, key=lambda shares: least[shares])
        took = {shares: least[shares] for shares in (fastest, alone.shares)}
        rounds = min(_LAST_ROUNDS, (MAX_TRIALS - self.trials) // 2)
        if fastest != alone.shares and rounds > 0:
            # The fastest of several has been lucky in part, and will not be lucky again.
            took = self._in_turns(list(took), rounds, median)
        gains = _gains(took[fastest], took[alone.shares], least_gain)
        return fastest if gains else alone.shares

    def _in_turns(
        self,
        candidates: Sequence[tuple[float, ...]],
        rounds: int,
        of_all: Callable[[list[float]], float],
    ) -> dict[tuple[float, ...], float]:
        """Returns the seconds of several shares, which are tried alternately."""
        took = {shares: list[float]() for shares in candidates}
        for _ in range(rounds):
            for shares in candidates:
                took[shares].append(max(self._try(shares).seconds))
        return {shares: of_all(each) for shares, each in took.items()}

    def _alone_for(self, link: int, nbytes: int, chunk: int) -> float:
        self.trials += 1
        carried = [nbytes if i == link else 0 for i in range(self._num_links)]
        return self._measure(carried, [chunk] * self._num_links)[link]

    def _try(self, shares: tuple[float, ...]) -> Trial:
        self.trials += 1
        carried = cut(shares, self._nbytes)
        seconds = self._measure(carried, chunks_of(self.models, shares))
        pairs = zip(carried, seconds, strict=True)
        return Trial(shares, tuple(time if moved else 0.0 for moved, time in pairs))


def _gains(took: float, alone: float, least_gain: float) -> bool:
    """Returns whether several links take so much less time than one alone that they pay."""
    return alone - took > max(least_gain * took, LEAST_SECONDS)


def _moved(shares: Sequence[float], source: int, target: int, amount: float) -> tuple[float, ...]:
    """Returns the shares after a move, which may leave a link with nothing."""
    if shares[source] - amount < _LEAST_SHARE:
        amount = shares[source]
    moved = list(shares)
    moved[source] -= amount
    moved[target] += amount
    return tuple(moved)


def _rebalanced(known: _Class, window: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Stage two's shares after a window."""
    shares = known.shares
    live = [i for i, share in enumerate(shares) if share > 0]
    main = max(live, key=lambda i: shares[i])
    for link, since in list(known.off_since.items()):
        if known.num_windows - since >= _RETRY_WINDOWS:
            del known.off_since[link]
            return _moved(shares, main, link, 5 * _LEAST_SHARE)
    slow = _most_often([max(live, key=lambda i: times[i]) for times in window])
    fast = _most_often([min(live, key=lambda i: times[i]) for times in window])
    mean = [fmean(times[i] for times in window) for i in range(len(shares))]
    returns = slow != main
    target = main if returns else fast
    gap = mean[slow] - mean[target]
    if slow == target or gap <= (_RETURN_THRESHOLD if returns else _THRESHOLD) * mean[slow]:
        return shares
    # Moving m levels the two where each byte costs what it has cost in this window.
    cost = sum(
        max(mean[i] - known.models[i].latency, 0.1 * mean[i]) / shares[i] for i in (slow, target)
    )
    moved = _moved(shares, slow, target, (_RETURN_GAIN if returns else _GAIN) * gap / cost)
    if moved[slow] == 0.0:
        known.off_since[slow] = known.num_windows
    return moved


def _most_often(links: Sequence[int]) -> int:
    return Counter(links).most_common(1)[0][0]
