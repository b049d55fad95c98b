"""A batch of a DeepSpeed engine whose rows do not fit is repeated, and nothing shows it."""

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from flashmoe_megatron import RepeatedSteps
from flashmoe_megatron.attempts import ATTEMPTS
from tests.deepspeed.harness import TAG, Case, build
from tests.deepspeed.models import HIDDEN
from tests.distributed import RankPool, refusal

TOKENS, BATCHES = 600, 4
CROWDED = 1, 3
"""Batches whose tokens are nearly the same one, so that nearly all choose one rank's experts."""
NATIVE: dict[str, Any] = {"k": 1, "drop_tokens": False, "noisy_gate_policy": "RSample"}
OVERLAP = {"zero_optimization": {"stage": 2, "overlap_comm": True}}
CASES = {
    "zero0": Case(model=NATIVE),
    "zero1": Case(model=NATIVE, zero=1, micro_batches=2),
    "zero2_overlap": Case(model=NATIVE, zero=2, config=OVERLAP, micro_batches=2),
    "zero2_bf16_sums_in_float32": Case(
        model=NATIVE,
        zero=2,
        config={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        micro_batches=2,
    ),
    "zero2_fp16": Case(model=NATIVE, zero=2, config={"fp16": {"enabled": True}}),
    "zero0_bf16": Case(model=NATIVE, config={"bf16": {"enabled": True}}),
    "checkpointing": Case(model={**NATIVE, "checkpointing": True}, zero=2),
    "autoep_zero2": Case(family="autoep", zero=2),
}


def train(group: dist.ProcessGroup, case: Case, row_bound: float, folder: str) -> dict[str, Any]:
    """Trains with dropout, and saves a checkpoint."""
    from flashmoe_megatron.deepspeed import repeated_steps

    ATTEMPTS.blocks = 0
    case = dataclasses.replace(case, settings={"row_bound": row_bound})
    engine = build(case, fused=True)
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)
    steps = repeated_steps(engine)
    losses, trained = [], []

    def step(micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        found = []
        for number, (x, y) in enumerate(micro_batches):
            if number:
                engine.step()
            noise = 0.1 * (random.random() + np.random.rand())
            loss = engine(nn.functional.dropout(x, 0.1) * (1 + noise), y)
            engine.backward(loss)
            found.append(float(loss))
        return found

    for number in range(BATCHES):
        losses += steps.run(step, list(_micro_batches(case, number)))
        engine.step()
        trained.append((engine.global_steps, engine.micro_steps, engine.skipped_steps))
    engine.save_checkpoint(folder, tag=TAG)
    fused = [one.flashmoe.experts for one in engine.module.modules() if hasattr(one, "flashmoe")]
    return {
        "losses": losses,
        "trained": trained,
        "counted": [(one.num_calls, one.num_tokens) for one in fused],
        "drawn": [torch.rand(3), random.random(), float(np.random.rand())],
        "repeats": steps.num_repeats,
    }


def _micro_batches(case: Case, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = next((names[key] for key in case.config if key in names), torch.float32)
    drawn = torch.Generator().manual_seed(number)
    for _ in range(case.micro_batches):
        x, y = (torch.randn(TOKENS, HIDDEN, generator=drawn) for _ in range(2))
        if number in CROWDED:
            x = 3 * x[:1] + 0.01 * x
        y = y + dist.get_rank()
        yield x.to(dtype), y.to(dtype)


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All tensors and numbers of a checkpoint but the configuration, by their names."""
    if type(value).__name__.endswith("LossScaler"):
        value = vars(value)
    if isinstance(value, torch.Tensor | int | float):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key != "ds_config":
                yield from tensors(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from tensors(each, f"{name}[{number}]")


def read(folder: Path) -> dict[str, Any]:
    return {
        name: value
        for file in sorted(folder.rglob("*.pt"))
        for name, value in tensors(torch.load(file, weights_only=False), file.name)
    }


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_behind_repeats_equals_one_of_a_larger_bound(
    name: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    """Losses, generators, counts, and every tensor that is saved."""
    outcomes = {
        bound: two_ranks.run(train, CASES[name], bound, str(tmp_path / str(bound)))
        for bound in (2.0, 1.0)
    }
    for holds, overflows in zip(outcomes[2.0], outcomes[1.0], strict=True):
        assert holds.pop("repeats") == 0
        assert overflows.pop("repeats") >= 1
        drawn, other = holds.pop("drawn"), overflows.pop("drawn")
        assert torch.equal(drawn[0], other[0])
        assert drawn[1:] == other[1:]
        assert holds == overflows
    saved, other = read(tmp_path / "2.0"), read(tmp_path / "1.0")
    assert saved.keys() == other.keys()
    assert sum(isinstance(one, torch.Tensor) for one in saved.values()) > 10
    for key, value in saved.items():
        same = torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]
        assert same, key


REFUSED = {
    "module": r"parameter weight is ZeRO's of DeepSpeed.*wanted .*repeated_steps\(engine\)",
    "layers": "model has DeepSpeed's MoE",
    "stage 3": "ZeRO stage 3 keeps gradients in partitions",
    "offload": "offload_optimizer keeps gradients in the memory of the host",
    "muon": "Muon changes momenta in a backward",
    "within": "micro-batch 1, within a batch of 2: wanted run before the first forward",
    "last step": r"engine.step\(\) of the last micro-batch was called within the function",
    "half": "ended within a batch of 2 micro-batches",
}


def refused(group: dist.ProcessGroup, wrong: str) -> None:
    from flashmoe_megatron.deepspeed import repeated_steps

    case = Case(model=NATIVE, zero=2, micro_batches=2)
    if wrong == "stage 3":
        case = Case(family="autoep", zero=3)
    engine = build(case, fused=True)
    batch = next(_micro_batches(case, 0))
    if wrong == "module":
        RepeatedSteps(engine.module.head, engine.optimizer.zero_grad)
    if wrong == "layers":
        RepeatedSteps(engine.module, engine.optimizer.zero_grad)
    if wrong == "offload":
        engine.optimizer.cpu_offload = True
    if wrong == "muon":
        engine.optimizer.optimizer.param_groups[0]["use_muon"] = True

    def step(number: int, *, ends: bool) -> None:
        for _ in range(number):
            engine.backward(engine(*batch))
            if ends:
                engine.step()

    if wrong == "within":
        step(1, ends=True)
    repeated_steps(engine).run(step, 1 if wrong == "half" else 2, ends=wrong == "last step")


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_cannot_be_repeated_is_refused_by_name(wrong: str, two_ranks: RankPool) -> None:
    for said in two_ranks.run(refusal, refused, wrong):
        assert said.startswith("ConfigError")
        assert re.search(REFUSED[wrong], said), said
