"""The section of the configuration, the releases, and what importing the door does."""

import dataclasses
from typing import Any

import pytest

from flashmoe_megatron.adapters.deepspeed.settings import Settings, read_settings, resolve_alias
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.releases import DEEPSPEED
from tests.programs import run_python

BAD: list[tuple[dict[str, Any], str]] = [
    ({"flashmoe": {"enable": True}}, r"flashmoe\.enable .* the nearest is flashmoe\.enabled"),
    ({"flashmoe": {"fall_back": "warn"}}, r"the nearest is flashmoe\.fallback"),
    ({"flashmoe": {"max_tokens_per_rank": 8}}, r"the nearest is flashmoe\.max_tokens;"),
    ({"flashmoe": {"x": 1}}, r"flashmoe\.x .* is unknown; wanted some of enabled, .*backend"),
    ({"flashmoe": True}, r'flashmoe is True, wanted an object such as {"enabled": true}'),
    ({"flashmoe": None}, "flashmoe is None, wanted an object"),
    (
        {"flash_moe": {"enabled": True}},
        "section 'flash_moe', which nobody reads; wanted 'flashmoe'",
    ),
    ({"FlashMoE": {}}, "section 'FlashMoE'"),
    ({"flashmo": {"enabled": True}}, "section 'flashmo', which nobody reads; wanted 'flashmoe'"),
    ({"flashmoe_megatron": {"enabled": True}}, "section 'flashmoe_megatron', which nobody reads"),
    ({"flashmoe": {}}, r"flashmoe\.enabled is missing, wanted true or false"),
    ({"flashmoe": {"backend": "kernel"}}, r"flashmoe\.enabled is missing"),
    ({"flashmoe": {"enabled": "true"}}, r"flashmoe\.enabled is 'true', wanted true or false"),
    ({"flashmoe": {"enabled": 1}}, r"flashmoe\.enabled is 1, wanted true or false"),
    (
        {"flashmoe": {"enabled": True, "fallback": "stock"}},
        r"flashmoe\.fallback is 'stock', wanted one of error, w",
    ),
    (
        {"flashmoe": {"enabled": True, "backend": "cuda"}},
        r"flashmoe\.backend is 'cuda', wanted one of auto, kernel",
    ),
    (
        {"flashmoe": {"enabled": True, "symmetric_memory": "nccl"}},
        r"flashmoe\.symmetric_memory is 'nccl'",
    ),
    (
        {"flashmoe": {"enabled": True, "timeout": 0}},
        r"flashmoe\.timeout is 0, wanted seconds above 0",
    ),
    ({"flashmoe": {"enabled": True, "timeout": "120"}}, r"flashmoe\.timeout is '120'"),
    ({"flashmoe": {"enabled": True, "timeout": True}}, r"flashmoe\.timeout is True"),
    (
        {"flashmoe": {"enabled": True, "row_bound": "auto"}},
        r"flashmoe\.row_bound is 'auto', wanted a number, since only iterations of Megatron",
    ),
    (
        {"flashmoe": {"enabled": True, "row_bound": 0.5}},
        r"flashmoe\.row_bound is 0.5, wanted a number of at least 1",
    ),
    (
        {"flashmoe": {"enabled": True, "reserved_sms": -1}},
        r"flashmoe\.reserved_sms is -1, .* at least 0",
    ),
    (
        {"flashmoe": {"enabled": True, "reserved_sms": 1.5}},
        r"flashmoe\.reserved_sms is 1.5, wanted an int",
    ),
    (
        {"flashmoe": {"enabled": True, "max_tokens": 0}},
        r"max_tokens is 0, .* at least 1",
    ),
    (
        {"flashmoe": {"enabled": True, "max_tokens": "auto"}},
        r"max_tokens is 'auto'",
    ),
    ({"flashmoe": {"enabled": True, "metrics_interval": None}}, r"metrics_interval is None"),
]


@pytest.mark.parametrize(("config", "message"), BAD, ids=lambda value: str(value)[:50])
def test_bad_sections(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_settings(config)
    assert "\n" not in str(error.value)


def test_good_sections() -> None:
    assert read_settings({}) == Settings(enabled=False)
    assert read_settings({"flashmoe": {"enabled": False}}) == Settings(enabled=False)
    assert read_settings({"flashmoe": {"enabled": True}, "bf16": {}}) == Settings(enabled=True)
    section = {"enabled": True, "timeout": 30, "max_tokens": 64, "fallback": "warn"}
    settings = read_settings({"flashmoe": section})
    assert settings.backend_options() == dataclasses.asdict(BackendOptions(timeout=30))
    assert not Settings(enabled=True, metrics="none").backend_options()["counters"]


def test_alias() -> None:
    config = {"expert_parallel": {"enabled": True, "comm_backend": "flashmoe"}, "bf16": {}}
    assert resolve_alias(config) == {
        "expert_parallel": {"enabled": True, "comm_backend": "comm"},
        "bf16": {},
        "flashmoe": {"enabled": True},
    }
    assert config["expert_parallel"] == {"enabled": True, "comm_backend": "flashmoe"}
    with_section = {**config, "flashmoe": {"fallback": "warn"}}
    assert resolve_alias(with_section)["flashmoe"] == {"enabled": True, "fallback": "warn"}
    for other in ({}, {"expert_parallel": {"comm_backend": "deepep"}}, {"expert_parallel": 3}):
        assert resolve_alias(other) is None
    with pytest.raises(ConfigError, match=r"comm_backend .*flashmoe.enabled is false"):
        resolve_alias({**config, "flashmoe": {"enabled": False}})
    with pytest.raises(ConfigError, match="wanted an object"):
        read_settings(resolve_alias({**config, "flashmoe": 5}))


@pytest.mark.parametrize("version", ["0.19.5", "0.19.8", "0.19.8+unknown"])
def test_tested_releases(version: str) -> None:
    assert DEEPSPEED.problem(version) is None


@pytest.mark.parametrize(
    ("version", "age"),
    [
        ("0.19.4", "older"),
        ("0.9.5", "older"),
        ("0.19.9", "newer"),
        ("0.20.0+abc", "newer"),
        ("1.0.0", "newer"),
        ("main", "newer"),
    ],
)
def test_other_releases(version: str, age: str) -> None:
    problem = DEEPSPEED.problem(version)
    assert problem is not None
    assert f"DeepSpeed {version} is {age} than the tested releases 0.19.5 to 0.19.8" in problem


def test_importing_the_door_imports_nothing_else() -> None:
    code = (
        "import sys, flashmoe_megatron.deepspeed as door\n"
        "assert 'deepspeed' not in sys.modules and 'torch' not in sys.modules\n"
        "names = {'attach', 'initialize', 'install', 'repeated_steps', 'uninstall'}\n"
        "assert set(door.__all__) == names"
    )
    run_python("-c", code)
