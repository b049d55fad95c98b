"""torchtitan's debug models train with flashmoe's routed experts as with their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
INSTALLED = REPOSITORY / "build" / "torchtitan-0.3.0"
"""Where tools/setup_env.sh installs it, with those of its dependencies that models need."""

TIMEOUT_S = 600
KINDS = ("qwen3", "deepseek_v3", "gpt_oss")
TOLERANCE = 1e-2
"""Relative difference of losses: torchtitan's experts compute in bfloat16, and so do ours."""

pytestmark = [
    pytest.mark.skipif(
        not INSTALLED.is_dir(), reason=f"{INSTALLED} is missing; tools/setup_env.sh makes it"
    ),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan needs Python 3.11"),
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (INSTALLED, REPOSITORY))),
        },
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_debug_models(num_ranks: int, tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    ran = run(
        *(launcher if num_ranks > 1 else ()),
        *("-m", "tests.frameworks.train_torchtitan", "--out", str(out), "--steps", "3"),
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-20_000:]
    records: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    pairs = list(zip(records[::2], records[1::2], strict=True))
    assert [own["model"] for own, _ in pairs] == list(KINDS)
    for own, ours in pairs:
        assert (own["experts"], ours["experts"]) == ("own", "flashmoe")
        assert own["framework"] == "torchtitan 0.3.0"
        assert own["ranks"] == ours["ranks"] == num_ranks
        assert len(own["losses"]) == 3 * num_ranks
        assert own["losses"][2] < 0.8 * own["losses"][0]
        assert ours["losses"] == pytest.approx(own["losses"], rel=TOLERANCE)
        assert ours["losses"] != own["losses"]  # the same bits would be the same experts


def test_a_layer(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    options = ("--out", str(out), "--device", "cpu", "--steps", "2")
    ran = run("-m", "tests.frameworks.titan_layer", *options)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-20_000:]
    weights = {f"inner_experts.{name}" for name in ("w1_EFD", "w2_EDF", "w3_EFD")}
    assert set(json.loads(out.read_text())["errors"]) == {"out", "x", "scores", *weights}


REFUSALS = """
import dataclasses
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher, TorchAOTokenDispatcher
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.torchtitan import routed_experts


class Other(GroupedExperts):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass


def config(experts=GroupedExperts.Config, dispatcher=LocalTokenDispatcher.Config, **more):
    return RoutedExperts.Config(
        inner_experts=experts(dim=64, hidden_dim=64, num_experts=4),
        token_dispatcher=dispatcher(num_experts=4, top_k=2, **more),
    )


def refused(given, **options):
    try:
        routed_experts(given, **options)
    except ConfigError as error:
        print(error)


refused(config(Other.Config))
refused(config(dispatcher=TorchAOTokenDispatcher.Config, pad_multiple=16))
refused(config(), max_token=4)
sharded = routed_experts(config(), backend="reference").build()
sharded.inner_experts = GroupedExperts(
    GroupedExperts.Config(dim=64, hidden_dim=32, num_experts=4)
)
import torch
idx = torch.tensor([[[0, 1]]])
try:
    sharded(torch.zeros(1, 1, 64), torch.ones(1, 1, 2), idx, None)
except ConfigError as error:
    print(error)
"""


def test_refusals() -> None:
    ran = run("-c", REFUSALS)
    assert ran.returncode == 0, ran.stderr[-20_000:]
    wanted = (
        r"the experts are made by Other\.Config, wanted GroupedExperts\.Config or",
        r"the tokens are dispatched by TorchAOTokenDispatcher\.Config, which flashmoe replaces",
        r"option 'max_token' is unknown, the nearest is 'max_tokens'",
        r"down projections have shape \(4, 64, 32\), wanted \(4, 64, 64\): torchtitan shards",
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == len(wanted), ran.stdout
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.search(pattern, line), line
