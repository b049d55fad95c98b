"""Which layers are fused, what is said of the others, and the ways to ask for it."""

import base64
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.deepspeed import changed
from tests.deepspeed.harness import FUSED, Case, batch, build, ds_config, prepare, train_engine
from tests.deepspeed.models import HIDDEN, AutoEPModel, NativeModel
from tests.distributed import RankPool, refusal


@pytest.mark.parametrize("name", [name for name in changed.CHANGES if "as it is" not in name])
def test_refusal_and_fallback(name: str, two_ranks: RankPool) -> None:
    wanted = changed.CHANGES[name][2]
    for message, report, classes, again in two_ranks.run(changed.outcomes, name):
        assert message
        assert re.search(wanted, message), message
        assert 'Set flashmoe.fallback to "warn" to leave them to DeepSpeed' in message
        left_alone = [outcome != FUSED for outcome in report.values()]
        assert any(left_alone)
        assert left_alone == ["Flash" not in name for name in classes]
        assert again == report


def test_autoep_layers_of_older_releases_are_refused(two_ranks: RankPool) -> None:
    """Served with the others since AutoEP's tail is a method of its own."""
    for message, *_ in two_ranks.run(changed.outcomes, "autoep as it is"):
        assert "AutoEP of this release is not known; install DeepSpeed 0.19.7 or newer" in message


def test_tensor_parallel_layers_are_refused(two_ranks: RankPool) -> None:
    for message in two_ranks.run(changed.tensor_parallel):
        assert "tensor-parallel group of size 2, wanted 1" in message


def report_of_partly_fused(group: dist.ProcessGroup) -> tuple[dict[str, str], list[float]]:
    """One of two layers fused, the other DeepSpeed's, and both train."""
    from flashmoe_megatron.deepspeed import attach

    case = Case(zero=2)
    engine = build(case, fused=False)
    changed.tanh(engine)
    engine.config["flashmoe"] = {"enabled": True, "fallback": "warn"}
    report = attach(engine)
    return report, train_engine(engine, case).losses


def test_a_partly_fused_model_trains(two_ranks: RankPool) -> None:
    for report, losses in two_ranks.run(report_of_partly_fused):
        assert [report["moe.0"] == FUSED, report["moe.1"] == FUSED] == [False, True]
        assert losses[-1] < losses[0]


def with_settings(group: dist.ProcessGroup, sections: list[Any], dense: bool = False) -> Any:
    """Initializes with this rank's section; returns the error or the report."""
    prepare()
    from flashmoe_megatron.deepspeed import attach, initialize

    torch.manual_seed(1)
    model = torch.nn.Linear(HIDDEN, HIDDEN) if dense else NativeModel((2, 2))
    config = ds_config(Case(), fused=False)
    section = sections[dist.get_rank() % len(sections)]
    if section is not None:
        config["flashmoe"] = section
    try:
        engine, *_ = initialize(model=model, config=config)
    except ValueError as error:
        return str(error)
    return attach(engine) if section is not None else [type(m).__name__ for m in model.modules()]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([{"enabled": True}, None], r"flashmoe.enabled: True on rank 0, False on rank 1"),
        (
            [{"enabled": True}, {"enabled": True, "max_tokens": 64}],
            r"flashmoe.max_tokens: None on rank 0, 64 on rank 1",
        ),
    ],
)
def test_ranks_have_to_agree(sections: list[Any], message: str, two_ranks: RankPool) -> None:
    for outcome in two_ranks.run(with_settings, sections):
        assert f"the ranks disagree on {message}; wanted one value" in outcome


def attach_with_an_unknown_key(group: dist.ProcessGroup) -> str:
    """Attaches to an engine whose section has a key on the second rank that nobody knows."""
    from flashmoe_megatron.deepspeed import attach

    engine = build(Case(), fused=False)
    unknown = {"degre": 2} if dist.get_rank() == 1 else {}
    engine.config["flashmoe"] = {"enabled": True, **unknown}
    return refusal(group, lambda _: attach(engine))


def test_a_section_that_one_rank_refuses_is_refused_on_every_rank(two_ranks: RankPool) -> None:
    for outcome in two_ranks.run(attach_with_an_unknown_key):
        assert outcome.startswith("ConfigError: rank 1: flashmoe.degre in the DeepSpeed config")


def test_a_model_without_moe_layers_is_said(two_ranks: RankPool) -> None:
    for outcome in two_ranks.run(with_settings, [{"enabled": True}], True):
        assert "the model has no MoE layer of DeepSpeed" in outcome
    for outcome in two_ranks.run(with_settings, [{"enabled": True, "fallback": "warn"}], True):
        assert outcome == {}


def test_not_enabled_leaves_all_to_deepspeed(two_ranks: RankPool) -> None:
    for outcome in two_ranks.run(with_settings, [None]):
        assert outcome.count("MOELayer") == 2
    for outcome in two_ranks.run(with_settings, [{"enabled": False}]):
        assert set(outcome.values()) == {"flashmoe.enabled is false"}


def test_unknown_keys_stop_before_an_engine_is_made(two_ranks: RankPool) -> None:
    for outcome in two_ranks.run(with_settings, [{"enabld": True}]):
        assert "the nearest is flashmoe.enabled" in outcome


def all_forms(group: dist.ProcessGroup, directory: str) -> dict[str, Any]:
    """The configuration in every argument and form that DeepSpeed takes, by the alias too."""
    prepare()
    import deepspeed

    from flashmoe_megatron import deepspeed as door

    section = {**ds_config(Case(), fused=False), "flashmoe": {"enabled": True}}
    path = Path(directory, f"ds_config_{dist.get_rank()}.json")
    path.write_text(json.dumps(section))
    encoded = base64.urlsafe_b64encode(json.dumps(section).encode()).decode()
    alias = ds_config(Case(family="autoep", zero=1), fused=False)
    alias["expert_parallel"]["comm_backend"] = "flashmoe"
    local = dist.get_rank()
    script = SimpleNamespace(deepspeed_config=dict(alias), local_rank=local)
    untouched = json.dumps(alias)
    forms: dict[str, tuple[bool, dict[str, Any]]] = {
        "dict": (False, {"config": section}),
        "path": (False, {"config": str(path)}),
        "base64": (False, {"config": encoded}),
        "config_params": (False, {"config_params": section}),
        "args": (False, {"args": SimpleNamespace(deepspeed_config=str(path), local_rank=local)}),
        "alias": (True, {"config": alias}),
        "alias in args": (True, {"args": script}),
    }
    found: dict[str, Any] = {}
    for name, (is_autoep, arguments) in forms.items():
        model = AutoEPModel() if is_autoep else NativeModel((2, 2))
        engine, *_ = door.initialize(model=model, **arguments)
        found[name] = door.attach(engine)
    assert json.dumps(alias) == untouched
    assert json.dumps(script.deepspeed_config) == untouched
    original = deepspeed.initialize
    door.install()
    door.install()
    assert deepspeed.initialize is not original
    try:
        engine, *_ = deepspeed.initialize(model=NativeModel((2, 2)), config=section)
        found["installed"] = door.attach(engine)
        engine, *_ = door.initialize(model=NativeModel((2, 2)), config=section)
        found["both"] = door.attach(engine)
    finally:
        door.uninstall()
    assert deepspeed.initialize is original
    door.uninstall()
    assert deepspeed.initialize is original
    engine, *_ = deepspeed.initialize(
        model=NativeModel((2, 2)), config=ds_config(Case(), fused=False)
    )
    found["attach"] = door.attach(engine)
    return found


def test_all_ways_to_ask_for_it_and_autoeps_alias(two_ranks: RankPool, tmp_path: Path) -> None:
    for found in two_ranks.run(all_forms, str(tmp_path)):
        assert len(found) == 10
        for name, report in found.items():
            assert list(report.values()) == [FUSED, FUSED], name
        assert list(found["dict"]) == ["moe.0", "moe.1"]
        assert list(found["alias"]) == ["model.layers.0.mlp", "model.layers.1.mlp"]


def unreadable(group: dist.ProcessGroup, config: str) -> str:
    prepare()
    from flashmoe_megatron.deepspeed import initialize

    try:
        initialize(model=NativeModel((2, 2)), config=config)
    except ValueError as error:
        return str(error)
    return ""


def test_an_unreadable_configuration_is_deepspeeds_error(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    for message in two_ranks.run(unreadable, "neither a path nor base64!"):
        assert "Expected a string path to an existing deepspeed config" in message
    twice = tmp_path / "ds_config.json"
    section = '"expert_parallel": {"enabled": true, "comm_backend": "flashmoe"}'
    twice.write_text("{" + f"{section}, {section}" + "}")
    for message in two_ranks.run(unreadable, str(twice)):
        assert "Duplicate keys in DeepSpeed config" in message


def late_forward(group: dist.ProcessGroup, fallback: str) -> str:
    """A layer is added after initialize, and nobody attaches again."""
    case = Case(settings={"fallback": fallback})
    engine = build(case, fused=True)
    changed.late(engine)
    engine.module.moe[2].set_deepspeed_parallelism()
    try:
        engine(*batch(case, 0, torch.float32))
    except ValueError as error:
        return str(error)
    return ""


def test_layers_that_come_later_are_noticed(two_ranks: RankPool) -> None:
    for message in two_ranks.run(late_forward, "error"):
        assert "moe.2: it was added after flashmoe was attached; call attach(engine)" in message
    for message in two_ranks.run(late_forward, "warn"):
        assert message == ""


def hook_later(group: dist.ProcessGroup, family: str) -> None:
    case = Case(family=family, zero=1)
    engine = build(case, fused=True)
    engine(*batch(case, 0, torch.float32))
    fused = next(module for module in engine.module.modules() if hasattr(module, "flashmoe"))
    fused.experts.register_forward_pre_hook(lambda *_: None)
    engine(*batch(case, 1, torch.float32))


@pytest.mark.parametrize("family", ["native", "autoep"])
def test_later_hooks_are_noticed(family: str, two_ranks: RankPool) -> None:
    for told in two_ranks.run(refusal, hook_later, family):
        assert re.search(r"experts \(\w+\) has forward hooks", told)


def hook_on_rank_1(group: dist.ProcessGroup, case: Case) -> str:
    """What a hook on one rank's experts makes of a call; a call without it follows."""
    engine = build(case, fused=True)
    engine(*batch(case, 0, torch.float32))
    fused = next(module for module in engine.module.modules() if hasattr(module, "flashmoe"))
    own = fused.experts if dist.get_rank() == 1 else nn.Module()
    hook = own.register_forward_pre_hook(lambda *_: None)
    told = refusal(group, lambda _: engine(*batch(case, 1, torch.float32)))
    hook.remove()
    engine(*batch(case, 1, torch.float32))
    return told


@pytest.mark.parametrize("family", ["native", "autoep"])
@pytest.mark.parametrize("max_tokens", [None, 24])
def test_a_later_hook_on_one_rank_ends_the_call_on_every_rank(
    family: str, max_tokens: int | None, two_ranks: RankPool
) -> None:
    section = {} if max_tokens is None else {"max_tokens": max_tokens}
    case = Case(family=family, zero=1, settings=section)
    for told in two_ranks.run(hook_on_rank_1, case):
        assert re.match(r"ConfigError: rank 1: experts \(\w+\) has forward hooks", told)


def change_on_rank_1(group: dist.ProcessGroup, family: str) -> list[str]:
    """What changes on one rank make of a call; a call without each follows."""
    case = Case(family=family, zero=1)
    engine = build(case, fused=True)
    fused = next(module for module in engine.module.modules() if hasattr(module, "flashmoe"))
    own = fused.experts if family == "autoep" else fused.experts.deepspeed_experts[0]
    told = []
    for step, (name, value) in enumerate(CHANGES[family]):
        before = getattr(own, name, None)
        if dist.get_rank() == 1:
            setattr(own, name, value)
        told.append(refusal(group, lambda _, s=step: engine(*batch(case, s, torch.float32))))
        setattr(own, name, before)
        engine(*batch(case, step, torch.float32))
    return told


CHANGES: dict[str, list[tuple[str, Any]]] = {
    "native": [("note", 1), ("function", torch.tanh), ("function", torch.relu)],
    "autoep": [("note", 1), ("activation", "swiglu_plus"), ("activation", "geglu_tanh")],
}
"""An attribute that says nothing, one that is not known, and one of another form."""


@pytest.mark.parametrize("family", ["native", "autoep"])
def test_what_experts_hold_later_on_one_rank_ends_the_call_on_every_rank(
    family: str, two_ranks: RankPool
) -> None:
    unknown = {"native": "experts differ from each other|computes none", "autoep": "swiglu_plus"}
    other = {"native": "experts differ from each other", "autoep": "activation of experts"}
    for nothing, first, second in two_ranks.run(change_on_rank_1, family):
        assert nothing == "no error"
        assert re.match(f"ConfigError: rank 1: .*({unknown[family]})", first), first
        assert re.match(f"ConfigError: rank 1: .*({other[family]})", second), second


def autocast_around(group: dist.ProcessGroup, ranks: str) -> None:
    case = Case(config={"bf16": {"enabled": True}})
    engine = build(case, fused=True)
    is_within = str(dist.get_rank()) in ranks
    x = batch(case, 0, torch.float32 if is_within else torch.bfloat16)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_within):
        engine.module.moe[0](x)


@pytest.mark.parametrize("ranks", ["01", "1"])
def test_tokens_that_autocast_left_in_another_dtype_are_refused(
    ranks: str, two_ranks: RankPool
) -> None:
    wanted = r"torch.autocast gives .* in torch.float32 and its experts are torch.bfloat16"
    for told in two_ranks.run(refusal, autocast_around, ranks):
        assert re.search(f"rank [{ranks}]: {wanted}", told)


def too_many_tokens(group: dist.ProcessGroup) -> None:
    case = Case(settings={"max_tokens": 8})
    build(case, fused=True)(*batch(case, 0, torch.float32))


def test_more_tokens_than_said_are_refused(two_ranks: RankPool) -> None:
    wanted = r"24 tokens in one call, .*max_tokens=8 .*set flashmoe.max_tokens to 24 or"
    for told in two_ranks.run(refusal, too_many_tokens):
        assert re.search(wanted, told)


def drops_and_uneven(group: dist.ProcessGroup) -> list[float]:
    """Capacity, and other numbers of tokens on each rank: the stock layer cannot exchange these."""
    case = Case(model={"k": 2, "min_capacity": 1}, tokens=(24, 0), zero=2, steps=5)
    return train_engine(build(case, fused=True), case).losses


def test_ranks_need_not_have_equal_capacities(two_ranks: RankPool) -> None:
    first, _ = two_ranks.run(drops_and_uneven)
    assert first[-1] < first[0]


INSIDES = (
    "flashmoe_megatron.adapters.deepspeed.attach",
    "deepspeed.runtime.tensor_parallel.init_utils",
)
"""What knows, or is, something within the tested releases that others need not have."""


def other_release(
    group: dist.ProcessGroup, section: dict[str, Any] | None, ranks: tuple[int, ...] = (0, 1)
) -> Any:
    """As ``with_settings``, on some ranks under another release's number.

    These are without what such a release may lack.
    """
    prepare()
    import deepspeed

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() in ranks:
            patch.setattr(deepspeed, "__version__", "0.20.1")
            for name in INSIDES:
                patch.setitem(sys.modules, name, None)
        return with_settings(group, [section])


def test_untested_releases_are_refused(two_ranks: RankPool) -> None:
    for message in two_ranks.run(other_release, {"enabled": True}):
        assert "DeepSpeed 0.20.1 is newer than the tested releases 0.19.5 to 0.19.8" in message
    for report in two_ranks.run(other_release, {"enabled": True, "fallback": "warn"}):
        assert list(report) == ["moe.0", "moe.1"]
        assert all("0.20.1 is newer" in outcome for outcome in report.values())


def test_a_release_that_one_rank_has_is_refused_on_every_rank(two_ranks: RankPool) -> None:
    wanted = r"DeepSpeed 0.20.1 is newer than .*; install one of these \(on rank 1\)"
    for message in two_ranks.run(other_release, {"enabled": True}, (1,)):
        assert re.search(wanted, message)
    for report in two_ranks.run(other_release, {"enabled": True, "fallback": "warn"}, (1,)):
        assert list(report) == ["moe.0", "moe.1"]
        assert all(re.search(wanted, outcome) for outcome in report.values())
    for classes in two_ranks.run(other_release, None, (1,)):
        assert classes.count("MOELayer") == 2


def test_untested_releases_run_as_they_are_where_flashmoe_is_off(two_ranks: RankPool) -> None:
    for classes in two_ranks.run(other_release, None):
        assert classes.count("MOELayer") == 2
    for report in two_ranks.run(other_release, {"enabled": False}):
        assert report == {f"moe.{number}": "flashmoe.enabled is false" for number in range(2)}
