"""What is asked for and does nothing is said once, at the start of Megatron's script."""

import argparse
import logging
from types import ModuleType
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(("stages", "is_told"), [(1, True), (2, False)])
def test_stages_of_a_pipeline_share_no_experts(
    stages: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a reduction of theirs is not another one beside that of all else."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    sizes = {"expert_model_parallel_size": 2, "world_size": 4}
    args = parse(FLASHMOE, overlap_grad_reduce=True, **sizes, pipeline_model_parallel_size=stages)
    assert any("NCCL_MAX_CTAS" in notice for notice in find_notices(args)) == is_told


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


@pytest.mark.parametrize(
    ("line", "environment", "world_size", "is_told"),
    [
        ("", {}, 2, True),
        ("", {"NCCL_MAX_CTAS": "16"}, 2, True),
        ("", {"NCCL_MAX_CTAS": "4"}, 2, False),
        ("", {"NCCL_MAX_CTAS": "4"}, 4, True),  # gradients of experts are reduced beside
        ("", {"NCCL_MAX_CTAS": "2"}, 4, False),
        ("--flashmoe-reserved-sms 16", {"NCCL_MAX_CTAS": "16"}, 2, False),
        ("", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 4, False),
        ("--flashmoe-backend reference", {}, 4, False),
    ],
)
def test_a_reduction_that_may_not_fit_beside_a_launch(
    line: str,
    environment: dict[str, str],
    world_size: int,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("NCCL_MAX_CTAS", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sizes = {"expert_model_parallel_size": 2, "world_size": world_size}
    args = parse(f"{FLASHMOE} {line}", overlap_grad_reduce=True, **sizes)
    told = [notice for notice in find_notices(args) if "NCCL_MAX_CTAS" in notice]
    assert bool(told) == is_told
    args.overlap_grad_reduce = False
    assert not any("NCCL_MAX_CTAS" in notice for notice in find_notices(args))
