"""Repeats a step of a training in which a rank received more rows than the bound."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashmoe_megatron.attempts import ATTEMPTS
from flashmoe_megatron.config import check_class
from flashmoe_megatron.errors import ConfigError, FlashMoEError, RowBoundError
from flashmoe_megatron.expert_group import local_part
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.saved import Saved
from flashmoe_megatron.select import living_backends

MOST_IN_A_ROW = 10
"""The most consecutive steps that are repeated; an overflow in the next is an error."""


class Repeats:
    """Runs steps of a training, each a second time if its rows did not fit.

    Args:
        kind: What errors call a step.
        option: What errors call the option ``row_bound``.

    Attributes:
        num_repeats: Steps that were repeated so far.
    """

    def __init__(self, kind: str, option: str) -> None:
        self.num_repeats = 0
        self._kind = kind
        self._option = option
        self._in_a_row = 0

    def _run_twice_at_most(
        self,
        first: Callable[[], Any],
        again: Callable[[], Any],
        saved: Saved,
        find_problem: Callable[[], str | None] = lambda: None,
    ) -> Any:
        """Returns what the step returns. Collective over all ranks of the job.

        Args:
            first: Runs the step.
            again: Drops what the first attempt has left, and runs the step with exact buffers.
            saved: What the step changes besides gradients, to be put back before ``again``.
            find_problem: Returns why the step that has run cannot be repeated, ``None`` if it can.
        """
        with ATTEMPTS.open():
            result = first()
            _find_faults()
        problem = find_problem()
        has_overflown, cannot_repeat = self._agree(ATTEMPTS.has_overflown, problem is not None)
        if not has_overflown:
            ATTEMPTS.raise_first()
            self._in_a_row = 0
            return result
        if cannot_repeat:
            raise ATTEMPTS.final_error(problem or f"another rank cannot repeat the {self._kind}")
        if self._in_a_row == MOST_IN_A_ROW:
            raise ATTEMPTS.final_error(
                f"the {MOST_IN_A_ROW} {self._kind}s before have been repeated already"
            )
        del result
        saved.restore()
        with ATTEMPTS.open(), self._exact("is repeated"):
            result = again()
            _find_faults()
        most, has_overflown = self._agree(ATTEMPTS.most, ATTEMPTS.has_overflown)
        if has_overflown:
            raise ATTEMPTS.final_error(
                f"the {self._kind} has been repeated, but not with exact buffers"
            )
        ATTEMPTS.raise_first()
        ATTEMPTS.grow(most)
        self.num_repeats, self._in_a_row = self.num_repeats + 1, self._in_a_row + 1
        return result

    def _agree(self, *values: int) -> list[int]:
        """Returns the greatest values of all ranks of the job. Collective over them."""
        if not dist.is_initialized():
            return [int(value) for value in values]
        ranks = Ranks(dist.group.WORLD)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        with ranks.bounded:
            return [int(one) for one in ranks.most(torch.tensor(values, device=device)).tolist()]

    @contextlib.contextmanager
    def _exact(self, how: str) -> Iterator[None]:
        """Makes buffers exact in its body, which says ``how`` a step runs with them."""
        try:
            with ATTEMPTS.exact():
                yield
        except torch.OutOfMemoryError as error:
            raise RowBoundError(
                f"the {self._kind} {how} with exact buffers for its rows, which do not fit: give "
                f"{self._option} a number that holds from the start, or make micro-batches "
                f"smaller: {error}"
            ) from error


class Steps(Repeats, ABC):
    """The steps of a training loop of a program's own."""

    def __init__(self) -> None:
        super().__init__("step", "row_bound")

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what a step returns. Collective over all ranks of the job.

        The step gets the same arguments again, and must leave them as they are.

        Raises:
            ConfigError: The step is no function, experts are on several hosts, the step changes a
                parameter, or a gradient that is to be dropped is left.
            RowBoundError: Ten steps in a row did not fit, or a repeated one did not, or its exact
                buffers do not.
            FlashMoEError: Another error that layers have put off.
        """
        if not callable(step):
            raise ConfigError(f"step={step!r}: wanted a function that runs a step")
        if any(backend.within is not backend for backend in living_backends()):
            raise ConfigError(
                "steps of experts over several hosts cannot be repeated: wanted expert-parallel "
                "groups of one host, or a loop without RepeatedSteps"
            )

        def first() -> Any:
            result = step(*args, **kwargs)
            self._refuse_update(versions)
            return result

        def again() -> Any:
            self._check()
            self._drop_gradients()
            self._refuse_left()
            return step(*args, **kwargs)

        saved = self._save()
        self._drop_gradients()
        versions = {id(one): one._version for one in self._model.parameters()}
        return self._run_twice_at_most(first, again, saved)

    @property
    @abstractmethod
    def _model(self) -> nn.Module:
        """The module that steps train."""

    @abstractmethod
    def _check(self) -> None:
        """Refuses a model whose gradients cannot be dropped."""

    @abstractmethod
    def _save(self) -> Saved:
        """Saves what a step changes besides gradients."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Sets all gradients to zero, before every step."""

    def _refuse_update(self, versions: Mapping[int, int]) -> None:
        """Refuses a step that has changed parameters, which are not put back."""
        for name, parameter in self._model.named_parameters():
            if parameter._version != versions.get(id(parameter), parameter._version):
                raise ConfigError(
                    f"the function of run has changed the parameter {name}: wanted what does so, "
                    "such as optimizer.step(), after run, which decides whether the step is "
                    "repeated"
                )

    def _refuse_left(self) -> None:
        """Refuses gradients of the first attempt that were not dropped, which may be NaN."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None and bool(local_part(parameter.grad).any()):
                raise ConfigError(
                    f"zero_grad has left a gradient of {name}, so that the step cannot be "
                    "repeated: wanted what sets all gradients of the model to zero or None"
                )


class RepeatedSteps(Steps):
    """Runs the steps of a PyTorch loop, each a second time if its rows did not fit.

    A step is a function that computes gradients, of one batch or of several::

        steps = RepeatedSteps(model, optimizer.zero_grad)
        for batch in batches:
            loss = steps.run(train_step, batch)  # forwards and backwards
            optimizer.step()

    Layers need a ``row_bound``. After each step the host waits until all ranks of the job have
    agreed. The second time buffers are exact, and then bounds become a tenth more than what was
    needed. Buffers of the model, generators that its modules have in attributes or lists, those of
    Python, NumPy and torch, and the scales of FP8 that Transformer Engine takes from earlier steps
    are put back, so that the optimizer sees what it would see with a larger bound. What else a step
    changes, such as a sum of losses that are logged, belongs after it. CUDA graphs that the
    program has captured of its layers keep their bound: a step that replays one ends with the error
    when it is repeated.

    Args:
        model: The module whose buffers, generators and scales are put back.
        zero_grad: Sets all gradients to zero; it is called before every step, so that gradients of
            several steps are no sum.

    Raises:
        ConfigError: ``model`` is no module, is an engine of DeepSpeed, has layers that are for one,
            or parameters whose gradients ZeRO keeps elsewhere; ``zero_grad`` is no function.
    """

    def __init__(self, model: nn.Module, zero_grad: Callable[[], object]) -> None:
        super().__init__()
        check_class("the model", model, nn.Module, "a torch.nn.Module")
        if not callable(zero_grad):
            raise ConfigError(f"zero_grad is a {type(zero_grad).__name__}, wanted a function")
        self._given, self._zero_grad = model, zero_grad
        self._check()

    @property
    def _model(self) -> nn.Module:
        return self._given

    def _check(self) -> None:
        way_out = (
            "zero_grad cannot drop: wanted a module of PyTorch, or repeated_steps(engine) of "
            "flashmoe_megatron.deepspeed"
        )
        for module in self._model.modules():
            if _is_of_deepspeed(module):
                raise ConfigError(
                    f"model has DeepSpeed's {type(module).__name__}, whose averaged gradients "
                    f"{way_out}"
                )
        for name, parameter in self._model.named_parameters():
            if any(hasattr(parameter, attribute) for attribute in _OF_ZERO):
                raise ConfigError(
                    f"model's parameter {name} is ZeRO's of DeepSpeed, whose averaged gradients "
                    f"{way_out}"
                )

    def _save(self) -> Saved:
        return Saved(self._model.modules())

    def _drop_gradients(self) -> None:
        self._zero_grad()


_OF_ZERO = "_hp_mapping", "ds_id"
"""Attributes that ZeRO sets on parameters: stages 1 and 2 the first, stage 3 the second."""


def _is_of_deepspeed(module: nn.Module) -> bool:
    """Tells whether a module is an engine of DeepSpeed, or a layer that only an engine trains."""
    names = "deepspeed.", "flashmoe_megatron.adapters.deepspeed."
    return any(base.__module__.startswith(names) for base in type(module).__mro__)


def _find_faults() -> None:
    """Finds what launches have found that no call has raised. Not collective."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    raise_faults()


def raise_faults() -> None:
    """Raises what launches have found that no call has raised, or puts it off. Not collective."""
    for backend in living_backends():
        try:
            backend.raise_pending_fault()
        except FlashMoEError as error:
            if not ATTEMPTS.put_off(error):
                raise
