"""Chooses the backend of a layer, and makes sure that all ranks mean the same layer."""

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from flashmoe_megatron.call import Backend
from flashmoe_megatron.checks import KERNEL_DTYPES, check_kernel_experts, check_token_dtype
from flashmoe_megatron.config import MoEConfig, check_config, is_word
from flashmoe_megatron.errors import ConfigError, DeviceError
from flashmoe_megatron.hosts.grid import HostGrid, arrange, host_groups, host_name
from flashmoe_megatron.options import BackendKind, BackendOptions, make_options
from flashmoe_megatron.planner import describe_choice, describe_hosts
from flashmoe_megatron.ranks import Ranks, check_member
from flashmoe_megatron.replicas.policy import check_slots
from flashmoe_megatron.torch_groups import is_destroyed, living_group, torch_group

logger = logging.getLogger("flashmoe_megatron")

HOPPER = (9, 0)
EIGHTHS = 8
"""Parts of the experts whose results the kernel sums apart, with ``rank_invariant``."""
OVERLAP_CTAS = 2
"""Most CTAs of an exchange between hosts that runs concurrently with a launch."""
Kind = Literal["kernel", "scheduled", "reference"]
_HOMES = {
    "kernel": "flashmoe_megatron.kernel.backend:KernelBackend",
    "scheduled": "flashmoe_megatron.separate.backend:ScheduledBackend",
    "reference": "flashmoe_megatron.separate.reference:ReferenceBackend",
    "degrees": "flashmoe_megatron.separate.degree:choose_degrees",
    "hosts": "flashmoe_megatron.hosts.backend:HostsBackend",
    "rail": "flashmoe_megatron.hosts.rail:Rail",
}
"""Each backend and what it needs besides, which a program imports once it has chosen the backend.
tools/check_layers.py reads these names as it reads imports."""
_ALWAYS = (
    "keep",
    "row_bound",
    "host_overlap",
    "spare_slots",
    "placement",
    "replica_policy",
    "combine",
    "host_slots",
    "timeout",
    "rank_invariant",
)
_AGREED = {
    "kernel": (*_ALWAYS, "symmetric_memory"),
    "reference": _ALWAYS,
    "scheduled": (*_ALWAYS, "degree", "exchange"),
}
"""Options that all ranks need alike, since launches or exchanges depend on them, or for how long
a rank goes on with the others."""

SLOW = (
    "the reference on a GPU waits for its host at every step and is slow: it is there to compare "
    "with; choose the backend 'auto' or 'scheduled' to train"
)


LEAST_HIDDEN_OF_FP8_DGRAD = 4096
"""Gradients of tokens have taken less time in FP8 than in bfloat16 from this hidden size on."""


class _Choice(NamedTuple):
    config: MoEConfig
    kind: Kind
    device: torch.device
    dtype: torch.dtype | None
    options: BackendOptions

    @property
    def agreed(self) -> dict[str, Any]:
        """The part of the choice that must be equal on all ranks."""
        options = {name: getattr(self.options, name) for name in _AGREED[self.kind]}
        own = {"backend": self.kind, "dtype": self.dtype}
        return {**dataclasses.asdict(self.config), **own, **options}


def select_backend(
    config: MoEConfig,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    *,
    kind: BackendKind = "auto",
    dtype: torch.dtype | None = None,
    tensor_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Backend:
    """Makes the backend of one layer, or of all layers of one shape.

    Collective over the group. What one rank refuses or cannot make, every rank raises. The kernel
    is never replaced by the reference because it failed: if it cannot be loaded or run, its error
    is raised.

    Args:
        config: The layer's shape.
        group: The expert-parallel group, ``None`` for one rank. The backend of a wrapper is that of
            its inner group, and ends with it.
        device: Where the layer's tensors live.
        kind: "kernel", "scheduled", "reference", or "auto": the kernel on a Hopper GPU (compute
            capability 9.0), the scheduled backend on other GPUs and for dtypes that the kernel does
            not serve, else the reference. The choice of "auto" is logged once per process.
        dtype: The dtype of tokens and weights, ``None`` for a dtype that every backend serves.
        tensor_group: The ranks that share each expert, ``None`` where experts are whole; see
            :class:`~flashmoe_megatron.separate.backend.ScheduledBackend`, which alone takes them.
        **options: Fields of :class:`~flashmoe_megatron.options.BackendOptions`.

    Raises:
        ConfigError: ``kind`` or an option is unknown, the ranks disagree on ``kind``, ``config``,
            ``dtype`` or an option that concerns all of them, or do not lie in blocks of hosts,
            nothing can be computed in ``dtype``, ``config`` is no :class:`MoEConfig`, the
            layer cannot have the spare slots, the degree or the ``tensor_group``, or this rank is
            not in a group.
        DeviceError: There is no such device here, ``kind`` is "kernel" and it is not a Hopper GPU,
            or the kernel's library cannot be loaded.
    """
    check_member(group)
    given = group, tensor_group
    inner = torch_group(group), torch_group(tensor_group)
    make = functools.partial(_make_backend, config, device=device, kind=kind, dtype=dtype)
    backend = make(*inner, options=options)
    _origins[backend] = _Origin(
        given,
        inner,
        lambda: select_backend(
            config, group, device, kind=kind, dtype=dtype, tensor_group=tensor_group, **options
        ),
    )
    return backend


class _Origin:
    """The groups that a backend was made for, and the backend that has taken its place.

    Attributes:
        given: The groups that the caller gave.
        inner: The groups of torch's own that they stood for.
        last: The backend that took over last, in a list that all these share.
    """

    def __init__(
        self, given: Sequence[Any], inner: Sequence[Any], make_again: Callable[[], Backend]
    ) -> None:
        self.given, self.inner, self.make_again = given, inner, make_again
        self.last: list[weakref.ref[Backend]] = []

    @property
    def is_over(self) -> bool:
        """True if a group of them has been destroyed."""
        return any(map(is_destroyed, self.inner))


_origins: "weakref.WeakKeyDictionary[Backend, _Origin]" = weakref.WeakKeyDictionary()


def living_backends() -> list[Backend]:
    """The backends of :func:`select_backend` that exist in this process."""
    return list(_origins)


def followed(backend: Backend) -> Backend:
    """Returns the backend for the groups as they are now, in place of one of ended groups.

    Collective over the group where a wrapper's inner group has been made again since. A backend
    that is not from :func:`select_backend` is given back.

    Raises:
        ConfigError: A group has been destroyed, and has not been made again.
    """
    origin = _origins.get(backend)
    if origin is None or not origin.is_over:
        return backend
    last = origin.last[0]() if origin.last else None
    if last is None or _origins[last].is_over:
        for group in origin.given:
            living_group(group)
        last = origin.make_again()
        last.hooks = backend.hooks
        origin.last[:] = [weakref.ref(last)]
        _origins[last].last = origin.last
    return last


def _make_backend(
    config: MoEConfig,
    group: dist.ProcessGroup | None,
    tensor_group: dist.ProcessGroup | None,
    *,
    device: torch.device | str,
    kind: BackendKind,
    dtype: torch.dtype | None,
    options: dict[str, Any],
) -> Backend:
    """Makes the backend for groups as torch knows them; see :func:`select_backend`."""
    ranks = Ranks(group)
    choices = ranks.all(
        lambda: _choose(config, kind, device, dtype, options, tensor_group),
        alike=lambda choice: choice.agreed,
    )
    _, chosen, device, _, chosen_options = choices[ranks.rank]
    check_slots(config, chosen_options.spare_slots, chosen_options.placement)
    if chosen_options.filled_slots and config.num_ranks == 1 and chosen != "scheduled":
        _announce_once(
            f"spare_slots={chosen_options.spare_slots} on one rank, which has all "
            f"{config.num_experts} experts: there are no replicas",
            logging.WARNING,
        )
    grid = HostGrid(1, config.num_ranks, 0) if group is None else find_grid(group)
    if chosen_options.combine == "routes" or chosen_options.host_slots:
        check_combine(config, chosen_options, grid, chosen, is_alone=group is None)
    check_fp8_on_kernel(config, chosen_options, grid, chosen)
    warn_of_slow_gradients(config, chosen)
    if chosen_options.rank_invariant and grid.num_hosts > 1:
        raise ConfigError(
            f"rank_invariant=True in an expert-parallel group over {grid.num_hosts} hosts, which "
            "sums a token's results host by host: wanted a group of one host"
        )
    if kind == "auto":
        _announce(chosen, _describe(device)[1], dtype if chosen == "scheduled" else None)
    if chosen == "reference" and device.type == "cuda":
        _announce_once(SLOW, logging.WARNING)
    if chosen == "scheduled":
        return _class_of(chosen)(
            config,
            group,
            device=device,
            options=chosen_options,
            grid=grid,
            degrees=resolve_name(_HOMES["degrees"])(
                config,
                chosen_options,
                group=group,
                grid=grid,
                device=device,
                dtype=dtype,
                tensor_group=tensor_group,
            ),
            tensor_group=tensor_group,
        )

    def make(
        config: MoEConfig, within: dist.ProcessGroup | None, options: BackendOptions
    ) -> Backend:
        backend = _class_of(chosen)(config, within, device=device, options=options)
        if chosen_options.keep == "auto":
            choice = describe_choice(config, reads_tokens=backend.reads_tokens)
            _announce_once(f"MoE layers of {config.num_experts} experts: {choice}")
        return backend

    by_route = chosen_options.combine == "routes"
    if group is None or (grid.num_hosts == 1 and not by_route):
        return ranks.each(lambda: make(config, group, chosen_options))
    ranks.each(lambda: check_over_hosts(chosen_options, grid, is_kernel=chosen == "kernel"))
    is_fixed, overlap = chosen_options.row_bound is not None, chosen_options.host_overlap
    if grid.num_hosts > 1:
        described = describe_hosts(
            config, grid.num_hosts, is_fixed=is_fixed, overlap=overlap, by_route=by_route
        )
        _announce_once(f"MoE layers of {config.num_experts} experts over {described}")
    groups = host_groups(
        group, grid, timeout=chosen_options.timeout, max_ctas=OVERLAP_CTAS if overlap else None
    )
    return ranks.each(
        lambda: _class_of("hosts")(
            config,
            resolve_name(_HOMES["rail"])(groups),
            lambda part, options: make(part, groups.within, options),
            device=device,
            options=chosen_options,
        )
    )


def _class_of(kind: str) -> Callable[..., Backend]:
    found: Callable[..., Backend] = resolve_name(_HOMES[kind])
    return found


def check_combine(
    config: MoEConfig, options: BackendOptions, grid: HostGrid, kind: Kind, *, is_alone: bool
) -> None:
    """Refuses rows for each route, and experts of other hosts, where they cannot be.

    Raises:
        ConfigError: The backend is scheduled, or there is no group; or slots for other hosts'
            experts go with shares, a row bound or experts in FP8, or are more than these experts.
    """
    if options.combine == "routes" and (kind == "scheduled" or is_alone):
        where = "without a process group" if is_alone else "on the backend 'scheduled'"
        raise ConfigError(
            f"combine='routes' {where}: wanted 'shares', or a group on the backend 'kernel' or "
            "'reference'"
        )
    slots, num_hosts = options.host_slots, grid.num_hosts
    if not slots:
        return
    most = config.num_local_experts * (num_hosts - 1)
    problem = None
    if options.combine != "routes":
        problem = f"combine={options.combine!r}, whose bits they would change: wanted 'routes'"
    elif options.row_bound is not None:
        problem = f"row_bound={options.row_bound}, with which no host reads routes: wanted none"
    elif config.in_fp8:
        problem = f"experts={config.experts!r}, whose weights travel in bfloat16: wanted 'bf16'"
    elif slots > most:
        problem = (
            f"{num_hosts} host{'s' * (num_hosts > 1)} of {config.num_local_experts} experts a "
            f"rank: wanted at most {most}, as many as ranks at one place of the others have"
        )
    if problem is not None:
        raise ConfigError(f"host_slots={slots} with {problem}")


def check_fp8_on_kernel(
    config: MoEConfig, options: BackendOptions, grid: HostGrid, kind: Kind
) -> None:
    """Refuses experts in FP8 on the kernel where no GPU has run them.

    Raises:
        ConfigError: Results travel by route, or gradients of tokens in FP8 go over several hosts.
    """
    if not config.in_fp8 or kind != "kernel":
        return
    problem = None
    if options.combine == "routes":
        problem = "with combine='routes'", "'shares'"
    elif config.has_fp8_dgrad and grid.num_hosts > 1:
        problem = f"in an expert-parallel group over {grid.num_hosts} hosts", "experts='fp8'"
    if problem is not None:
        where, way_out = problem
        raise ConfigError(
            f"experts={config.experts!r} on the kernel {where}, which no GPU has run yet: wanted "
            f"{way_out}, or experts='bf16'"
        )


def warn_of_slow_gradients(config: MoEConfig, kind: Kind) -> None:
    """Tells once of experts whose gradients of tokens took no less time in FP8 than in bfloat16."""
    if kind == "kernel" and config.has_fp8_dgrad and config.hidden < LEAST_HIDDEN_OF_FP8_DGRAD:
        _announce_once(
            f"experts='fp8_dgrad' with hidden={config.hidden}: below {LEAST_HIDDEN_OF_FP8_DGRAD} "
            "it has saved no time. A forward and its backward of Qwen3-30B's layer (hidden 2048) "
            "took 3.88 ms so on an H200, 3.77 with experts='fp8' and 3.20 in bfloat16. Wanted "
            "experts='fp8', or 'bf16', unless this layer measures faster",
            logging.WARNING,
        )


def check_over_hosts(options: BackendOptions, grid: HostGrid, *, is_kernel: bool) -> None:
    """Refuses options that a group over several hosts cannot have.

    An exchange under a launch takes multiprocessors, as a launch does. If they did not all fit, a
    launch could wait for a peer whose multiprocessors an exchange holds that waits, by another
    host, for the launch: so exchanges get few, and launches leave them free.

    Raises:
        ConfigError: Spare slots are to be filled by lookahead or on hosts of one rank; or the row
            bound is to be measured; or launches overlap exchanges, although sizes are fixed or too
            few multiprocessors are left to these.
    """
    overlap, num_hosts = options.host_overlap, grid.num_hosts
    if options.filled_slots:
        problem = None
        if grid.ranks_per_host == 1 and num_hosts > 1:
            problem = "of one rank, which has all of its host's experts: wanted 0"
        elif options.placement == "lookahead":
            problem = (
                "with placement='lookahead', which predicts before tokens cross: wanted 'launch'"
            )
        if problem is not None:
            raise ConfigError(
                f"spare_slots={options.spare_slots} in an expert-parallel group over {num_hosts} "
                f"hosts {problem}"
            )
    if options.row_bound == "auto":
        raise ConfigError(
            f"row_bound='auto' in an expert-parallel group over {num_hosts} hosts, whose steps are "
            "not repeated: wanted a number, or no row_bound"
        )
    if overlap and options.row_bound is not None:
        raise ConfigError(
            f"host_overlap={overlap} with row_bound={options.row_bound}, with which all tokens "
            "cross at once: wanted 0, or no row_bound"
        )
    if overlap and is_kernel and options.reserved_sms < 2 * OVERLAP_CTAS:
        raise ConfigError(
            f"host_overlap={overlap} with reserved_sms={options.reserved_sms}: wanted at least "
            f"{2 * OVERLAP_CTAS}, since exchanges of {OVERLAP_CTAS} CTAs each way run beside a "
            "launch, and one that found no room would stop both"
        )


def find_grid(group: dist.ProcessGroup) -> HostGrid:
    """Finds where the ranks of an expert-parallel group lie. Collective over the group.

    Raises:
        ConfigError: On every rank, if they do not lie in blocks of hosts or are too many.
    """
    ranks = Ranks(group)
    return arrange(ranks.all(host_name), ranks.rank)


def check_choice(kind: str, options: dict[str, Any]) -> None:
    """Refuses an unknown kind or option of a choice that is made now and heeded later."""
    if not is_word(kind, get_args(BackendKind)):
        raise ConfigError(f"backend {kind!r}: wanted one of {', '.join(get_args(BackendKind))}")
    make_options(BackendOptions, options)


def _choose(
    config: MoEConfig,
    kind: BackendKind,
    device: torch.device | str,
    dtype: torch.dtype | None,
    options: dict[str, Any],
    tensor_group: dist.ProcessGroup | None,
) -> _Choice:
    """Returns what :func:`select_backend` is given, if this rank can serve it. Not collective."""
    check_config(config)
    check_member(tensor_group, "tensor_group")
    if dtype is not None:
        check_token_dtype(dtype)
    chosen_options = make_options(BackendOptions, options)
    here = named_device(device)
    chosen = resolve_kind(kind, here, dtype)
    if tensor_group is not None and chosen != "scheduled":
        raise ConfigError(
            f"expert tensor parallelism of {dist.get_world_size(tensor_group)} ranks on the "
            f"backend {chosen!r}, whose experts are whole: wanted the backend 'scheduled', or 1 "
            "rank"
        )
    if chosen_options.rank_invariant:
        _check_rank_invariant(config, chosen_options, chosen, is_cut=tensor_group is not None)
    if chosen == "kernel":
        check_kernel_experts(config)
    return _Choice(config, chosen, here, dtype, chosen_options)


def _check_rank_invariant(
    config: MoEConfig, options: BackendOptions, kind: Kind, *, is_cut: bool
) -> None:
    """Refuses what gives a batch other bits on another number of ranks.

    All backends have an expert's rows in the order of tokens over all ranks. The separate ones sum
    a token's results by expert, whichever rank they come from; the kernel sums those of each eighth
    of the experts, and then pairs of these.

    Raises:
        ConfigError: Slots, parts or shares of experts would change an order; or the kernel cannot
            share the experts out by eighths, or has no such order for their FP8.
    """
    problem = None
    if kind == "kernel" and (EIGHTHS % config.num_ranks or config.num_experts % EIGHTHS):
        problem = (
            f"with {config.num_experts} experts on {config.num_ranks} ranks on the backend "
            "'kernel', which sums results by eighths of the experts: wanted a multiple of 8 "
            "experts on 1, 2, 4 or 8 ranks, or the backend 'scheduled' or 'reference'"
        )
    elif kind == "kernel" and config.in_fp8:
        problem = (
            f"with experts={config.experts!r} on the backend 'kernel': wanted experts='bf16', or "
            "the backend 'scheduled' or 'reference'"
        )
    elif options.filled_slots:
        problem = f"with spare_slots={options.spare_slots}: wanted spare_slots=0"
    elif options.combine != "shares":
        problem = f"with combine={options.combine!r}, which sums by itself: wanted 'shares'"
    elif kind == "scheduled" and options.degree != "1":
        problem = (
            f"with degree={options.degree!r}, whose products have other sizes on other ranks: "
            "wanted degree='1'"
        )
    elif is_cut:
        problem = "with experts that ranks share: wanted no tensor_group"
    if problem is not None:
        raise ConfigError(f"rank_invariant=True {problem}")


def resolve_kind(kind: BackendKind, device: torch.device, dtype: torch.dtype | None = None) -> Kind:
    """Returns what :func:`select_backend` chooses on a device and for a dtype. Not collective.

    Raises:
        DeviceError: The device cannot be used, or ``kind`` is "kernel" and it is not a Hopper GPU.
    """
    check_choice(kind, {})
    is_hopper, found = _describe(device)
    if kind == "kernel" and not is_hopper:
        raise DeviceError(
            f"the kernel needs a Hopper GPU (compute capability 9.0), found {found}; "
            "choose the backend 'scheduled', 'reference' or 'auto'"
        )
    if kind == "auto":
        if is_hopper and (dtype is None or dtype in KERNEL_DTYPES):
            return "kernel"
        return "scheduled" if device.type == "cuda" and torch.cuda.is_available() else "reference"
    return kind


def named_device(device: torch.device | str) -> torch.device:
    """The device of a name, which need not be here, or a DeviceError if none has it."""
    try:
        return torch.device(device)
    except TypeError:
        raise DeviceError(
            f"device={device!r}: wanted a torch.device, or its name, as 'cuda:0'"
        ) from None
    except RuntimeError as error:
        raise DeviceError(f"there is no device {str(device)!r}: {error}") from error


def _describe(device: torch.device) -> tuple[bool, str]:
    """Returns whether a device is a Hopper GPU, and its name for a message."""
    if device.type != "cuda":
        return False, f"the device '{device}'"
    if not torch.cuda.is_available():
        return False, "no usable CUDA GPU"
    try:
        capability = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
    except (RuntimeError, AssertionError) as error:  # the latter where there are fewer GPUs
        raise DeviceError(f"the device '{device}' cannot be used: {error}") from error
    return capability == HOPPER, f"{name} (compute capability {capability[0]}.{capability[1]})"


@functools.cache
def _announce(chosen: str, found: str, dtype: torch.dtype | None) -> None:
    """Logs the choice once per process, on rank 0 alone."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if chosen == "kernel":
        logger.info("MoE backend: the fused kernel, on %s", found)
    elif chosen == "scheduled":
        logger.info(
            "MoE backend: scheduled, because the kernel needs a Hopper GPU and bfloat16 or "
            "float16; found %s%s",
            found,
            f" and {dtype}" if dtype else "",
        )
    else:
        logger.warning(
            "MoE backend: the reference in plain torch, because the kernel needs a Hopper GPU; "
            "found %s",
            found,
        )


@functools.cache
def _announce_once(sentence: str, level: int = logging.INFO) -> None:
    """Logs what is said of one kind of layer, once and on rank 0 alone."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.log(level, "%s", sentence)
