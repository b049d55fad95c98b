"""Rows that a forward on the kernel keeps, or the tokens that its backward reads in their place."""

from typing import Any

import pytest
import torch

from flashmoe_megatron.config import KEEPS, MoEConfig
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.kernel.backend import KernelBackend, SavedForward
from flashmoe_megatron.weights import ExpertWeights
from tests.unit import cases
from tests.unit.simulated_gpus import Gpus, Library, install, make_backend

OPTIONS = ("auto", *KEEPS)
READS = {
    "several": (bindings.READS_NO_TOKENS, bindings.READS_NO_TOKENS),
    "narrow": (bindings.READS_TOKENS, bindings.READS_TOKENS),
    "wider": (bindings.READS_TOKENS, bindings.COPIES_TOKENS),
    "wide": (bindings.READS_NO_TOKENS, bindings.COPIES_TOKENS),
}
"""Answers of the library for a forward and a backward, on several ranks and for experts on one."""


def forward(
    monkeypatch: pytest.MonkeyPatch,
    config: MoEConfig,
    tokens: torch.Tensor,
    *,
    keep: str = "auto",
    row_bound: float | None = None,
    training: bool = True,
    **arguments: Any,
) -> tuple[KernelBackend, Any]:
    """Runs a forward on a simulated GPU; returns its backend and what it has saved."""
    gpus = Gpus(1, 0, slow=0)
    install(gpus, monkeypatch)
    backend = make_backend(config, 0, keep=keep, row_bound=row_bound)
    chosen = torch.arange(config.topk).repeat(len(tokens), 1)
    num = config.num_experts
    weights = ExpertWeights(
        (torch.zeros(num, config.fc1_rows, config.hidden, dtype=torch.bfloat16),),
        (torch.zeros(num, config.hidden, config.intermediate, dtype=torch.bfloat16),),
    )
    probs = torch.ones(chosen.shape)
    saved = backend.forward(tokens, probs, chosen, weights, training=training, **arguments)[1]
    gpus.wait(0)
    return backend, saved


def kept(
    monkeypatch: pytest.MonkeyPatch,
    keep: str,
    *,
    which: str,
    **arguments: Any,
) -> tuple[bool, bool]:
    """Tells whether a forward has kept rows, and whether it has kept tokens."""
    monkeypatch.setattr(Library, "reads_tokens", READS[which])
    config = cases.make_config(num_ranks=1)
    tokens = torch.ones(4, config.hidden, dtype=torch.bfloat16)
    backend, saved = forward(monkeypatch, config, tokens, keep=keep, **arguments)
    assert backend.reads_tokens == (which != "several")
    assert isinstance(saved, SavedForward)
    assert saved.x is None or saved.x is tokens
    return saved.rows is not None, saved.x is not None


@pytest.mark.parametrize("keep", OPTIONS)
@pytest.mark.parametrize("which", READS)
def test_tokens_are_kept_in_place_of_rows(
    which: str, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "inputs" it is a forward that a backward runs again."""
    lean = keep == "preactivations" or (keep == "auto" and which != "several")
    assert kept(monkeypatch, keep, which=which) == (not lean, lean)


@pytest.mark.parametrize("keep", OPTIONS)
@pytest.mark.parametrize("which", READS)
def test_rows_for_factors_are_kept(which: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a backward would have to fetch them, as "preactivations" asks for."""
    fetches = keep == "preactivations"
    assert kept(monkeypatch, keep, which=which, gives_rows=True) == (not fetches, fetches)


@pytest.mark.parametrize("keep", OPTIONS)
@pytest.mark.parametrize("which", READS)
def test_frozen_experts_keep_neither(
    which: str, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept(monkeypatch, keep, which=which, trains_fc1=False) == (False, False)


@pytest.mark.parametrize("receives", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_an_evaluation_needs_one_allocation_and_its_output(
    training: bool, receives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, too, live no longer than its scratch; a training's do."""
    made: list[Any] = []
    make, sizes_of = KernelBackend._make_buffers, Library._sizes

    def note(*given: Any, **options: Any) -> Any:
        made.append(make(*given, **options))
        return made[-1]

    def sizes_that_say(library: Library, problem: Any, sizes: Any) -> int:
        status = sizes_of(library, problem, sizes)
        sizes._obj.reads_tokens[False] = not receives
        sizes._obj.scratch_block_bytes[:] = 512, 1024
        return status

    monkeypatch.setattr(KernelBackend, "_make_buffers", note)
    monkeypatch.setattr(Library, "_sizes", sizes_that_say)
    config = cases.make_config(num_ranks=1)
    tokens = torch.ones(4, config.hidden, dtype=torch.bfloat16)
    backend, _ = forward(
        monkeypatch, config, tokens, row_bound=2.0, training=training, keep="preactivations"
    )
    (buffers,) = made
    sizes, blocks = backend._sizes, backend._bounds[training]
    row_bytes = blocks * sizes.row_block_bytes if receives else 0
    scratch_bytes = blocks * sizes.scratch_block_bytes[False]
    if training:
        assert buffers.plan.nbytes == sizes.plan_bytes
        assert buffers.scratch.nbytes == scratch_bytes
        assert (0 if buffers.rows is None else buffers.rows.nbytes) == row_bytes
        assert not buffers.rows_at
    else:
        assert buffers.scratch is buffers.rows is None
        assert buffers.plan.nbytes == sizes.plan_bytes + scratch_bytes + row_bytes
        assert buffers.rows_at == (sizes.plan_bytes + scratch_bytes if receives else 0)
