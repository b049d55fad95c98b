"""The record of one launch of the fused layer: a typed one per layer and direction."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


MOST_LAYERS = 2**16
"""Layers that a model may have: their numbers are less."""
MOST_OWNERS = 2**15
"""Owners that launches may have: theirs are less."""
MOST_NUMBERS = MOST_LAYERS * MOST_OWNERS
"""Layers of all owners. Their numbers, and those of evaluation, are the values of an int32."""


class LaunchNumber(NamedTuple):
    """The parts of a :func:`launch_number`.

    Attributes:
        layer: The layer's number in its model.
        is_evaluation: Whether the launch is evaluation's.
        owner: Who has launched, 0 if unknown.
    """

    layer: int
    is_evaluation: bool
    owner: int


def launch_number(layer: int, *, is_training: bool, owner: int = 0) -> int:
    """The number that a launch carries for its layer, negative in evaluation.

    No backend can tell evaluation itself: a checkpointed forward of training saves nothing either.

    Args:
        layer: The layer's, at least 0 and less than :data:`MOST_LAYERS`.
        is_training: Whether its module is in training mode. All that it does in evaluation mode is
            evaluation, a backward, too: neither tokens nor launches are in a metric.
        owner: Tells layers of one number apart, of several models in this process; less than
            :data:`MOST_OWNERS`, and 0 for none.
    """
    number = layer + MOST_LAYERS * owner
    return number if is_training else ~number


def read_launch_number(number: int) -> LaunchNumber:
    """Undoes :func:`launch_number`."""
    owner, layer = divmod(number if number >= 0 else ~number, MOST_LAYERS)
    return LaunchNumber(layer, number < 0, owner)


class Phase(enum.Enum):
    """The parts of a CTA's time.

    A CTA has several roles that run concurrently. The processors' phases follow one another
    and add up to the launch's time: ``HEAD``, then ``STAGE_WAIT``, ``GEMM`` and ``EPILOGUE`` for
    every tile, then ``TAIL``, which is what is left. ``ROWS_WAIT`` and ``ACT_WAIT`` are the
    loader's; ``DISPATCH``, ``DELIVER`` and ``REDUCE`` the communication roles'; both run at the
    same time as the processors.
    """

    HEAD = "head"
    """The begin of a CTA: the plan, if the launch makes it, with the wait for the routes of all
    ranks; and in the kernel copying those rows of the first tiles that are this rank's own."""
    ROWS_WAIT = "rows_wait"
    """The loader waits for token rows."""
    ACT_WAIT = "act_wait"
    """The loader waits for activations, the output of GEMM0."""
    STAGE_WAIT = "stage_wait"
    """The processors wait for a tile or its operands, the first ones included: exposed."""
    GEMM = "gemm"
    """The processors run the main loops of both projections, and of the weight gradients."""
    EPILOGUE = "epilogue"
    """The processors lose this time after a tile: in the kernel to the wait for the finisher that
    takes it, in the reference to the activation itself."""
    DISPATCH = "dispatch"
    """The communication role fetches token rows from peers."""
    DELIVER = "deliver"
    """The communication role sums a token's rows and sends one to the token's rank, or where all
    rows are there writes its result."""
    REDUCE = "reduce"
    """The communication role sums the shares of all ranks, for tokens with shares on others."""
    TAIL = "tail"
    """From the last tile of a CTA until the launch ends, also where the CTA has left before."""


UNNAMED = -1
"""Stands for the number of an expert that a record cannot name."""


class ReplicaRecord(NamedTuple):
    """Other ranks' experts that one rank computed in one launch.

    Attributes:
        rows: The experts in its spare slots and how many rows each had here; :data:`UNNAMED` for
            the experts of other hosts.
        num_bytes: Bytes that replicas have brought to this rank: their weights and, in backward,
            gradients of its own experts.
    """

    rows: tuple[tuple[int, int], ...]
    num_bytes: int


@dataclass(frozen=True)
class LaunchRecord:
    """One launch on one rank.

    Attributes:
        layer: The number that the caller gave the layer.
        direction: "forward" or "backward", which includes the weight gradients.
        epoch: Number of the launch on the group, the same on all its ranks.
        begin_ns: When the first CTA began, nanoseconds of this GPU's clock (or of the host's
            monotonic clock for the reference).
        end_ns: When the last CTA left, of the same clock.
        num_ctas: CTAs of the launch; 1 for the reference.
        num_tokens: This rank's tokens.
        num_rows: Routed rows that this rank's experts received, pads left out.
        num_row_blocks: Blocks of 128 rows that hold them, each expert's aligned.
        expert_rows: Rows of each local expert on this rank.
        rows_pulled: Rows of ``hidden`` elements fetched from the tokens of each rank of the group,
            for the rows that this rank's experts received. The own entry counts those read from
            this rank's own memory, which cross no link; without it, how often a row was shared
            among a token's experts is unknown. Empty where it is not known.
        results_pushed: Rows of ``hidden`` elements returned to each rank, the own entry as above,
            with rows that are written straight to the output.
        phase_ns: Nanoseconds in each phase, the mean over CTAs; a phase that was not measured is
            absent.
        is_evaluation: Whether the caller marked that number, by :func:`launch_number`.
        owner: Who has launched, as that number says.
        routes: How many routes of this rank's own tokens stay on it, and how many there are;
            ``None`` where it is not counted.
        replicas: What spare slots did; ``None`` if there are none.
    """

    layer: int
    direction: Direction
    epoch: int
    begin_ns: int
    end_ns: int
    num_ctas: int
    num_tokens: int
    num_rows: int
    num_row_blocks: int
    expert_rows: tuple[int, ...]
    rows_pulled: tuple[int, ...]
    results_pushed: tuple[int, ...]
    phase_ns: Mapping[Phase, float]
    is_evaluation: bool = False
    owner: int = 0
    routes: tuple[int, int] | None = None
    replicas: ReplicaRecord | None = None

    @property
    def duration_ns(self) -> int:
        """Nanoseconds from the first CTA's begin to the last one's end."""
        return self.end_ns - self.begin_ns
