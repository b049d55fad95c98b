"""Reads the weights of Megatron's expert modules, which keep owning them and compute nothing."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from flashmoe_megatron.adapted import AdaptedWeights
from flashmoe_megatron.adapters.forwards import Classes, name_of, with_all_below
from flashmoe_megatron.adapters.megatron.buckets.hooks import await_parameters, waits_for_parameters
from flashmoe_megatron.adapters.megatron.lora import (
    KNOWN,
    base_of,
    class_name,
    problem_of,
    with_additions,
)
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.promise import Promise
from flashmoe_megatron.touched import find_touched
from flashmoe_megatron.weights import ExpertWeights, WrappedWeights

_STOCK = ("megatron.core.", "transformer_engine.", "torch.nn.modules.")
"""Packages whose classes compute with the parameters they own; torch's are the containers."""


class HeldExperts:
    """Holds a layer's experts: launches take their weights, and their forwards are not called.

    What a conversion (quantization, sparsity) or a hook puts into a forward would be lost without a
    word, so that it is refused; LoRA of Megatron-Bridge is read. Classes and structure are looked
    at again only where modules or parameters are others.

    Args:
        experts: The ``experts`` of a MoELayer.
        hidden: The model's width.
        promise: Goes with the weights; ``None`` if the adapter promises nothing.

    Raises:
        ConfigError: Their structure is not known, a class or a ``forward`` is not Megatron's, or
            there are hooks around a forward or a backward, but for those of Megatron's DDP; names
            the module.
    """

    def __init__(
        self, experts: torch.nn.Module, *, hidden: int, promise: Promise | None = None
    ) -> None:
        self._experts = experts
        self._hidden = hidden
        self._promise = promise
        self._classes: Classes = ()
        self._held: tuple[list[list[str]], list[type], list[Any]] = ([], [], [])
        self._weights: ExpertWeights | None = None
        modules = with_all_below(experts)
        self._read(modules)
        self._check_modules(modules)

    def check_not_replaced(self, experts: torch.nn.Module) -> None:
        """Refuses another module, such as a wrapper, in the place of the experts at the start."""
        if experts is not self._experts:
            _refuse(experts, experts, "was put there after the layer was built")

    def read(self) -> ExpertWeights:
        """Does what calling the experts would do before computing, and returns their weights.

        With ``--overlap-param-gather`` Megatron waits for the all-gather of a module's parameters
        in the module's forward pre-hooks. These are called, as often as a module would be.

        Raises:
            ConfigError: As when this was made, if anything has changed since.
        """
        modules = with_all_below(self._experts)
        for module in self._check_modules(modules):
            await_parameters(module)
        return self._read(modules)

    def _check_modules(self, modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """Refuses modules that would compute something else; returns the modules with hooks."""
        classes = tuple(map(type, modules))
        if classes != self._classes:
            for module in modules:
                name = class_name(module)
                if not name.startswith(_STOCK) and name not in KNOWN:
                    _refuse(module, self._experts, f"is of class {name}")
                if problem := problem_of(module):
                    _refuse(module, self._experts, problem)
            self._classes = classes
        touched = find_touched(modules)
        for module in touched:
            _check_hooks(module, self._experts)
        return touched

    def _read(self, modules: Sequence[torch.nn.Module]) -> ExpertWeights:
        """Finds the weights again unless the same names lead to the same parameters.

        ``torch.utils.swap_tensors`` makes a parameter one of another class.
        """
        own = list(map(_parameters_of, modules))
        names = list(map(list, [*own, *map(_modules_of, modules)]))
        params = list(itertools.chain.from_iterable(map(_values_of, own)))
        classes = list(map(type, params))
        held_names, held_classes, held = self._held
        if (
            self._weights is not None
            and names == held_names
            and classes == held_classes
            and all(map(operator.is_, params, held))
        ):
            return self._weights
        self._weights = None
        weights = expert_weights(self._experts, hidden=self._hidden)
        tensors = (*weights.fc1, *weights.fc2, *weights.fc1_bias, *weights.fc2_bias)
        # Views are made in each call, and adapters have a scale, which is no parameter.
        is_plain = not isinstance(weights, AdaptedWeights)
        if is_plain and self._promise is not None:
            weights = dataclasses.replace(weights, promise=self._promise)
        if is_plain and set(map(id, params)).issuperset(map(id, tensors)):
            self._held, self._weights = (names, classes, params), weights
        return weights


_parameters_of = operator.attrgetter("_parameters")
_modules_of = operator.attrgetter("_modules")
_values_of = operator.methodcaller("values")


def _check_hooks(module: torch.nn.Module, experts: torch.nn.Module) -> None:
    for hook in module._forward_pre_hooks.values():
        if not waits_for_parameters(hook):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            _refuse(
                module, experts, f"has a forward pre-hook of others than Megatron's DDP ({name})"
            )
    if module._forward_hooks:
        _refuse(module, experts, "has forward hooks")
    if module._backward_hooks or module._backward_pre_hooks:
        _refuse(module, experts, "has backward hooks")
    if "forward" in module.__dict__:
        _refuse(module, experts, "has a forward of its own")


def _refuse(module: torch.nn.Module, experts: torch.nn.Module, problem: str) -> None:
    raise ConfigError(
        f"{name_of(module, experts)} ({type(module).__name__}) {problem}, which would not be "
        "called; wanted an unchanged module of Megatron-Core or Transformer Engine, or such a one "
        "in LoRALinear of Megatron-Bridge without dropout: convert experts in no other way "
        "(quantization, DoRA, sparsity) and hook none, or use the alltoall dispatcher"
    )


def expert_weights(experts: torch.nn.Module, *, hidden: int) -> ExpertWeights:
    """Finds each local expert's weights by the module's structure.

    Args:
        experts: The ``experts`` of a MoELayer: SequentialMLP (``local_experts`` with a weight in
            each linear), TEGroupedMLP (``weight0``, ``weight1``, ... in each linear, or one
            ``weight`` that is Transformer Engine's GroupedTensor), either with a ``bias`` for
            each weight or with none, or the GroupedMLP of Megatron-Core 0.16 (``weight1`` and
            ``weight2`` for all experts), which Megatron gives no biases. Linears may be wrapped
            by Megatron-Bridge's LoRA, whose additions are read, too.
        hidden: The model's width.

    Raises:
        ConfigError: The structure is none of these, or some experts have a bias and others none;
            names the class.
    """
    name = type(experts).__name__
    if hasattr(experts, "local_experts"):
        local_experts: Any = experts.local_experts
        held1, held2 = ([getattr(e, kind) for e in local_experts] for kind in _LINEARS)
        each1, each2 = [*map(base_of, held1)], [*map(base_of, held2)]
        weights = ExpertWeights(
            fc1=tuple(_parameter(fc1, "weight", name) for fc1 in each1),
            fc2=tuple(_parameter(fc2, "weight", name) for fc2 in each2),
            fc1_bias=_biases([(fc1, "bias") for fc1 in each1], name),
            fc2_bias=_biases([(fc2, "bias") for fc2 in each2], name),
        )
        return with_additions(weights, held1, held2)
    if hasattr(experts, "linear_fc1") and hasattr(experts, "linear_fc2"):
        linears = fc1, fc2 = base_of(experts.linear_fc1), base_of(experts.linear_fc2)
        if getattr(fc1, "single_grouped_weight", False):
            weights = _grouped_weights(linears, name)
        else:
            weights = ExpertWeights(
                fc1=_numbered_weights(fc1, name),
                fc2=_numbered_weights(fc2, name),
                fc1_bias=_numbered_biases(fc1, name),
                fc2_bias=_numbered_biases(fc2, name),
            )
        return with_additions(weights, [experts.linear_fc1], [experts.linear_fc2])
    if hasattr(experts, "weight1") and hasattr(experts, "weight2"):
        count = int(getattr(experts, "num_local_experts"))  # noqa: B009 - a Module's attribute
        fc1 = _parameter(experts, "weight1", name).view(count, hidden, -1)
        fc2 = _parameter(experts, "weight2", name).view(count, -1, hidden)
        return ExpertWeights((fc1,), (fc2,), transposed=True)
    raise ConfigError(
        f"experts of class {name} are not known; wanted SequentialMLP, TEGroupedMLP or GroupedMLP"
    )


_LINEARS = ("linear_fc1", "linear_fc2")


def _grouped_weights(linears: tuple[Any, Any], owner: str) -> WrappedWeights:
    """The weights of ``--moe-single-grouped-weight``, with biases of ``-bias`` or none."""
    for linear in linears:
        if _biases([(linear, f"bias{i}") for i in range(_num_gemms(linear))], owner):
            raise ConfigError(
                f"{owner}: {type(linear).__name__} has one weight for all experts and a bias for "
                "each; wanted --moe-single-grouped-bias with --moe-single-grouped-weight"
            )
    fc1, fc2 = ((_grouped(linear, "weight", owner),) for linear in linears)
    fc1_bias, fc2_bias = (
        (_grouped(linear, "bias", owner),) if _has_bias(linear, "bias") else ()
        for linear in linears
    )
    return WrappedWeights(
        fc1=fc1, fc2=fc2, fc1_bias=fc1_bias, fc2_bias=fc2_bias, data_of=_memory_of
    )


def _grouped(linear: Any, name: str, owner: str) -> torch.Tensor:
    tensor = getattr(linear, name, None)
    data = getattr(tensor, "rowwise_data", None)
    if not isinstance(tensor, torch.Tensor) or data is None or data.dtype != tensor.dtype:
        raise ConfigError(
            f"{owner}: the {name} of {type(linear).__name__} is a {type(tensor).__name__}, wanted "
            "Transformer Engine's GroupedTensor in bfloat16 or float16"
        )
    return tensor


def _memory_of(grouped: torch.Tensor) -> torch.Tensor:
    """A GroupedTensor's memory, which Megatron's DDP moves to a buffer."""
    data: torch.Tensor = grouped.rowwise_data  # type: ignore[attr-defined]
    return data.view(grouped.shape)


def _num_gemms(linear: Any) -> int:
    count = getattr(linear, "num_gemms", None)
    if count is None:
        count = sum(key.startswith("weight") for key, _ in linear.named_parameters(recurse=False))
    return int(count)


@functools.cache
def _names(kind: str, count: int) -> tuple[str, ...]:
    """Returns Transformer Engine's names of the weights or biases of all experts."""
    return tuple(f"{kind}{index}" for index in range(count))


def _numbered_weights(linear: Any, owner: str) -> tuple[torch.Tensor, ...]:
    names = _names("weight", _num_gemms(linear))
    return tuple([_parameter(linear, name, owner) for name in names])


def _numbered_biases(linear: Any, owner: str) -> tuple[torch.Tensor, ...]:
    if _has_bias(linear, "bias"):
        raise ConfigError(
            f"{owner}: {type(linear).__name__} holds the biases of all experts as one parameter, "
            "and a weight for each; wanted --moe-single-grouped-weight with "
            "--moe-single-grouped-bias"
        )
    return _biases([(linear, name) for name in _names("bias", _num_gemms(linear))], owner)


def _tensor_of(module: Any, name: str) -> Any:
    """Is ``getattr`` that looks first where parameters are: this runs before each launch."""
    held = module._parameters
    return held[name] if name in held else getattr(module, name, None)


def _parameter(module: Any, name: str, owner: str) -> torch.Tensor:
    weight: torch.Tensor | None = _tensor_of(module, name)
    if not isinstance(weight, torch.Tensor):
        raise ConfigError(
            f"{owner}: {type(module).__name__} has no {name}; wanted one weight for each expert"
        )
    if type(weight) is not torch.nn.Parameter:  # asked first, for this runs before every launch
        _check_plain(weight, f"{owner}: {name}")
    return weight


def _check_plain(weight: torch.Tensor, name: str) -> None:
    kind = type(weight).__name__
    if hasattr(weight, "full_tensor"):
        raise ConfigError(
            f"{name} is sharded (a {kind}); wanted whole parameters, leave FSDP out and use the "
            "distributed optimizer"
        )
    if type(weight).__module__.startswith("transformer_engine."):
        raise ConfigError(
            f"{name} is quantized (a {kind}); wanted parameters in bfloat16 or float16, as this "
            "layer builds its experts also with --fp8-param-gather: convert no experts, or use the "
            "alltoall dispatcher"
        )


def _biases(places: list[tuple[Any, str]], owner: str) -> tuple[torch.Tensor, ...]:
    """The bias at each module and name, none where no module has one."""
    found = [_has_bias(linear, name) for linear, name in places]
    if not any(found):
        return ()
    if not all(found):
        raise ConfigError(
            f"{owner}: {sum(found)} of {len(found)} experts have a bias; wanted all or none"
        )
    return tuple(_parameter(linear, name, owner) for linear, name in places)


def _has_bias(linear: Any, name: str) -> bool:
    """Tells whether there is one; Transformer Engine puts an empty tensor where there is none."""
    bias = _tensor_of(linear, name)
    return isinstance(bias, torch.Tensor) and bias.numel() > 0
