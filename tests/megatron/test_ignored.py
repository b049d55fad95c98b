"""Settings that change nothing are accepted, and the user hears of each once."""

from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe_megatron.adapters import megatron as adapter
from flashmoe_megatron.adapters.megatron import routed
from flashmoe_megatron.adapters.megatron.config.notices import IGNORED, ignored_settings
from flashmoe_megatron.adapters.megatron.config.refusals import CONFIG_REFUSALS, refuse
from flashmoe_megatron.adapters.megatron.settings import Settings
from flashmoe_megatron.separate.reference import ReferenceBackend
from tests.megatron.harness import Layout, transformer_config
from tests.unit.cases import make_config

RECOMPUTE = {"recompute_granularity": "selective", "moe_grouped_gemm": True}

ASKED: dict[str, list[dict[str, Any]]] = {
    "--recompute-modules moe_act": [
        {**RECOMPUTE, "recompute_modules": ["moe_act"]},
        {**RECOMPUTE, "recompute_modules": ["moe_act", "layernorm", "mlp"]},
    ],
    "--moe-router-padding-for-quantization": [{"moe_router_padding_for_quantization": True}],
    "--moe-router-padding-for-fp8": [{"moe_router_padding_for_fp8": True}],
}
"""Settings that a configuration may have."""

NOT_ASKED: list[dict[str, Any]] = [
    {},
    {"recompute_modules": ["moe_act"]},  # selects nothing without a granularity
    {**RECOMPUTE, "recompute_modules": ["layernorm", "mlp"]},
]


@pytest.fixture(autouse=True)
def _installed() -> None:
    adapter.install()


@pytest.mark.parametrize("ignored", IGNORED, ids=lambda ignored: ignored.name)
def test_every_row_of_the_table_is_accepted_and_said(ignored: Any) -> None:
    for settings in ASKED[ignored.flag]:
        config = transformer_config(Layout(), "flashmoe")
        vars(config).update(settings)
        refuse(config, CONFIG_REFUSALS)
        (said,) = ignored_settings(config, Settings())
        assert said.startswith(f"{ignored.flag} changes nothing with --moe-token-dispatcher-type")
        assert ignored.why in said


def test_padding_is_megatrons_to_refuse() -> None:
    """Without FP8 it is an error of Megatron's own."""
    with pytest.raises(ValueError, match="fp8/fp4 must be specified"):
        transformer_config(Layout(), "flashmoe", moe_router_padding_for_fp8=True)


@pytest.mark.parametrize("settings", NOT_ASKED, ids=str)
def test_nothing_is_said_of_what_is_not_asked(settings: dict[str, Any]) -> None:
    assert not list(
        ignored_settings(transformer_config(Layout(), "flashmoe", **settings), Settings())
    )


UNIFORM = {"recompute_granularity": "full", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("settings", "is_said"),
    [
        ({**RECOMPUTE, "recompute_modules": ["moe"]}, True),
        ({**UNIFORM, "recompute_method": "uniform"}, True),
        ({**UNIFORM, "recompute_method": "block"}, False),
        ({**RECOMPUTE, "recompute_modules": ["layernorm"]}, False),
    ],
)
def test_keeping_less_of_what_is_recomputed_is_said(
    settings: dict[str, Any], is_said: bool
) -> None:
    config = transformer_config(Layout(), "flashmoe", **settings)
    for keep in ("auto", "all"):
        assert not list(ignored_settings(config, Settings(keep=keep)))
    for keep in ("preactivations", "inputs"):
        said = list(ignored_settings(config, Settings(keep=keep)))
        assert len(said) == is_said
        assert all(line.startswith(f"--flashmoe-keep {keep} costs time") for line in said)


def test_it_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "_said", set())
    (settings, *_) = ASKED["--recompute-modules moe_act"]
    config = transformer_config(Layout(), "flashmoe", **settings)
    for topk in (2, 2, 4):  # two layers of one shape, one of another
        routed._announce(
            ReferenceBackend(make_config(topk=topk)), config, Settings(), is_bounded=True
        )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert sum("--recompute-modules moe_act" in line for line in lines) == 1
    assert all(line.startswith("flashmoe: ") for line in lines)


def test_replicas_are_described_where_there_are_other_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_ranks in (1, 2):
        monkeypatch.setattr(routed, "_said", set())
        shape, within = make_config(num_ranks=num_ranks), SimpleNamespace(kind="kernel")
        backend: Any = SimpleNamespace(config=shape, keep="all", within=within)
        config = transformer_config(Layout(), "flashmoe")
        routed._announce(backend, config, Settings(spare_slots=2), is_bounded=True)
        lines = capsys.readouterr().out.splitlines()
        assert sum("replicas of at most 2 experts" in line for line in lines) == num_ranks - 1
