"""Trains a model with a framework's own experts and with flashmoe's, and compares the two.

A framework brings a function that trains in the ranks of a pool, ``train(group, case, is_fused)``,
and :class:`Framework` runs it with both kinds of experts. A framework that wants a process of its
own brings a program instead, which notes each training by :func:`note`, the one with the
framework's own experts first; :func:`compare_noted` reads them. Both ways end in
:func:`assert_same`.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankPool

OWN, FUSED = "own", "flashmoe"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of one training that all frameworks share; each adds its own.

    Attributes:
        steps: Optimizer steps.
        micro_batches: Micro-batches of a step on each rank.
        settings: Flashmoe's options.
        hosts: How many hosts the ranks belong to, in blocks.
        save_to: The folder for a checkpoint after the last step.
        load_from: The folder of the checkpoint that the training goes on from.
        first_step: The number of its first step.
    """

    steps: int = 3
    micro_batches: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    hosts: int = 1
    save_to: str | None = None
    load_from: str | None = None
    first_step: int = 0


@dataclass
class Outcome:
    """Results of a training on one rank; a framework leaves out what it does not tell.

    Attributes:
        losses: The loss of each step; none on ranks without the last pipeline stage.
        eval_losses: Losses of an evaluation after the last step.
        grad_norms: Norms of all gradients, of each step that was not skipped.
        skipped: For each step, whether its gradients were too large for float16.
        gradients: Gradients of the first step by parameter, reduced over the ranks; an optimizer
            hides how large they are.
        parameters: The parameters after the last step.
        layers: By the name of a MoE layer, the class or word for what computes it.
        calls: How often each fused layer was called.
        keeps: What the fused layers' backends keep for their backwards.
        over_hosts: Whether these backends connect hosts.
    """

    losses: list[float]
    eval_losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)
    keeps: set[str] = field(default_factory=set)
    over_hosts: bool = False


@dataclass(frozen=True)
class Tolerance:
    """Largest relative distances of flashmoe's training; tensors are judged by their norms.

    A tensor is not compared where its distance may be infinite.
    """

    losses: float
    gradients: float
    parameters: float


@dataclass(frozen=True)
class Framework:
    """A framework's way to train in a pool of ranks.

    Attributes:
        train: The function, which returns a rank's :class:`Outcome`.
        serves: The value in ``Outcome.layers`` of a layer that flashmoe computes.
        tolerance: The usual distance of both trainings.
        determined: Takes a parameter's name and value and returns the part that the losses
            determine.
    """

    train: Callable[[dist.ProcessGroup, Any, bool], Outcome]
    serves: str
    tolerance: Tolerance
    determined: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, parameter: parameter

    def compare(
        self, pool: RankPool, case: Training, tolerance: Tolerance | None = None
    ) -> list[tuple[Outcome, Outcome]]:
        """Trains with both kinds of experts, checks every rank, and returns both outcomes."""
        both = [pool.run(self.train, case, is_fused) for is_fused in (False, True)]
        pairs = list(zip(*both, strict=True))
        for own, fused in pairs:
            self.check(own, fused, case, tolerance)
        return pairs

    def check(
        self, own: Outcome, fused: Outcome, case: Training, tolerance: Tolerance | None = None
    ) -> None:
        """Fails unless flashmoe has computed each layer as the case says, and nothing differs."""
        assert own.calls == []
        assert self.serves not in own.layers.values()
        assert fused.calls
        assert all(fused.calls)
        assert set(fused.layers.values()) == {self.serves}
        assert fused.keeps == {case.settings.get("keep", "all")}
        assert fused.over_hosts == (case.hosts > 1)
        assert_same(fused, own, tolerance or self.tolerance, self.determined)

    def save(
        self, pool: RankPool, case: Training, after: int, folder: Path, *, is_fused: bool
    ) -> list[Outcome]:
        """Makes the first steps of a case, and saves a checkpoint after them."""
        begin = replace(case, steps=after, save_to=str(folder))
        return pool.run(self.train, begin, is_fused)

    def compare_resumed(
        self, pool: RankPool, case: Training, after: int, folder: Path, *, is_fused: bool
    ) -> None:
        """Fails unless a training from a checkpoint is the rest of one without interruption."""
        rest = replace(case, steps=case.steps - after, first_step=after, load_from=str(folder))
        whole, resumed = (pool.run(self.train, one, is_fused) for one in (case, rest))
        for want, got in zip(whole, resumed, strict=True):
            assert bool(got.calls) == is_fused
            wanted = replace(
                want,
                losses=want.losses[after:],
                grad_norms=want.grad_norms[after:],
                skipped=want.skipped[after:],
                gradients=got.gradients,  # each begins with another step
            )
            assert_same(got, wanted, self.tolerance, self.determined)


def assert_same(
    got: Outcome,
    want: Outcome,
    tolerance: Tolerance,
    determined: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, parameter: parameter,
) -> None:
    """Fails unless losses, skipped steps, gradients and parameters agree."""
    assert got.losses == pytest.approx(want.losses, rel=tolerance.losses)
    assert got.eval_losses == pytest.approx(want.eval_losses, rel=tolerance.losses)
    assert got.skipped == want.skipped
    assert got.grad_norms == pytest.approx(want.grad_norms, rel=tolerance.gradients)
    for mine, others, most in (
        (got.gradients, want.gradients, tolerance.gradients),
        (got.parameters, want.parameters, tolerance.parameters),
    ):
        assert mine.keys() == others.keys()
        for name, tensor in mine.items() if most < math.inf else ():
            exact = determined(name, others[name]).float()
            error = torch.linalg.vector_norm(determined(name, tensor).float() - exact)
            scale = torch.linalg.vector_norm(exact)
            assert error <= most * scale, f"{name}: off by {error / scale:.2e} of its norm"


def note(out: Path, training: str, experts: str, losses: list[float], **more: Any) -> None:
    """Appends a training to a program's file, as a line of JSON; only rank 0 writes.

    Args:
        out: The file.
        training: A name of the model and of how it is trained, equal for both kinds of experts.
        experts: :data:`OWN` or :data:`FUSED`.
        losses: Losses of all steps and ranks.
        **more: Further results.
    """
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    record = {"training": training, "experts": experts, "losses": losses, **more}
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")


def compare_noted(
    out: Path, wanted: Mapping[str, float]
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Compares the trainings that a program has noted.

    Args:
        out: The program's file.
        wanted: The trainings in their order, and how far losses may be apart in each.

    Returns:
        By training, the records with the framework's own experts and with flashmoe's.
    """
    records = [json.loads(line) for line in out.read_text().splitlines()]
    found = [(record["training"], record["experts"]) for record in records]
    assert found == [(name, experts) for name in wanted for experts in (OWN, FUSED)]
    pairs = dict(zip(wanted, zip(records[::2], records[1::2], strict=True), strict=True))
    for name, (own, fused) in pairs.items():
        assert len(set(own["losses"])) >= 3, f"{name}: nothing is learned"
        limit = wanted[name]
        most = Tolerance(losses=limit, gradients=limit, parameters=limit)
        assert_same(Outcome(fused["losses"]), Outcome(own["losses"]), most)
    return pairs
