"""What is asked for and does nothing is said once, at the start of Megatron's script."""

import argparse
import logging
from types import ModuleType
from typing import Any

import pytest

from flashmoe_megatron.adapters.megatron.arguments import extend_parser, refuse_briefly
from flashmoe_megatron.adapters.megatron.config.notices import find_notices, patch_start
from flashmoe_megatron.errors import ConfigError
from tests.megatron.harness import megatron_parser

FLASHMOE = "--moe-token-dispatcher-type flashmoe"


def parse(line: str, **others: Any) -> argparse.Namespace:
    """The script's arguments, of which those besides our flags are given as they are."""
    args = extend_parser(megatron_parser()).parse_args(line.split())
    vars(args).update({"num_experts": 8, **others})
    return args


@pytest.mark.parametrize(
    ("line", "others", "notices"),
    [
        ("", {}, []),
        ("--flashmoe-backend auto", {}, []),  # the default
        (
            "--flashmoe-keep inputs --flashmoe-max-tokens 64",
            {},
            [
                "--flashmoe-max-tokens, --flashmoe-keep are without effect: "
                "--moe-token-dispatcher-type is alltoall, wanted flashmoe"
            ],
        ),
        ("--flashmoe-keep inputs", {"moe_megakernel_backend": "flashmoe"}, []),
        (
            FLASHMOE,
            {"num_experts": None},
            [
                f"{FLASHMOE} is without effect: the model has no experts, wanted --num-experts",
            ],
        ),
        (FLASHMOE, {}, []),
        (f"{FLASHMOE} --flashmoe-metrics none", {}, []),
        (
            f"{FLASHMOE} --flashmoe-metrics all",
            {},
            [
                "--flashmoe-metrics is without effect: no logger is on, wanted --tensorboard-dir "
                "or --wandb-project"
            ],
        ),
        (f"{FLASHMOE} --flashmoe-metrics all", {"tensorboard_dir": "logs"}, []),
        (
            FLASHMOE,
            {"wandb_project": "moe"},
            [
                "wandb gets flashmoe's metrics and none of Megatron's own, which Megatron logs "
                "there only beside TensorBoard: pass --tensorboard-dir besides --wandb-project"
            ],
        ),
        (FLASHMOE, {"wandb_project": "moe", "tensorboard_dir": "logs"}, []),
        ("", {"wandb_project": "moe"}, []),
    ],
)
def test_notices(line: str, others: dict[str, Any], notices: list[str]) -> None:
    assert list(find_notices(parse(line, **others))) == notices


def test_rank_0_is_told_when_the_script_starts(caplog: pytest.LogCaptureFixture) -> None:
    global_vars = ModuleType("global_vars")
    global_vars.set_global_variables = lambda args, build_tokenizer=True: build_tokenizer  # type: ignore[attr-defined]
    patch_start(global_vars)
    for rank in (1, 0):
        args = parse("--flashmoe-keep inputs", rank=rank)
        with caplog.at_level(logging.WARNING, "flashmoe_megatron"):
            assert global_vars.set_global_variables(args, build_tokenizer=False) is False
        assert len(caplog.messages) == 1 - rank


@pytest.mark.parametrize("ignores_unknown", [False, True])
def test_a_misspelt_flag_gets_the_nearest(
    ignores_unknown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = refuse_briefly(extend_parser(megatron_parser()))
    parse = parser.parse_known_args if ignores_unknown else parser.parse_args
    for word in ("--flashmoe-kep", "--flashmoe-kep=all"):
        words = "^unrecognized argument --flashmoe-kep, the nearest is --flashmoe-keep$"
        with pytest.raises(ConfigError, match=words):
            parse([word, "all"])
    with pytest.raises(ConfigError, match="^unrecognized argument --flashmoe-foo$"):
        parse(["--flashmoe-foo", "all"])
    with pytest.raises(ConfigError, match="^--flashmoe-keep: invalid choice: 'al'"):
        parse(["--flashmoe-keep", "al"])
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        parse(["--moe-token-dispatcher-type", "flshmoe"])
    assert "usage:" in capsys.readouterr().err
    assert parse(["--flashmoe-keep", "inputs"])
    if ignores_unknown:
        _, unknown = parser.parse_known_args(["--another", "--flashmoe-keep", "all"])
        assert unknown == ["--another"]
