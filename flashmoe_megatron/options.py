"""The options of a layer, each written once.

A field's metadata holds its check and its help. Megatron's flags, the keys of DeepSpeed's section,
every refusal, and the tables of the pages are made from these. Needs neither torch nor a GPU, so
that a configuration can be read without either.
"""

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from flashmoe_megatron.config import (
    DEFAULT_RESERVED_SMS,
    DEFAULT_TIMEOUT,
    KEEPS,
    MAX_EXPERTS,
    MAX_ROW_BOUND,
    MAX_TIMEOUT,
    MAX_TOKENS,
    MIN_TIMEOUT,
    Experts,
    KeepOption,
    MoEConfig,
    got,
    is_count,
    is_number,
    is_word,
    nearest,
)
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.replicas.policy import POLICIES, Policy, When
from flashmoe_megatron.telemetry.registry import choose_metrics

BackendKind = Literal["auto", "kernel", "scheduled", "reference"]
ExchangeKind = Literal["auto", "direct", "copies", "2dh"]
Combine = Literal["shares", "routes"]
MAX_DEGREE = 64
SymmetricMemory = Literal["cuda", "nvshmem"]
GateKind = Literal["router", "gshard", "sigmoid", "xmoe"]
Quantize = Literal["pass", "step"]
FUTURE_GATES = ("expert-choice", "soft")
"""Gates whose outputs for a token depend on later tokens."""
RowBound = float | Literal["auto"]
NOT_MEASURED = "wanted a number, since only iterations of Megatron are measured and repeated"
"""The refusal of an ``auto`` row bound elsewhere."""


class Rule(NamedTuple):
    """The values that an option may have.

    Attributes:
        wanted: Says what is wanted instead of a value, or ``None`` if the value will do.
        argparse: How a command line reads such a value, as arguments of ``add_argument``.
        is_file: Whether it is the path of a file.
    """

    wanted: Callable[[Any], str | None]
    argparse: Mapping[str, Any] = {}
    is_file: bool = False


def one_of(choices: Collection[str]) -> Rule:
    """One word of several."""

    def wanted(value: Any) -> str | None:
        return None if is_word(value, choices) else f"wanted one of {', '.join(choices)}"

    return Rule(wanted, {"choices": tuple(choices)})


def whole_number(*, least: int, most: int = 2**31 - 1) -> Rule:
    """An int in a range."""

    def wanted(value: Any) -> str | None:
        is_good = is_count(value, least=least, most=most)
        return None if is_good else f"wanted an int, at least {least}, at most {most}"

    return Rule(wanted, {"type": int, "metavar": "COUNT"})


def number(what: str, *, least: float, most: float, metavar: str) -> Rule:
    """A number in a range, which ``what`` describes."""

    def wanted(value: Any) -> str | None:
        return None if is_number(value, least=least, most=most) else f"wanted {what}"

    return Rule(wanted, {"type": float, "metavar": metavar})


def or_auto(rule: Rule) -> Rule:
    """A number that a rule accepts, or the word "auto"."""

    def wanted(value: Any) -> str | None:
        instead = None if is_word(value, ("auto",)) else rule.wanted(value)
        return f"{instead}, or in Megatron auto" if instead else None

    def read(text: str) -> RowBound:
        try:
            return "auto" if text == "auto" else float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: {wanted(text)}") from None

    return Rule(wanted, {**rule.argparse, "type": read})


def true_or_false() -> Rule:
    """A bool."""
    return Rule(lambda value: None if isinstance(value, bool) else "wanted true or false")


def switch() -> Rule:
    """A bool that is off by default, which a flag without a value switches on."""
    return Rule(true_or_false().wanted, {"action": "store_true"})


def _metric_names() -> Rule:
    def wanted(value: Any) -> str | None:
        try:
            choose_metrics(value)
        except ConfigError as error:
            return str(error)
        return None

    return Rule(wanted, {"metavar": "NAMES"})


def _path() -> Rule:
    def wanted(value: Any) -> str | None:
        return None if isinstance(value, str) and value else "wanted the path of a file"

    return Rule(wanted, {"metavar": "FILE"}, is_file=True)


def read_degrees(value: object) -> tuple[int, int] | None:
    """Parts in forward and backward, of "N" or "N,M"; ``None`` if it is neither."""
    words = value.split(",") if isinstance(value, str) else []
    if not 1 <= len(words) <= 2 or not all(word.isdecimal() for word in words):
        return None
    numbers = [int(word) for word in words]
    return (numbers[0], numbers[-1]) if all(1 <= n <= MAX_DEGREE for n in numbers) else None


def _gate() -> Rule:
    kinds = ", ".join(get_args(GateKind))

    def wanted(value: Any) -> str | None:
        if is_word(value, FUTURE_GATES):
            return (
                "a token's output would depend on later tokens, which no model that "
                f"predicts the next token may see; wanted one of {kinds}, or GatedExperts of "
                "flashmoe_megatron.gates in a program of plain PyTorch"
            )
        return None if is_word(value, get_args(GateKind)) else f"wanted one of {kinds}"

    return Rule(wanted, {"metavar": "GATE"})


def _degrees() -> Rule:
    def wanted(value: Any) -> str | None:
        if is_word(value, ("auto",)) or read_degrees(value) is not None:
            return None
        return f"wanted auto, N or N,M, of numbers from 1 to {MAX_DEGREE}"

    return Rule(wanted, {"metavar": "DEGREE"})


ROW_FACTOR = number(
    f"a number of at least 1, at most {MAX_ROW_BOUND:g}",
    least=1,
    most=MAX_ROW_BOUND,
    metavar="FACTOR",
)
"""A bound of rows where no training measures one."""


def option(default: Any, rule: Rule, help: str, *, unset: str = "") -> Any:
    """A field that is an option; a default of ``None`` makes ``None`` a good value.

    ``help`` ends in a full stop and is for users of every framework; ``unset`` says what happens by
    default if that is ``None``.
    """
    return field(default=default, metadata={"rule": rule, "help": help, "unset": unset})


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """How a backend runs a layer; the same on every rank.

    The reference heeds ``keep``, ``row_bound``, ``host_overlap``, ``combine``, ``host_slots``,
    what is said of replicas, and between hosts ``timeout``; the scheduled backend heeds ``keep``,
    ``row_bound``, ``counters``, its own ``degree``, ``degree_fit`` and ``exchange``, and
    ``timeout`` in every exchange but direct. Both have the bits of ``rank_invariant`` without it.
    The others change nothing for them.

    Raises:
        ConfigError: A value has no meaning; the message names what was got and what is wanted.
    """

    keep: KeepOption = option(
        "auto",
        one_of(("auto", *KEEPS)),
        "What a forward keeps for its backward. all keeps everything that the backward needs, as "
        "the frameworks' own layers do. preactivations keeps the outputs of the first projection, "
        "and the backward fetches the rows of tokens again, or on one GPU copies or reads tokens. "
        "inputs keeps the layer's inputs, and the backward computes the rest again. auto takes "
        "preactivations on one GPU, and on several where that takes little of a backward's time by "
        "the layer's sizes, else all, and logs its choice.",
    )
    reserved_sms: int = option(
        DEFAULT_RESERVED_SMS,
        whole_number(least=0),
        "Multiprocessors that launches leave to NCCL, which runs concurrently with the kernel "
        "when gradients or parameters are exchanged.",
    )
    row_bound: RowBound | None = option(
        None,
        or_auto(ROW_FACTOR),
        "How many rows the buffers hold, as a multiple of the mean number of rows per rank. "
        "Nothing is ever dropped: where a rank is to receive more, Megatron repeats the iteration, "
        "and other programs get an error, unless they have their steps repeated. With a bound the "
        "layer is one launch that the host never waits for, and a CUDA graph can capture it. auto, "
        "in Megatron, begins a training with exact buffers, and then bounds them by a tenth more "
        "than they have needed.",
        unset="no bound: the host waits for exact buffers in every forward of training. Where "
        "Megatron captures the whole iteration in a CUDA graph it is auto",
    )
    spare_slots: int = option(
        0,
        whole_number(least=0, most=MAX_EXPERTS),
        "How many experts of other ranks a rank may compute in each launch besides its own, at "
        "most as many as these. They are replicas of the experts that get most tokens. The "
        "scheduled backend has none.",
    )
    placement: When = option(
        "launch",
        one_of(get_args(When)),
        "When spare slots are filled. launch fills them in each launch, from its routing. "
        "lookahead settles on the experts before, from what the layer's input says of the "
        "routing, which itself stays exact; no gain of time has been measured. off leaves the "
        "slots empty.",
    )
    replica_policy: Policy = option(
        "balance",
        one_of(POLICIES),
        "What replicas are for. balance evens out the ranks' rows, which suits NVLink. popular "
        "keeps as many of a rank's routes on the rank as its spare slots allow, which suits slow "
        "links.",
    )
    degree: str = option(
        "1",
        _degrees(),
        "Into how many parts the scheduled backend cuts every expert's rows, so that some travel "
        "while others are computed: a number, or two for forward and backward. auto computes both "
        "from the file that degree_fit names.",
    )
    degree_fit: str | None = option(
        None,
        _path(),
        "A file that says how long exchanges and products take on this machine, written by python "
        "-m flashmoe_megatron.schedule fit. The degree auto and slice_gradients need it.",
        unset="none, and degrees are numbers",
    )
    exchange: ExchangeKind = option(
        "auto",
        one_of(get_args(ExchangeKind)),
        "How the rows of the scheduled backend travel. direct sends them from each rank to each "
        "other rank. copies does so by copy engines that write into the other GPUs of one host. "
        "2dh sends them within each host, and then between the ranks at one place of all hosts. "
        "auto takes 2dh where several hosts have several ranks each, else direct.",
    )
    symmetric_memory: SymmetricMemory = option(
        "cuda", one_of(get_args(SymmetricMemory)), "How GPUs share memory: by cuda or by nvshmem."
    )
    timeout: float = option(
        DEFAULT_TIMEOUT,
        number(
            f"seconds above 0, {MIN_TIMEOUT:g} to {MAX_TIMEOUT:g}",
            least=MIN_TIMEOUT,
            most=MAX_TIMEOUT,
            metavar="SECONDS",
        ),
        "How many seconds a rank waits for a peer before it raises an error: in the kernel, in "
        "exchanges between its hosts, and in the scheduled backend's exchanges copies and 2dh.",
    )
    host_overlap: int = option(
        0,
        whole_number(least=0, most=2),
        "In how many launches a rank computes the tokens of other hosts, where an expert-parallel "
        "group spans several. It launches its own tokens first, while the others travel, and "
        "results travel back during the next launch. With 0, all tokens are exchanged before the "
        "launch and all results after it.",
    )
    combine: Combine = option(
        "shares",
        one_of(get_args(Combine)),
        "How results come together. shares adds up what the experts of one rank, and then of one "
        "host, make of a token, and sends one row. routes sends a row for each expert of a token, "
        "there and back, and the token's rank adds them: then no bit of outputs and of gradients "
        "of tokens and probabilities depends on which rank or host computes an expert. Not for "
        "the scheduled backend.",
    )
    host_slots: int = option(
        0,
        whole_number(least=0, most=MAX_EXPERTS),
        "How many experts of other hosts a rank may compute in each call besides its own, for the "
        "tokens of its host, where an expert-parallel group spans several. They are those that "
        "most routes of these tokens choose. It needs combine routes and exact buffers.",
    )
    rank_invariant: bool = option(
        False,
        switch(),
        "Give a batch the same bits whatever the number of ranks of one host that share its "
        "experts: outputs, and gradients of tokens, probabilities, weights and biases. The "
        "kernel computes so with a multiple of 8 experts on 1, 2, 4 or 8 ranks, and so do the "
        "reference and the scheduled backend in one part; spare slots, groups over several hosts "
        "and on the kernel experts in FP8 are refused.",
    )
    counters: bool = option(
        True,
        true_or_false(),
        "Whether launches count where their time goes and what they move, and leave a record each.",
    )

    def __post_init__(self) -> None:
        """Refuses values without a meaning."""
        for one in options_of(type(self)):
            value = getattr(self, one.name)
            wanted = wanted_instead(one, value)
            if wanted is not None:
                raise self.refusal(one.name, value, wanted)

    @property
    def filled_slots(self) -> int:
        """Spare slots that get replicas: none if ``placement`` is off."""
        return 0 if self.placement == "off" else self.spare_slots

    @classmethod
    def refusal(cls, name: str, value: object, wanted: str) -> ConfigError:
        """The error that a value is, which says where the value was given."""
        return ConfigError(f"{got(name, value)}: {wanted}")


@dataclass(frozen=True, kw_only=True)
class FrameworkOptions(BackendOptions):
    """The choices of a user of Megatron or DeepSpeed for all MoE layers of a model."""

    backend: BackendKind = option(
        "auto",
        one_of(get_args(BackendKind)),
        "Which backend computes the layers. kernel needs a Hopper GPU. scheduled runs on any GPU, "
        "in parts that overlap. reference is plain torch, and slow on a GPU. auto takes the "
        "kernel for bfloat16 and float16 on a Hopper GPU, scheduled for everything else on GPUs, "
        "and the reference on CPUs.",
    )
    experts: Experts = option(
        "bf16",
        one_of(get_args(Experts)),
        "What routed experts compute in. bf16 takes the dtype of their parameters. fp8 computes "
        "forwards in blockwise FP8 (E4M3, with a power of two as the scale of each 1 x 128 values "
        "of tokens and 128 x 128 of weights), sends tokens so, and computes backwards in bfloat16 "
        "from what forwards computed with. fp8_dgrad has gradients of tokens in FP8, too, from "
        "gradients that are quantized and sent as tokens are, and those of weights in bfloat16. On "
        "the kernel wide experts take less time so; the backends scheduled and reference have "
        "both, no faster than bfloat16.",
    )
    quantize: Quantize = option(
        "pass",
        one_of(get_args(Quantize)),
        "How often the weights of experts in fp8 are quantized. pass does so in each forward and "
        "keeps nothing. step does so in the first forward of an optimizer's step, and keeps what "
        "the other micro-batches read: a byte more for each weight of the experts, and with "
        "fp8_dgrad on the kernel another for a backward's.",
    )
    max_tokens: int | None = option(
        None,
        whole_number(least=1, most=MAX_TOKENS),
        "The largest number of tokens that one rank has in one call.",
        unset="the framework's",
    )
    metrics: str = option(
        "default",
        _metric_names(),
        "Which metrics of the MoE layers the framework's loggers get: default, all (also the "
        "details), none (the kernel then counts nothing), or names with commas between them.",
    )
    calibration: str | None = option(
        None,
        _path(),
        "A file with the layers' time on 2 GPUs, written by python -m "
        "flashmoe_megatron.calibrate. The overlap efficiency is computed from it.",
        unset="none, and no such metric",
    )
    slice_gradients: bool = option(
        False,
        switch(),
        "Cut the reduction of gradients into pieces that fit the gaps that the layers' exchanges "
        "leave in a backward. The file that degree_fit names says how long these are.",
    )
    counters: bool = field(init=False)

    def __post_init__(self) -> None:
        """Refuses values without a meaning; derives whether the kernel counts."""
        super().__post_init__()
        if self.quantize == "step" and self.experts == "bf16":
            wanted = f"wanted experts fp8, or pass, since experts {self.experts} have no copies"
            raise self.refusal("quantize", self.quantize, wanted)
        object.__setattr__(self, "counters", self.metrics != "none")

    @property
    def agreed(self) -> dict[str, Any]:
        """The values that must be equal on all ranks, by option; for a file, whether there is one.

        Hosts may keep a file at different places. Ranks compare what they make of it.
        """
        agreed = {}
        for one in options_of(type(self)):
            value = getattr(self, one.name)
            is_file = one.metadata["rule"].is_file and value is not None
            agreed[one.name] = "a file" if is_file else value
        return agreed

    def backend_options(self) -> dict[str, Any]:
        """Returns what :func:`~flashmoe_megatron.select.select_backend` takes, but the kind."""
        return {one.name: getattr(self, one.name) for one in fields(BackendOptions)}


@dataclass(frozen=True, kw_only=True)
class GatedOptions(FrameworkOptions):
    """The choices where a gate can take the place of a framework's own router."""

    gate: GateKind = option(
        "router",
        _gate(),
        "Which gate chooses the experts of tokens. router is the framework's own. gshard takes "
        "two, the second at random by its weight while training, and with a capacity gives first "
        "choices their places before second ones. sigmoid (BASE) takes the largest products, with "
        "their sigmoids as weights. xmoe (X-MoE) takes the largest cosines in a space of few "
        "dimensions. Each is another model than the router, which has to be trained and used "
        "with the option.",
    )


Options = TypeVar("Options", bound=BackendOptions)


def options_of(kind: type[BackendOptions]) -> list[Field[Any]]:
    """Returns the fields that a user may set; fields that few kinds of options have come first."""
    kinds = [{one.name for one in fields(base)} for base in kind.__mro__ if is_dataclass(base)]
    given = [one for one in fields(kind) if one.init]
    return sorted(given, key=lambda one: sum(one.name in names for names in kinds))


def unset_option(kind: type[BackendOptions], name: str, unset: str) -> Any:
    """An inherited option as a field that is ``None`` by default, as ``unset`` explains."""
    (inherited,) = (one for one in fields(kind) if one.name == name)
    return field(default=None, metadata={**inherited.metadata, "unset": unset})


def wanted_instead(one: Field[Any], value: object) -> str | None:
    """Returns what an option of :func:`options_of` has to be where it cannot be ``value``.

    The words begin with "wanted"; ``None`` if the value will do.
    """
    if value is None and one.default is None:
        return None
    wanted: str | None = one.metadata["rule"].wanted(value)
    return f"{wanted}, or None" if wanted is not None and one.default is None else wanted


def make_options(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """Options from names and values; what is left out has its default.

    Raises:
        ConfigError: A name is unknown, and the message has a similar name; or a value has no
            meaning.
    """
    names = [one.name for one in options_of(kind)]
    for name in given:
        if name not in names:
            if name in {one.name for one in fields(MoEConfig)}:
                raise ConfigError(f"option {name!r} is a field of MoEConfig: wanted it there")
            raise ConfigError(
                f"option {name!r} is unknown{nearest(name, names)}: wanted some of "
                f"{', '.join(names)}"
            )
    return kind(**given)


def add_flags(
    parser: Any, kind: type[BackendOptions], prefix: str = "", names: Collection[str] | None = None
) -> None:
    """Adds a flag for each option, or for those of some names.

    The parser is one of ``argparse`` or a group of one; the prefix begins every flag, "flashmoe"
    for ``--flashmoe-keep``.
    """
    for one in options_of(kind):
        if names is None or one.name in names:
            unset = one.metadata["unset"] or "%(default)s"
            name = f"{prefix}_{one.name}" if prefix else one.name
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                dest=name,
                default=one.default,
                help=f"{one.metadata['help']} Default: {unset}.",
                **one.metadata["rule"].argparse,
            )


LAYER_SIZES = {
    "hidden": "model width",
    "intermediate": "FFN width of one expert",
    "num_experts": "experts of the whole group",
    "topk": "experts of each token",
    "tokens": "tokens of one rank and call",
}
"""Sizes that a command needs of a layer that it makes, with the help for each."""


def add_sizes(
    parser: argparse.ArgumentParser, sizes: Mapping[str, str], *, required: bool = False
) -> None:
    """Adds a flag that takes a whole number for each size, whose value says what it is."""
    for name, text in sizes.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, required=required, help=text)


def read_flags(args: argparse.Namespace, kind: type[BackendOptions], prefix: str) -> dict[str, Any]:
    """Returns the values of :func:`add_flags`' flags, by option; absent flags are left out."""
    given = {one.name: f"{prefix}_{one.name}" for one in options_of(kind)}
    return {name: getattr(args, dest) for name, dest in given.items() if hasattr(args, dest)}


def option_table(
    kind: type[BackendOptions], first: str, spell: Callable[[str], str], show: Callable[[Any], str]
) -> str:
    """A table of the options in Markdown, for a page.

    ``first`` heads the first column; ``spell`` and ``show`` are how users write an option's name
    and its value.
    """
    rows = [f"| {first} | default | meaning |", "| --- | --- | --- |"]
    for one in options_of(kind):
        default = one.metadata["unset"] or f"`{show(one.default)}`"
        rows.append(f"| `{spell(one.name)}` | {default} | {one.metadata['help']} |")
    return "\n".join(rows) + "\n"
