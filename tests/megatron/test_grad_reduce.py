"""Which of Megatron's collectives may start behind fc2's gradients alone, in real training runs."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.separate.reference import ReferenceBackend
from tests.distributed import RankPool
from tests.megatron.harness import Case, Layout, prepare, train

EP2 = EP2_DP2 = Layout(expert=2)
FC1, FC2 = (128, 64), (64, 64)  # an expert's weights; other parameters have their own buckets

Started = list[tuple[bool, set[tuple[int, ...]]]]


def early_collectives(group: dist.ProcessGroup, case: Case) -> tuple[Started, list[float]]:
    """Trains with a backend whose fc2 gradients are early.

    Returns:
        Whether each collective over gradients of experts was started as an early one, with the
        shapes of its parameters; and the losses.
    """
    prepare(case.layout)
    from megatron.core.distributed import param_and_grad_buffer

    is_early = False
    started: Started = []

    @contextlib.contextmanager
    def early() -> Iterator[None]:
        nonlocal is_early
        is_early = True
        yield
        is_early = False

    bucket_group = param_and_grad_buffer._ParamAndGradBucketGroup
    start = bucket_group.start_grad_sync

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not all(getattr(param, "allreduce", True) for param in self.params):
            started.append((is_early, {tuple(param.shape) for param in self.params}))
        return start(self, *args, **kwargs)

    with (
        patch.object(ReferenceBackend, "early_fc2_grads", lambda backend: early()),
        patch.object(bucket_group, "start_grad_sync", start_grad_sync),
    ):
        return started, train(group, case, True).losses


def case_of(**ddp: Any) -> Case:
    settings = {"overlap_grad_reduce": True, "bucket_size": 1, **ddp}
    return Case(EP2_DP2, ddp=settings, fuse_main_grad=True)


def test_buckets_of_fc2_are_reduced_early(four_ranks: RankPool) -> None:
    plain = four_ranks.run(train, case_of(), True)
    for (started, losses), want in zip(
        four_ranks.run(early_collectives, case_of()), plain, strict=True
    ):
        assert losses == want.losses
        # In the first iteration Megatron counts what comes, and reduces at its end.
        assert {shape for early, (shape,) in started if early} == {FC2}
        assert {early for early, shapes in started if shapes == {FC1}} == {False}
        num_fc2 = 2 * 4  # layers, local experts
        assert sum(early for early, _ in started) == (case_of().steps - 1) * num_fc2


@pytest.mark.parametrize(
    "ddp",
    [{"bucket_size": 10_000}, {"overlap_grad_reduce": False}],
    ids=["buckets that fc1 shares", "nothing overlaps"],
)
def test_others_are_not(ddp: dict[str, Any], four_ranks: RankPool) -> None:
    for started, _ in four_ranks.run(early_collectives, case_of(**ddp)):
        assert started
        assert not any(early for early, _ in started)


def may_be_early_after_each(group: dist.ProcessGroup) -> list[bool]:
    """Asks of bucket groups of two layers' fc2 and of something else, gradient after gradient."""
    prepare(EP2)
    from megatron.core.distributed import DistributedDataParallelConfig

    from flashmoe_megatron.adapters.megatron.buckets.state import Buckets

    class Group:
        is_last_microbatch = True

        def __init__(self) -> None:
            self.ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True)

    first, second, other, zeroed, added = (torch.nn.Parameter(torch.zeros(1)) for _ in range(5))
    for parameter in (first, second, other, zeroed):
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    zeroed.zero_out_wgrad = True  # type: ignore[attr-defined]
    backend: Any = None
    buckets = Buckets()
    answers = []

    def ask(parameter: torch.Tensor, bucket_group: Any) -> None:
        answers.append(buckets.may_be_early(bucket_group, parameter))

    group_of_two = Group()
    buckets.note_backward(backend, [first])
    ask(first, group_of_two)
    ask(other, group_of_two)  # came after the launch: now the group is as late as its end
    ask(first, group_of_two)
    buckets.note_backward(backend, [second, zeroed])
    ask(second, group_of_two)  # all that was late was of the backward before
    group_of_two.ddp_config.num_distributed_optimizer_instances = 2
    ask(second, group_of_two)
    group_of_two.ddp_config.num_distributed_optimizer_instances = 1
    ask(second, group_of_two)
    # Sums in float32 are made when the collective is waited for, on another stream. Newer versions
    # of Megatron-Core have the field.
    group_of_two.ddp_config.reduce_scatter_with_fp32_accumulation = True  # type: ignore[attr-defined]
    ask(second, group_of_two)
    for by_hook in (added, zeroed):  # Megatron adds to these itself, on another stream
        mixed = Group()
        ask(by_hook, mixed)
        ask(second, mixed)
        buckets.note_backward(backend, [second])
        ask(second, mixed)
    between = Group()
    between.is_last_microbatch = False
    ask(second, between)
    ask(added, between)
    between.is_last_microbatch = True
    ask(second, between)  # what Megatron has added in the micro-batch before is not forgotten
    return answers


def test_a_gradient_that_came_since_makes_a_bucket_late(two_ranks: RankPool) -> None:
    want = [True, False, False, True, False, True, False, *[False] * 9]
    assert two_ranks.run(may_be_early_after_each) == [want, want]
