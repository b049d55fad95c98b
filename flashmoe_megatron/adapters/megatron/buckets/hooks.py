"""Tells Megatron's DDP of experts' gradients that a launch has added to ``main_grad`` itself.

DDP hooks each parameter's gradient accumulator, which autograd runs once in a backward pass, after
the last call of a layer and after whatever else has a gradient for the parameter. A launch's part
reaches the accumulator as none, so that its hook adds what others bring and nothing else. In all
micro-batches but the last that is all; in the last one DDP learns of all experts of a layer in
their order, once the last accumulator has run, on the stream of the launch.

With ``--overlap-param-gather`` DDP also waits in every module's forward for each of its parameters;
one wait for each bucket is enough.
"""

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch

from flashmoe_megatron.adapters.patch import Function
from flashmoe_megatron.autograd import accumulates, accumulator_of, dummy_grads
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.streams import current_stream, index_of

_HOOK = "flashmoe_ddp_hook"
"""Attribute of a parameter: the hook that DDP has registered for its gradient."""
_WAITS = "flashmoe_waits_for_parameters"
"""Attribute of a forward pre-hook: it is DDP's."""
_FEW = 8
"""Parameters of a module that are not worth a list of its buckets."""
_wants_grad = attrgetter("requires_grad")
_hooks_of = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))


class _Hook:
    """A hook of DDP's, which is not saved with its parameter.

    It holds nothing. DDP keeps each parameter's node of autograd, and the node keeps the parameter
    and its hooks where Python's garbage collector does not see them: all would live forever.
    """

    def __init__(self, ddp: Any, param: torch.Tensor, original: Function) -> None:
        self.ddp = weakref.ref(ddp)
        self._param = weakref.ref(param)
        self._original = weakref.ref(original)
        self.experts: Callable[[], ExpertHooks | None] = lambda: None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def called(self, *_: Any) -> None:
        """Runs in place of DDP's hook, as which it is registered; once for each parameter."""
        param = self._param()
        experts = self.experts()
        if param is None:
            return
        if experts is None:
            self.call()
        elif experts.passes and experts.is_waiting():
            experts.arrive()
        elif param.grad is not None or experts.is_delayed:
            experts.tell(param, self)

    def call(self) -> None:
        original = self._original()
        if original is not None:
            original()


def make_backward_post_hook(original: Function) -> Function:
    """Notes each hook that DDP makes for a parameter."""

    def make(ddp: Any, param: torch.nn.Parameter) -> Function:
        hook: Function = original(ddp, param)
        vars(ddp).setdefault(_HOOK, []).append(hook)  # the parameter and its node hold it weakly
        mine = _Hook(ddp, param, hook)
        setattr(param, _HOOK, mine)
        return mine.called

    return make


class _Representatives:
    """Stands for a module in a hook that asks for its parameters: one of each bucket."""

    def __init__(self, ddp: Any, module: torch.nn.Module) -> None:
        self.held = tuple(module._parameters.values())
        groups = ddp.param_to_bucket_group
        known = {
            id(groups[param]): param
            for param in reversed(self.held)
            if param is not None and param in groups
        }
        self._params = [*known.values()][::-1]

    def parameters(self, recurse: bool) -> list[torch.nn.Parameter]:
        """The first parameter of each bucket."""
        return self._params


def make_forward_pre_hook(original: Function) -> Function:
    """Waits once for each bucket of a module's parameters."""

    def make(ddp: Any) -> Function:
        hook: Function = original(ddp)
        known: weakref.WeakKeyDictionary[torch.nn.Module, _Representatives]
        known = weakref.WeakKeyDictionary()

        def call(module: torch.nn.Module, *given: Any) -> Any:
            held = module._parameters
            if not held:  # as in many of a SequentialMLP's modules: nothing to wait for
                return None
            if len(held) < _FEW:
                return hook(module, *given)
            stand_in = known.get(module)
            if stand_in is None or not _same(held.values(), stand_in.held):
                stand_in = known[module] = _Representatives(ddp, module)
            return hook(stand_in, *given)

        setattr(call, _WAITS, True)
        return call

    return make


def _same(values: Any, others: Sequence[object]) -> bool:
    return len(values) == len(others) and all(map(is_, values, others))


def waits_for_parameters(hook: Function) -> bool:
    """Tells whether a forward pre-hook is DDP's, which only waits for a module's parameters."""
    return hasattr(hook, _WAITS)


def await_parameters(module: torch.nn.Module) -> None:
    """Calls what waits for a module's parameters, as often as its forward would."""
    for hook in tuple(module._forward_pre_hooks.values()):
        if waits_for_parameters(hook):
            hook(module)


def check_counts(group: Any) -> None:
    """Says which gradients a reduction still waits for, when it is to be finished."""
    if _is_counting(group) and not getattr(group, "grad_reduce_finished", False):
        came, wanted = _counts_of(group)
        if group.grad_reduce_handle is None and came < wanted:
            raise _miscounted(came, wanted)


def _check_is_awaited(group: Any) -> None:
    """Refuses gradients that come after their bucket's reduction has begun."""
    if _is_counting(group):
        came, wanted = _counts_of(group)
        if came >= wanted:
            raise _miscounted(came + 1, wanted)


def _is_counting(group: Any) -> bool:
    """Tells whether a reduction begins after as many gradients as in the first iteration."""
    config = group.ddp_config
    return bool(
        config.overlap_grad_reduce
        and not group.is_first_batch
        and config.num_distributed_optimizer_instances == 1
    )


def _counts_of(group: Any) -> tuple[int, int]:
    """Counts how often DDP got an expert's gradient, now and in the first iteration."""
    found = group.per_param_grad_ready_counts
    pairs = [
        (found.get(param, 0), wanted)
        for param, wanted in group.golden_per_param_grad_ready_counts.items()
        if hasattr(param, _HOOK) and getattr(param, _HOOK).experts() is not None
    ]
    return min(pairs, key=lambda pair: pair[0] - pair[1], default=(0, 0))


def _miscounted(came: int, wanted: int) -> ConfigError:
    return ConfigError(
        f"experts' gradients came {came} times in this iteration's last micro-batch and {wanted} "
        "times in the first iteration's, after which --overlap-grad-reduce reduces them: wanted "
        "the same number of backward passes; a recomputation by --recompute-granularity full is "
        "one for each call of a layer; leave one of these flags out"
    )


@dataclass
class _Pass:
    """A backward pass of the last micro-batch: whose gradients come in it, and how many have."""

    params: list[torch.Tensor]
    num_arrived: int = 0


class ExpertHooks:
    """Tells DDP of the gradients of all of a layer's experts.

    It is the :class:`~flashmoe_megatron.autograd.MainGrads` of every layer that has these experts.

    Args:
        params: The experts' parameters; each of them that is trained has its hook.
        fuses: Whether Megatron's own layers add gradients of weights to ``main_grad``, and then
            drop what autograd brings besides (``gradient_accumulation_fusion``).
        num_biases: The last so many parameters are biases, which that fusion leaves to autograd.

    Attributes:
        gives_dummies: Whether hooks of others have to be called although they see no gradient.
        passes: Backward passes of a last micro-batch that go on, by autograd's number.
        is_delayed: Whether DDP learns of gradients when Megatron's schedule asks for them, with
            ``--delay-wgrad-compute``.
    """

    def __init__(
        self, params: tuple[torch.Tensor, ...], *, fuses: bool, num_biases: int = 0
    ) -> None:
        self.params = params
        self.gives_dummies = False
        self._fuses = fuses
        num_weights = len(params) - num_biases
        self._is_fused = [fuses and index < num_weights for index in range(len(params))]
        fused = itertools.compress(params, self._is_fused)
        self._marked = [param for param in fused if param.requires_grad]
        self._is_trained = list(map(_wants_grad, params))
        self._trained = [param for param in params if param.requires_grad]
        self._hooks: list[_Hook] = [getattr(param, _HOOK) for param in self._trained]
        self._ddp = self._hooks[0].ddp
        groups = [
            found.param_to_bucket_group[param]
            for hook, param in zip(self._hooks, self._trained, strict=True)
            if (found := hook.ddp()) is not None
        ]
        self._groups = list({id(group): group for group in groups}.values())
        self._accumulators = list(map(accumulator_of, self._trained))
        self._on_accumulators = list(map(_hooks_on, self._accumulators))
        self.is_delayed = self._hooks[0].called not in self._on_accumulators[0].values()
        self._is_last = False
        self._stream: torch.cuda.Stream | None = None
        self.passes: dict[int, _Pass] = {}
        for hook in self._hooks:
            hook.experts = weakref.ref(self)

    @classmethod
    def of(
        cls, params: tuple[torch.Tensor, ...], *, fuses: bool, num_biases: int = 0
    ) -> "ExpertHooks | None":
        """Finds or makes them for parameters; ``None`` where DDP has to see gradients itself.

        It has to where a parameter that is trained has no ``main_grad`` or no hook, or has zeros
        added to its gradient, or is of a layer, too, that has other experts besides.
        """
        trained = [param for param in params if param.requires_grad]
        known: dict[int, ExpertHooks] = {}
        for param in trained:
            hook: _Hook | None = getattr(param, _HOOK, None)
            ddp = None if hook is None else hook.ddp()
            if (
                hook is None
                or ddp is None
                or not hasattr(param, "main_grad")
                or getattr(param, "zero_out_wgrad", False)
                or param not in ddp.param_to_bucket_group
            ):
                return None
            if (one := hook.experts()) is not None:
                known[id(one)] = one
        if not trained:
            return None
        if known:
            one = next(iter(known.values()))
            return one if one.serve(params, fuses=fuses) else None
        return cls(params, fuses=fuses, num_biases=num_biases)

    def serve(self, params: tuple[torch.Tensor, ...], *, fuses: bool) -> bool:
        """Tells whether these are still the hooks of these parameters."""
        return (
            _same(params, self.params)
            and fuses == self._fuses
            and getattr(self._trained[0], _HOOK, None) is self._hooks[0]
            and list(map(_wants_grad, params)) == self._is_trained
        )

    def begin(self, accumulators: Sequence[Any] | None) -> list[bool] | None:
        """Begins a backward of these experts; returns which gradients autograd has to see."""
        self._is_last = self._reduces()
        device = self._trained[0].device
        self._stream = current_stream(index_of(device)) if device.type == "cuda" else None
        for param in self._marked:  # Megatron takes the marks away before each iteration
            param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        is_seen = self._is_seen()
        self.gives_dummies = is_seen and self._fuses
        if accumulators is None:
            runs = self._is_trained
        else:
            runs = [
                is_trained and accumulates(node)
                for is_trained, node in zip(self._is_trained, accumulators, strict=True)
            ]
        if self._is_last and not self.is_delayed and any(runs):
            self.passes[torch._C._current_graph_task_id()] = _Pass(
                [*itertools.compress(self.params, runs)]
            )
        if is_seen and not all(self._is_fused):
            seen = iter(self._seen())
            hidden = [
                not (is_trained and next(seen)) or is_fused
                for is_trained, is_fused in zip(self._is_trained, self._is_fused, strict=True)
            ]
            return [*map(operator.and_, runs, hidden)]
        return None if all(runs) else runs

    def is_due(self) -> bool:
        """Tells whether DDP reduces these gradients in the backward that has begun."""
        return self._is_last

    def is_waiting(self) -> bool:
        """Tells whether DDP learns of all gradients at once in this pass, after the last."""
        return torch._C._current_graph_task_id() in self.passes

    def arrive(self) -> None:
        """Counts an accumulator that has run in this pass; after the last, DDP learns of all."""
        task = torch._C._current_graph_task_id()
        this = self.passes[task]
        this.num_arrived += 1
        if this.num_arrived < len(this.params):
            return
        del self.passes[task]
        for group in self._groups:
            _check_is_awaited(group)
        brings = any(param.grad is not None for param in this.params)
        with self._on_their_stream(waits=brings):
            for param, dummy in zip(this.params, dummy_grads(this.params), strict=True):
                self._tell(param, getattr(param, _HOOK), dummy)

    def tell(self, param: torch.Tensor, hook: _Hook) -> None:
        """Lets DDP know of one gradient, outside of the last micro-batch or if it is delayed."""
        if param.grad is None and not self._reduces():
            return
        (dummy,) = dummy_grads([param])
        with self._on_their_stream(waits=param.grad is not None):
            self._tell(param, hook, dummy)

    def _tell(self, param: torch.Tensor, hook: _Hook, dummy: torch.Tensor) -> None:
        """Lets DDP know of a gradient, and add what autograd brought besides a launch's part."""
        owner: Any = param
        is_marked = owner.grad_added_to_main_grad
        if owner.grad is None:
            owner.grad, owner.grad_added_to_main_grad = dummy, True
        hook.call()
        owner.grad_added_to_main_grad = is_marked

    def _reduces(self) -> bool:
        """Tells whether DDP reduces gradients as they come, as it may in the last micro-batch."""
        ddp = self._ddp()
        overlaps = ddp is not None and ddp.ddp_config.overlap_grad_reduce
        return overlaps and any(group.is_last_microbatch for group in self._groups)

    def _is_seen(self) -> bool:
        """Tells whether anybody else has to see a gradient of these."""
        own = 0 if self.is_delayed else len(self._trained)
        return sum(map(len, self._on_accumulators)) != own or any(
            any(map(hooks_of, self._trained)) for hooks_of in _hooks_of
        )

    def _seen(self) -> list[bool]:
        """Tells whether anybody else has to see the gradient of each that is trained."""
        own = int(not self.is_delayed)
        return [
            len(on_accumulator) != own or any(hooks_of(param) for hooks_of in _hooks_of)
            for param, on_accumulator in zip(self._trained, self._on_accumulators, strict=True)
        ]

    @contextlib.contextmanager
    def _on_their_stream(self, *, waits: bool) -> Iterator[None]:
        """Makes the launches' stream the current one, for collectives wait for that alone."""
        stream = self._stream
        current = None if stream is None else current_stream(stream.device_index)
        if current is None or current == stream:
            yield
            return
        assert stream is not None
        if waits:
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        if waits:  # memory that was freed there is the current stream's
            current.wait_stream(stream)


def _hooks_on(accumulator: Any) -> dict[int, Function]:
    """The hooks on a node of autograd, now and later."""
    handle = accumulator.register_hook(lambda *_: None)
    hooks: dict[int, Function] = handle.hooks_dict_ref()
    handle.remove()
    return hooks
