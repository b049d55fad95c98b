"""torchtitan's debug models train with flashmoe's routed experts as with their own."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.programs import ROOT, run_python
from tests.side_by_side import compare_noted

INSTALLED = ROOT / "build" / "torchtitan-0.3.0"
"""Where tools/setup_env.sh installs it, with those of its dependencies that models need."""

run = partial(run_python, before=[INSTALLED])
KINDS = ("qwen3", "deepseek_v3", "gpt_oss")
TOLERANCE = 1e-2
"""Relative difference of losses: torchtitan's experts compute in bfloat16, and so do ours."""

pytestmark = [
    pytest.mark.skipif(
        not INSTALLED.is_dir(), reason=f"{INSTALLED} is missing; tools/setup_env.sh makes it"
    ),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan needs Python 3.11"),
]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_debug_models(num_ranks: int, tmp_path: Path, with_torch: Path) -> None:
    out = tmp_path / "records.jsonl"
    program = ("-m", "tests.frameworks.train_torchtitan", "--out", out, "--steps", 3)
    run(*program, ranks=num_ranks if num_ranks > 1 else None, forked_from=with_torch)
    for own, ours in compare_noted(out, dict.fromkeys(KINDS, TOLERANCE)).values():
        assert own["framework"] == "torchtitan 0.3.0"
        assert own["ranks"] == ours["ranks"] == num_ranks
        assert len(own["losses"]) == 3 * num_ranks
        assert own["losses"][2] < 0.8 * own["losses"][0]
        assert ours["losses"] != own["losses"]  # the same bits would be the same experts


def test_a_layer(tmp_path: Path, with_torch: Path) -> None:
    out = tmp_path / "record.json"
    program = ("-m", "tests.frameworks.titan_layer", "--out", out)
    run(*program, "--device", "cpu", "--steps", 2, forked_from=with_torch)
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


CHANGES = """
import copy
import io
import torch
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.torchtitan import routed_experts


def told(layer, *inputs):
    try:
        return "computed" if layer(*inputs).isfinite().all() else "nan"
    except ConfigError as error:
        return str(error)


def limit(inner):
    inner.swiglu_limit = 0.05


def hook(inner):
    inner.register_forward_hook(print)


def own_forward(inner):
    inner.forward = lambda x, counts: x


class Converted(GroupedExperts):
    pass


def convert(inner):
    inner.__class__ = Converted


torch.manual_seed(0)
scores, ids = torch.rand(1, 9, 4).softmax(-1).topk(2, dim=-1)
counts = torch.bincount(ids.flatten(), minlength=4)
x = torch.randn(1, 9, 64).bfloat16()
kinds = ((GptOssGroupedExperts, limit), (GptOssGroupedExperts, hook), (GroupedExperts, hook))
for kind, change in (*kinds, (GroupedExperts, own_forward), (GroupedExperts, convert)):
    for is_called in (False, True):
        config = RoutedExperts.Config(
            inner_experts=kind.Config(dim=64, hidden_dim=64, num_experts=4),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=4, top_k=2),
        )
        own, ours = config.build(), routed_experts(config, backend="reference").build()
        for parameter in own.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        ours.load_state_dict(own.state_dict())
        if is_called:
            ours(x, scores, ids, counts)
        change(ours.inner_experts)
        said = told(ours, x, scores, ids, counts)
        if said == "computed":
            change(own.inner_experts)
            got, want = (layer(x, scores, ids, counts).float() for layer in (ours, own))
            said = "right" if (got - want).norm() < 2e-2 * want.norm() else "wrong"
        print(change.__name__, said)

config = RoutedExperts.Config(
    inner_experts=GroupedExperts.Config(dim=64, hidden_dim=64, num_experts=4),
    token_dispatcher=LocalTokenDispatcher.Config(num_experts=4, top_k=2),
)
ours = routed_experts(config, backend="reference").build()
for parameter in ours.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
want = ours(x, scores, ids, counts)
torch.save(ours, file := io.BytesIO())
file.seek(0)
for copied in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert torch.equal(copied(x, scores, ids, counts), want)
"""


def test_a_change_has_one_answer_before_and_after_the_first_call(with_torch: Path) -> None:
    ran = run("-c", CHANGES, forked_from=with_torch)
    hooked = r"hook inner_experts \(G\w+\) has forward hooks, which would not be called"
    wanted = (
        r"limit right",
        hooked,
        hooked,
        r"own_forward inner_experts .* has a forward of its own",
        r"convert the experts are Converted, wanted GroupedExperts",
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == 2 * len(wanted), ran.stdout
    for number, line in enumerate(lines):
        assert re.match(wanted[number // 2], line), line


def test_refusals(with_torch: Path) -> None:
    ran = run("-c", REFUSALS, forked_from=with_torch)
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
