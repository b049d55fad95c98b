"""The seat of a layer's routed experts, in any framework.

:class:`LayerExperts` does what every framework needs alike: layers of one shape share a backend,
the tokens of a call are bounded, calls and tokens are counted, probabilities are cast, an overflow
of float16 reaches the loss scaler, and launches carry the layer's number.

An adapter for another framework supplies the rest:

- its options, a subclass of :class:`~flashmoe_megatron.options.FrameworkOptions`;
- a subclass of :class:`LayerExperts`, which says where a layer sits (its shape, expert-parallel
  group, device and dtype) and whose call reads the weights and gives :meth:`LayerExperts.run` the
  function that computes with them;
- what puts that call in place of the framework's dispatch, experts and combine, and refuses layers
  that compute something else, by name and with a way out;
- for metrics, a :class:`~flashmoe_megatron.telemetry.reporter.Reporter`, which the adapter calls
  after each step.
"""

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import in_backward
from flashmoe_megatron.call import Backend, Together
from flashmoe_megatron.checks import KERNEL_DTYPES
from flashmoe_megatron.config import TILE_M, Experts, MoEConfig, align_capacity
from flashmoe_megatron.eager import unseen
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.hooks import Hooks
from flashmoe_megatron.measured.calibration import Calibration, Grads, gpu_name, load_calibration
from flashmoe_megatron.options import FrameworkOptions
from flashmoe_megatron.planner import choose_keep
from flashmoe_megatron.promise import Promise
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.telemetry.record import MOST_OWNERS, launch_number
from flashmoe_megatron.telemetry.totals import LayerPlace
from flashmoe_megatron.torch_groups import is_destroyed, living_group, torch_group

Compute = Callable[[Backend, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Computes ``[num_tokens, hidden]`` outputs from a backend, contiguous ``[num_tokens, hidden]``
tokens, finite probabilities and the number that the launch carries."""


class GroupBackends:
    """The backends of all layers of one expert-parallel group, and the tokens they are made for.

    Layers of one shape share a backend, and all backends of a group share its symmetric heap. They
    end with the group; where that is a wrapper's inner one, which is made again, others follow.

    Args:
        group: The expert-parallel group or a wrapper of it, ``None`` for one rank.
        max_tokens: Most tokens of one rank and call. If it is ``None``, the ranks agree on the most
            at every call, and backends are made again when it exceeds what they were made for.
        tensor_group: The ranks that share each expert, ``None`` where experts are whole.

    Attributes:
        group: That group, as torch knows it.
        max_tokens: The tokens that backends are made for now.
        is_shared: Whether layers find them by the same arguments.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        settings: FrameworkOptions,
        max_tokens: int | None,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._given = group, device, settings, max_tokens, tensor_group
        self.group, self._tensor_group = torch_group(group), torch_group(tensor_group)
        self.device = device
        self.max_tokens = max_tokens or TILE_M
        self.is_bounded = max_tokens is not None
        self._settings = settings
        self._backends: dict[tuple[MoEConfig, torch.dtype], Backend] = {}
        self._slices: object = None
        self._hooks: dict[tuple[MoEConfig, torch.dtype], Hooks] = {}
        self.is_shared = False
        self._last = [self]
        """The last that took over, in a list that all share: a chain would keep all between."""

    @property
    def is_over(self) -> bool:
        """Tells whether a group that these were made for has been destroyed."""
        return is_destroyed(self.group) or is_destroyed(self._tensor_group)

    def followed(self) -> "GroupBackends":
        """Finds the backends of the groups as they are now, the same for all layers.

        Not collective.

        Raises:
            ConfigError: A group has been destroyed, and has not been made again.
        """
        if self.is_over and self._last[0].is_over:
            made = self._last[0]._follow()
            self._last[0], made._last = made, self._last
        return self._last[0] if self.is_over else self

    def _follow(self) -> "GroupBackends":
        """Makes the group's next backends, which take over the layers' requests."""
        for group in (self._given[0], self._given[-1]):
            living_group(group)
        made = (shared_backends if self.is_shared else GroupBackends)(*self._given)
        made.max_tokens = max(made.max_tokens, self.max_tokens)
        made._slices = made._slices or self._slices
        made._hooks = {**self._hooks, **made._hooks}
        return made

    def backend_of(
        self, shape: MoEConfig, dtype: torch.dtype, experts: Experts | None = None
    ) -> Backend:
        """The backend for the group's ``max_tokens``; one is made if there is none yet.

        Making one is collective over the group. At the first, ranks compare their settings: many
        say in which collectives a rank takes part. The shape's own ``max_tokens`` and ``experts``
        do not count: experts compute in ``experts``, or as the settings say.

        Raises:
            ConfigError: The ranks have different settings; or see
                :func:`~flashmoe_megatron.select.select_backend`.
        """
        config = dataclasses.replace(
            shape, max_tokens=self.max_tokens, experts=experts or self._settings.experts
        )
        key = config, dtype
        if key not in self._backends:
            with unseen():
                self._backends[key] = self._make(config, dtype)
            self._share()
        return self._backends[key]

    def _make(self, config: MoEConfig, dtype: torch.dtype) -> Backend:
        if not self._backends:
            bound = self.max_tokens if self.is_bounded else None
            Ranks(self.group).check_same({**self._settings.agreed, "max_tokens": bound})
        return select_backend(
            config,
            self.group,
            self.device,
            kind=self._settings.backend,
            dtype=dtype,
            tensor_group=self._tensor_group,
            **self._settings.backend_options(),
        )

    def reduce_in_gaps(self, slices: object) -> bool:
        """Has gradients reduced in the gaps of backwards; tells whether these have gaps."""
        self._slices = slices
        return self._share()

    def _share(self) -> bool:
        """Gives all scheduled backends the slices, and those for more tokens the first's hooks."""
        has_gaps = False
        for (config, dtype), made in self._backends.items():
            shape = dataclasses.replace(config, max_tokens=1), dtype
            made.hooks = self._hooks.setdefault(shape, made.hooks)
            backend: Any = made.within
            if backend.kind == "scheduled":
                backend.slices = self._slices
                has_gaps = True
        return has_gaps

    def backends(self) -> Iterable[Backend]:
        """All that have been made, those for fewer tokens included."""
        return self._backends.values()

    def agree_on_tokens(self, num_tokens: int) -> None:
        """Raises the bound, on every rank, to the fullest rank's tokens; in steps, never down.

        Collective over the group and over the ranks that share its experts.
        """
        most = num_tokens
        groups = [Ranks(self.group), Ranks(self._tensor_group)]
        if any(ranks.num_ranks > 1 for ranks in groups):
            with unseen():
                agreed = torch.tensor([num_tokens], device=self.device)
                for ranks in groups:
                    ranks.most(agreed)
                most = int(agreed)
        if most > self.max_tokens:
            self.max_tokens = align_capacity(max(most, self.max_tokens * 5 // 4))


def shared_backends(
    group: dist.ProcessGroup | None,
    device: torch.device,
    settings: FrameworkOptions,
    max_tokens: int | None,
    tensor_group: dist.ProcessGroup | None = None,
) -> GroupBackends:
    """The same backends for every layer of this process with the same arguments."""

    def make() -> GroupBackends:
        made = GroupBackends(group, device, settings, max_tokens, tensor_group)
        made.is_shared = True
        return made

    key = (device, settings, max_tokens, torch_group(tensor_group))
    return Ranks(group).once(GroupBackends, *key, make=make)


_layers_made = itertools.count()


class LayerExperts(ABC):
    """Applies the routed experts of one layer, over weights that the framework owns.

    It is not a module: it owns no parameters and leaves no trace in a checkpoint. No backend can
    tell training from evaluation, so ``is_training`` is kept up to date by the adapter.

    Args:
        layer: The layer's number in the model, from 0.
        capacity_factor: The router's capacity factor; 1 where nothing is dropped.

    Attributes:
        num_calls: Forward calls so far, recomputation included.
        num_tokens: Tokens of the calls in training so far, recomputation left out.
        is_training: Whether the model is being trained now.
        dtype: The dtype of the last call's tokens; the parameters' until there is a call.
        owner: Marks the layer's launches: no other layer of this process has the same.
        promise: Says when the layer's weights stay as they are, as far as the adapter knows.
    """

    WAYS_OUT_OF_DTYPE: ClassVar[str]
    """An imperative that says how a user of the framework gets another dtype or backend."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        *,
        layer: int = 0,
        capacity_factor: float = 1.0,
    ) -> None:
        self.rank = Ranks(group).rank
        self.dtype = self._weights_dtype = dtype
        self.layer = layer
        self.owner = 1 + next(_layers_made) % (MOST_OWNERS - 1)
        self.capacity_factor = capacity_factor
        self.promise = Promise()
        self.num_calls = 0
        self.num_tokens = 0
        self.is_training = True
        self._backend: Backend | None = None
        self._precision: Experts | None = None
        self._shape: MoEConfig
        self._backends: GroupBackends

    @abstractmethod
    def locate(self) -> tuple[MoEConfig, GroupBackends]:
        """The layer's shape, whose ``max_tokens`` does not count, and its group's backends.

        Asked once, before the backend is made.
        """

    @abstractmethod
    def allow_more(self, num_tokens: int) -> str:
        """Says how a user of the framework raises the bound of tokens to ``num_tokens``."""

    @property
    def backend(self) -> Backend:
        """The backend that computes the layer, made at the first use by :meth:`open`."""
        return self.open() if self._backend is None else self._backend

    def open(self) -> Backend:
        """Makes the backend. Collective over the group.

        Raises:
            ConfigError: The parameters have a dtype in which the chosen kernel cannot compute.
            DeviceError: The kernel was asked for and cannot run here.
        """
        self._shape, self._backends = self.locate()
        backend = self._find_backend()
        if backend.within.kind == "kernel" and self.dtype not in KERNEL_DTYPES:
            raise ConfigError(
                f"the experts are {self.dtype} and the kernel computes in bfloat16 or float16; "
                f"{self.WAYS_OUT_OF_DTYPE}"
            )
        self._backend = backend
        return backend

    @property
    def bound_of_tokens(self) -> int | None:
        """The most tokens of one rank and call, ``None`` without a bound."""
        return self._backends.max_tokens if self._backends.is_bounded else None

    def reduce_in_gaps(self, slices: object) -> bool:
        """Has gradients reduced in the gaps of the layer's backwards; tells whether it has any."""
        return self._backends.reduce_in_gaps(slices)

    def run(self, x: torch.Tensor, probs: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Applies the experts. Collective over the group.

        Tokens of float16 whose probabilities are NaN get an output of NaN.

        Args:
            x: ``[num_tokens, hidden]``.
            probs: ``[num_tokens, ...]`` in any float dtype, for all experts or the chosen ones.
            compute: Computes with the layer's weights.

        Raises:
            ShapeError: There are more tokens than the layer was built for.
        """
        self.num_calls += 1
        self.dtype = x.dtype
        if self.is_training and not in_backward():
            self.num_tokens += x.shape[0]
        backend = self._backend_for(x.shape[0])
        number = self.launch_number()
        rows = x.contiguous()
        if probs.dtype not in (torch.float32, x.dtype):
            probs = probs.float()  # a router in float64 has chosen the experts by now
        if x.dtype != torch.float16:
            return compute(backend, rows, probs, number)
        return _despite_overflow(lambda finite: compute(backend, rows, finite, number), probs)

    def launch_number(self) -> int:
        """The number that the layer's launches carry now."""
        return launch_number(self.layer, is_training=self.is_training, owner=self.owner)

    def follow_group(self) -> Backend:
        """The backend for the group as it is now, which a wrapper may have made again.

        Collective over the group if it has been made again; a caller that only reads takes
        :attr:`backend`.

        Raises:
            ConfigError: The group has been destroyed, and has not been made again.
        """
        backend = self.backend
        if self._backends.is_over:
            self._backends = self._backends.followed()
            self._backend = backend = self._find_backend()
        return backend

    def compute_in(self, experts: Experts) -> Backend:
        """Has the layer compute in another precision than the settings'. Collective over the group.

        Args:
            experts: What its experts compute in from now on.
        """
        self._precision = experts
        self._backend = backend = self._find_backend()
        return backend

    def _find_backend(self) -> Backend:
        return self._backends.backend_of(self._shape, self._weights_dtype, self._precision)

    def _backend_for(self, num_tokens: int) -> Backend:
        backend, backends = self.follow_group(), self._backends
        if not backends.is_bounded:
            backends.agree_on_tokens(num_tokens)
            if backends.max_tokens != backend.config.max_tokens:
                self._backend = backend = self._find_backend()
        elif num_tokens > backends.max_tokens:
            with Together(backend):
                raise ShapeError(
                    f"this rank has {num_tokens} tokens in one call, the layer was built for at "
                    f"most max_tokens={backends.max_tokens} per rank; {self.allow_more(num_tokens)}"
                )
        return backend

    @property
    def place(self) -> LayerPlace:
        """The layer as metrics see it, with one shape on all ranks for any numbers of tokens."""
        device = self._backends.device
        num_sms = 0
        if device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return LayerPlace(
            config=dataclasses.replace(self._shape, experts=self.backend.config.experts),
            rank=self.rank,
            element_bytes=self.dtype.itemsize,
            capacity_factor=self.capacity_factor,
            num_sms=num_sms,
            num_hosts=self.backend.num_hosts,
        )


def _despite_overflow(
    apply: Callable[[torch.Tensor], torch.Tensor], probs: torch.Tensor
) -> torch.Tensor:
    """Gives tokens whose probabilities are NaN an output of NaN.

    That is how a loss scaler learns of an overflow: the loss is NaN, the step is skipped, training
    goes on. The backends take NaN for an error, as it is if no scaler scales the loss.
    """
    has_overflown = probs.isnan().any(1, keepdim=True)
    return apply(probs.masked_fill(has_overflown, 0)).masked_fill(has_overflown, math.nan)


def read_calibration(
    settings: FrameworkOptions,
    shapes: Sequence[MoEConfig],
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    grads: Grads,
    group: dist.ProcessGroup | None,
) -> Calibration | None:
    """Reads the settings' calibration file for layers of these shapes. Collective over a group.

    It is ``None`` if the settings name no file, or this rank has no layers. ``grads`` says where
    gradients of weights go.

    Raises:
        ConfigError: On every rank, if the file does not concern the layers of any.
    """
    if settings.calibration is None:
        return None

    def find() -> Calibration | None:
        return _own_calibration(settings, shapes, device, dtype, grads) if shapes else None

    return Ranks(group).each(find)


def _own_calibration(
    settings: FrameworkOptions,
    shapes: Sequence[MoEConfig],
    device: torch.device,
    dtype: torch.dtype | None,
    grads: Grads,
) -> Calibration:
    assert settings.calibration is not None
    kept = {choose_keep(settings.keep, shape) for shape in shapes}
    return load_calibration(
        settings.calibration,
        shapes,
        gpu=gpu_name(device),
        dtype=str(dtype).removeprefix("torch."),
        bounded=settings.row_bound is not None,
        keep=kept.pop() if len(kept) == 1 else None,  # else the file's word is taken
        grads=grads,
    )
