"""Holds what one wrapped function of Megatron has to know of another: which call is running.

A backward computes the gradients of fc2's weights before those of fc1's, in one launch. With
``--overlap-grad-reduce`` Megatron starts a bucket's collective in the hook of the last parameter to
get its gradient, after all that the compute stream has by then: that whole launch. Where all that
is new in a bucket is of fc2, the collective is started after fc2's gradients alone.
"""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from flashmoe_megatron.call import Backend

_EARLY = "flashmoe_early_in"
"""Attribute of a parameter: the last backward that may complete its gradient before it ends."""
_LATE = "flashmoe_late_in"
"""Attribute of a bucket group: the last backward that had to end before it had a gradient."""
_IS_FOREIGN = "flashmoe_is_foreign"
"""Attribute of a bucket group: Megatron's hooks have added gradients to it themselves."""


class Buckets:
    """The state of this process, where one function of Megatron's DDP runs at a time.

    Attributes:
        ``told``: The bucket group that Megatron notifies of a gradient, ``None`` between gradients.
        is_early: That group's collective may start after fc2's gradients alone.
        is_script: Megatron's script builds a model, and gives buckets a size if the user has
            chosen none.
        is_planned: A reduction has been planned for the model that is being wrapped.
    """

    def __init__(self) -> None:
        self.told: Any = None
        self.is_early = False
        self.is_script = False
        self.is_planned = False
        self._number = 0
        self._backend: Backend | None = None

    def note_backward(self, backend: Backend, fc2_in_main_grad: Sequence[torch.Tensor]) -> None:
        """Notes a layer's backward that has been launched, before its parameters' hooks run.

        It adds the gradients of the given weights of fc2 to main_grad.
        """
        self._number, self._backend = self._number + 1, backend
        for weight in fc2_in_main_grad:
            if not _adds_zeros(weight):
                setattr(weight, _EARLY, self._number)

    def fc2_alone(self, group: Any) -> AbstractContextManager[object]:
        """Makes a collective that starts within wait for fc2's gradients alone, if it may."""
        early = None
        if group is self.told and self.is_early and self._backend is not None:
            early = self._backend.early_fc2_grads()
        return early or contextlib.nullcontext()

    def may_be_early(self, group: Any, param: torch.Tensor) -> bool:
        """Tells whether a bucket group that now gets a gradient can do without the backward's end.

        Gradients that launches added to main_grad before that backward are complete when it begins
        to compute its own; any that came since, other than the early ones, are as late as its end.
        What hooks add is on the stream on which DDP was made, which no launch waits for.
        """
        if not getattr(param, "grad_added_to_main_grad", False) or _adds_zeros(param):
            setattr(group, _IS_FOREIGN, True)
        if not group.is_last_microbatch:  # Megatron starts none, and a hook comes for each weight
            return False
        if getattr(param, _EARLY, 0) != self._number:
            setattr(group, _LATE, self._number)
            return False
        # Several instances of the distributed optimizer reduce on a stream of their own, which
        # waits for the compute stream; and sums in float32 are made when the collective is waited
        # for.
        config = group.ddp_config
        return bool(
            not getattr(group, _IS_FOREIGN, False)
            and getattr(group, _LATE, 0) != self._number
            and config.num_distributed_optimizer_instances == 1
            and not getattr(config, "reduce_scatter_with_fp32_accumulation", False)
        )


BUCKETS = Buckets()
"""The state of this process."""


def _adds_zeros(param: torch.Tensor) -> bool:
    """Tells whether Megatron's hook adds autograd's zeros to the gradient that a launch added."""
    return bool(getattr(param, "zero_out_wgrad", False))
