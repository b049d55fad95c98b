"""What the planner says of memory agrees with the library's own account of its layout."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_megatron import planner
from flashmoe_megatron.bench.shapes import SHAPES, Shape
from flashmoe_megatron.config import Activation, MoEConfig
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.kernel.memory import (
    MemoryPlan,
    check_slots_fit,
    plan_memory,
    reads_tokens,
)
from flashmoe_megatron.planner import choose_keep
from tests.unit import cases
from tools import memory_table
from tools.bench import kept_table, peers_report

MIB = 2**20
MOST_ROUTES = 2**19
"""Up to so many routes of a group and call, 16 MiB hold all that is not rows of tokens."""


@st.composite
def layers(draw: st.DrawFn) -> MoEConfig:
    num_ranks = draw(st.integers(1, 8))
    num_experts = num_ranks * draw(st.integers(1, 64))
    topk = draw(st.integers(1, min(16, num_experts)))
    return MoEConfig(
        hidden=64 * draw(st.integers(1, 128)),
        intermediate=64 * draw(st.integers(1, 256)),
        num_experts=num_experts,
        topk=topk,
        activation=draw(st.sampled_from(Activation)),
        gated=draw(st.booleans()),
        num_ranks=num_ranks,
        max_tokens=draw(st.integers(1, MOST_ROUTES // (num_ranks * topk))),
    )


def plan_of(config: MoEConfig) -> MemoryPlan | None:
    """A plan, or ``None`` for what the kernel refuses: too many counters for shared memory."""
    try:
        return plan_memory(config)
    except ConfigError as error:
        if "shared memory" not in str(error):
            raise
        return None


MODELS = {
    "Qwen3-30B": {"hidden": 2048, "intermediate": 768, "num_experts": 128, "max_tokens": 8192},
    "Qwen3-235B": {"hidden": 4096, "intermediate": 1536, "num_experts": 128, "max_tokens": 8192},
    "DeepSeek-V3": {"hidden": 7168, "intermediate": 2048, "num_experts": 256, "max_tokens": 4096},
}
PAGE = Path(planner.__file__).parent / "hosts" / "README.md"


@pytest.mark.parametrize("model", MODELS)
def test_memory_over_hosts(model: str) -> None:
    """The page's table, and the library's own account of the heap."""
    page = PAGE.read_text()
    for hosts in (2, 8, 16, 32):
        shape = {**MODELS[model], "topk": 8, "activation": Activation.SILU, "gated": True}
        if shape["num_experts"] % (8 * hosts):
            continue
        config = MoEConfig(num_ranks=8 * hosts, **shape)
        plan = planner.plan_hosts(config, hosts)
        share = planner.share_of_host(config, hosts, plan.launch_tokens)
        heap = plan_memory(share).symmetric
        assert plan.heap_bytes <= heap <= plan.heap_bytes + 128 * MIB
        assert heap < 2e9
        row = (
            f"| {model} | {hosts} | {plan.rows:.2f} | {plan.card_bytes / MIB:.0f} | "
            f"{plan.launches} of {plan.launch_tokens:,} tokens | {heap / MIB:,.0f} |"
        )
        assert row in page, row
        fixed = planner.plan_hosts(config, hosts, is_fixed=True)
        share = planner.share_of_host(config, hosts, fixed.launch_tokens)
        assert plan_memory(share).symmetric < 2e9


@settings(max_examples=300, deadline=None)
@given(config=layers(), more=st.integers(2, 4))
def test_symmetric_memory_is_bounded(config: MoEConfig, more: int) -> None:
    plan = plan_of(config)
    if plan is None:
        return
    assert plan.token_buffer == config.max_tokens * config.hidden * 2
    copies = (1 + min(config.topk, config.num_ranks)) * plan.token_buffer
    if config.num_ranks == 1:  # reads its tokens where they are, and sums them where they go
        copies = 0
    assert copies <= plan.symmetric <= copies + 16 * MIB
    # The heap does not depend on anything else of the layer.
    others = plan_of(
        dataclasses.replace(
            config,
            num_experts=more * config.num_experts,
            intermediate=more * config.intermediate,
            gated=not config.gated,
        )
    )
    assert others is None or others.symmetric == plan.symmetric


@settings(max_examples=100, deadline=None)
@given(config=layers(), blocks=st.integers(0, 4096))
def test_local_memory_grows_with_the_rows(config: MoEConfig, blocks: int) -> None:
    if plan_of(config) is None:
        return
    none, some = (plan_memory(config, num_row_blocks=number) for number in (0, blocks))
    rows = 128 * blocks
    assert some.kept - none.kept == rows * (config.hidden + config.fc1_rows) * 2
    assert none.forward == none.backward == 0
    assert some.forward == rows * (config.hidden + config.intermediate) * 2
    # Narrow experts of a rank that is alone read rows of dY where tokens have them.
    copied = 0 if config.num_ranks == 1 and config.intermediate <= 512 else config.hidden
    apart = some.backward - some.forward - rows * config.fc1_rows * 2  # and partial sums
    assert rows * copied * 2 <= apart
    assert (apart < rows * config.hidden * 2) == (copied < config.hidden and blocks > 0)
    lean = plan_memory(config, num_row_blocks=blocks, keep="preactivations")
    received = rows * config.hidden * 2
    # Their passes read tokens where they are if no rows are kept, but for some backwards.
    copied, fetched = (
        0 if config.num_ranks == 1 and config.fc1_rows <= most else received for most in (1024, 512)
    )
    assert (some.kept - lean.kept, lean.forward - some.forward) == (received, copied)
    assert lean.backward - some.backward == fetched
    least = plan_memory(config, num_row_blocks=blocks, keep="inputs")
    assert least.kept == 0
    assert least.backward >= some.kept + some.backward
    assert dataclasses.replace(some, num_row_blocks=0, kept=0, forward=0, backward=0) == (
        dataclasses.replace(none, kept=0)
    )


@pytest.mark.parametrize("intermediate", [128, 256, 384, 512, 640, 1536, 14336])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_one_gpu_keeps_tokens_by_default_at_any_width(intermediate: int, gated: bool) -> None:
    """Tokens of other ranks are not in a rank's reach, and rows in FP8 are not what tokens are."""
    alone = cases.make_config(hidden=128, intermediate=intermediate, gated=gated)
    assert reads_tokens(alone)
    assert choose_keep("auto", alone, reads_tokens=reads_tokens(alone)) == "preactivations"
    assert not reads_tokens(dataclasses.replace(alone, num_ranks=2))
    assert not reads_tokens(dataclasses.replace(alone, experts="fp8"))


def test_refuses_a_layer_that_the_kernel_cannot_run() -> None:
    config = SHAPES["qwen3-30b"].config(1)
    with pytest.raises(ConfigError, match="num_ctas 3: wanted a multiple of 2"):
        plan_memory(config, num_ctas=3)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_table(num_ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_table.main(["--ranks", str(num_ranks)]) == 0
    printed = capsys.readouterr().out
    rows = {line.split(",")[0].strip("| "): line for line in printed.splitlines()}
    assert set(SHAPES) <= set(rows)
    plan = plan_memory(SHAPES["mixtral-8x7b"].config(num_ranks))
    assert f"| {plan.symmetric / MIB:.1f} |" in rows["mixtral-8x7b"]


def test_a_layer_of_your_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for gated in (False, True):
        arguments = ["--ranks", "2", "--shapes", "64x128x256x8x2", *["--gated"] * gated]
        assert memory_table.main(arguments) == 0
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 64x")]
        assert len(rows) == 3
        found[gated] = rows
        plan = plan_memory(Shape(64, 128, 256, 8, 2, gated=gated).config(2), keep="all")
        assert f"| {plan.kept / MIB:.1f} |" in rows[0]
    assert found[False] != found[True]
    with pytest.raises(SystemExit, match="2"):
        memory_table.main(["--shapes", "64x128x256x8"])
    assert "shape 64x128x256x8: wanted TOKENSx" in capsys.readouterr().err


def test_table_finds_what_is_not_as_planned() -> None:
    shape = SHAPES["paper-8k"]
    plan = plan_memory(shape.config(4))
    found = {"symmetric": plan.symmetric, "kept": plan.kept + 5000, "forward": plan.forward}
    assert memory_table.problems("layer", shape, plan, found, 4, tolerance=8192) == []
    (wrong,) = memory_table.problems("layer", shape, plan, found, 4, tolerance=4096)
    assert "kept" in wrong
    larger = dataclasses.replace(plan, symmetric=plan.symmetric + 16 * MIB)
    heap, bound = memory_table.problems("layer", shape, larger, found, 4, tolerance=8192)
    assert "bound" in heap
    assert "symmetric is" in bound


def test_spare_slots_take_a_tenth_of_the_memory_at_most() -> None:
    """Mixtral's experts have 176 million numbers each, of two bytes and a float32 gradient."""
    config = cases.make_config(hidden=4096, intermediate=14336, num_experts=64, num_ranks=8)
    check_slots_fit(config, 8, 90 * 2**30)
    with pytest.raises(ConfigError, match="8066 MiB .* at most 7987 MiB, .* or spare_slots of 7$"):
        check_slots_fit(config, 8, 78 * 2**30)


@pytest.mark.parametrize(
    ("shape", "measured", "chosen"),
    [  # on an H200
        (Shape(24576, 1536, 256, 128, 8, gated=True), 876.657664, "preactivations"),
        (Shape(16384, 2048, 512, 256, 8, gated=True), 1010.134016, "preactivations"),
    ],
)
def test_a_report_of_other_libraries_says_what_forwards_keep(
    shape: Shape, measured: float, chosen: str
) -> None:
    layers = {"sonicmoe": {"kept_bytes": 203_686_912}, "flashmoe": {}, "liger": {"failed": "so"}}
    row = {"shape": "16384x", "sizes": vars(shape), "row_bound": 1.05, "layers": layers}
    found = kept_table.megabytes(row)
    assert found["all"] == pytest.approx(measured, rel=2.5e-3)
    assert found["auto"] == found[chosen]
    assert found["preactivations"] < 0.4 * found["all"]
    assert found["tokens"] == 2 * shape.tokens * shape.hidden / 1e6
    assert found["rows of an expert"] == shape.tokens * shape.topk / shape.num_experts
    lines = peers_report.kept([row]).splitlines()
    assert lines[2].endswith("| tokens | sonicmoe, measured |")
    over = found["auto"] / 203.686912
    assert lines[4].endswith(f"| {found['tokens']:.4g} | 203.7 ({over:.2f}) |")
