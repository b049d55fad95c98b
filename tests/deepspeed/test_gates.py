"""Gates in the place of DeepSpeed's, beside its own where that computes the same."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import gates
from flashmoe_megatron.adapters.deepspeed.settings import Settings
from flashmoe_megatron.errors import ConfigError
from tests.deepspeed.harness import DEEPSPEED, Case, build, prepare, train
from tests.deepspeed.models import HIDDEN, NativeModel
from tests.distributed import RankPool, refusal
from tests.side_by_side import assert_same

NO_DROP = {"k": 2, "drop_tokens": False}


@pytest.mark.parametrize("zero", [0, 2])
def test_gshard_that_tries_all_second_choices_trains_as_deepspeeds_top2(
    zero: int, two_ranks: RankPool
) -> None:
    model = {**NO_DROP, "top2_2nd_expert_sampling": False}
    case = Case(model=model, zero=zero, micro_batches=2)
    own = two_ranks.run(train, case, False)
    ours = two_ranks.run(train, dataclasses.replace(case, settings={"gate": "gshard"}), True)
    for want, got in zip(own, ours, strict=True):
        assert set(got.layers.values()) == {DEEPSPEED.serves}
        assert_same(got, want, DEEPSPEED.tolerance)


@pytest.mark.parametrize("name", ["gshard", "sigmoid", "xmoe"])
def test_a_gate_chooses_and_balances_as_that_of_plain_pytorch(
    name: str, two_ranks: RankPool
) -> None:
    two_ranks.run(compare_gate, name)


def compare_gate(group: dist.ProcessGroup, name: str) -> None:
    model = {"k": 2, "capacity_factor": 0.7, "min_capacity": 1} if name == "gshard" else NO_DROP
    engine = build(Case(model=model, settings={"gate": name}), fused=True)
    layer = next(one for one in engine.module.modules() if hasattr(one, "flashmoe"))
    ours, num_experts = layer.gate.train(), layer.num_local_experts * layer.ep_size
    gate: gates.Gate = {
        "gshard": lambda: gates.GShardGate(HIDDEN, num_experts, capacity_factor=0.7),
        "sigmoid": lambda: gates.SigmoidGate(HIDDEN, num_experts, topk=2),
        "xmoe": lambda: gates.XMoEGate(HIDDEN, num_experts, topk=2),
    }[name]()
    with torch.no_grad():
        if name == "xmoe":
            gate.projection.copy_(ours.wg.weight)
            gate.embeddings.copy_(ours.embeddings)
            gate.temperature.copy_(ours.temperature[0])
        else:
            gate.weight.copy_(ours.wg.weight)
    tokens = torch.randn(40, HIDDEN)
    used = torch.arange(40) % 4 > 0
    torch.manual_seed(3)
    loss, _, _, indices, _, weights, counts = ours(tokens, used.long(), True)
    torch.manual_seed(3)
    want = gate(tokens[used])
    assert torch.equal(indices.t()[used].long(), want.topk_idx)
    torch.testing.assert_close(weights.t()[used], want.topk_weight)
    assert bool((indices.t()[~used] == -1).all())
    assert not weights.t()[~used].any()
    assert float(loss) == pytest.approx(float(want.aux_loss), rel=1e-5)
    assert int(counts.sum()) == int(want.logs["load"].sum() + want.logs["dropped"])
    assert bool(want.logs["dropped"]) == (name == "gshard")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("gate", ["gshard", "xmoe"])
def test_a_gate_that_is_computed_again_chooses_the_same(
    gate: str, reentrant: bool, two_ranks: RankPool
) -> None:
    """The second choices that GShard draws, too."""
    case = Case(model=NO_DROP, zero=2, micro_batches=2, settings={"gate": gate})
    kept = two_ranks.run(train, case, True)
    model = {**NO_DROP, "checkpointing": True, "reentrant": reentrant}
    again = two_ranks.run(train, dataclasses.replace(case, model=model), True)
    for want, got in zip(kept, again, strict=True):
        assert_same(got, want, DEEPSPEED.tolerance)
        assert sum(got.calls) > sum(want.calls)


@pytest.mark.parametrize("zero", [1, 2])
def test_xmoe_is_trained_saved_and_loaded(zero: int, two_ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    case = Case(model=NO_DROP, zero=zero, settings={"gate": "xmoe"}, steps=4)
    whole = two_ranks.run(train, case, True)
    two_ranks.run(train, dataclasses.replace(case, steps=2, save_to=folder), True)
    rest = dataclasses.replace(case, steps=2, first_step=2, load_from=folder)
    resumed = two_ranks.run(train, rest, True)
    for want, got in zip(whole, resumed, strict=True):
        assert got.losses == pytest.approx(want.losses[2:], rel=1e-5)
        for name in ("gate.wg.weight", "gate.embeddings", "gate.temperature"):
            full = next(one for one in want.parameters if one.endswith(name))
            torch.testing.assert_close(got.parameters[full], want.parameters[full])
            assert want.gradients[full].any(), full
    for full in (one for one in whole[0].parameters if ".gate." in one):
        assert torch.equal(whole[0].parameters[full], whole[1].parameters[full]), full


@pytest.mark.parametrize(
    ("gate", "model", "words"),
    [
        ("gshard", {"k": 1}, "flashmoe.gate is 'gshard', k is 1; wanted 2, or wanted \"router\""),
        ("sigmoid", {"k": 2}, "drop_tokens is True, and this gate has no capacity"),
        ("xmoe", {**NO_DROP, "noisy_gate_policy": "RSample"}, "policy is 'RSample'; wanted None"),
    ],
)
def test_what_a_gate_would_not_follow_is_refused(
    gate: str, model: dict[str, Any], words: str, two_ranks: RankPool
) -> None:
    for error in two_ranks.run(refusal, train, Case(model=model, settings={"gate": gate}), True):
        assert words in error


def test_parameters_that_were_listed_before_are_refused(two_ranks: RankPool) -> None:
    for error in two_ranks.run(listed_before):
        assert "wanted model_parameters=model.parameters()" in error


def listed_before(group: dist.ProcessGroup) -> str:
    prepare()
    from flashmoe_megatron.adapters.deepspeed.gates import put_gates

    model = NativeModel(ep_sizes=(2,), **NO_DROP)
    given = {"model": model, "model_parameters": list(model.parameters())}
    with pytest.raises(ConfigError) as caught:
        put_gates(given, Settings(enabled=True, gate="xmoe"))
    return str(caught.value)


def test_gates_that_see_later_tokens_and_a_fallback_are_refused() -> None:
    with pytest.raises(ConfigError, match="flashmoe.gate is 'soft', .* depend on later tokens"):
        Settings(enabled=True, gate="soft")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape('flashmoe.fallback "error"')):
        Settings(enabled=True, gate="xmoe", fallback="warn")
