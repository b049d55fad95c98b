"""Training with replicas of hot experts gives the numbers of training without."""

import dataclasses
import json
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed import RankPool
from tests.megatron.harness import Case, Layout, train
from tests.megatron.test_training import assert_same

REPLICAS = {"spare_slots": 2, "replica_policy": "popular"}
"""With a test's few tokens, all experts' rows fill one block each, and ``balance`` leaves them."""

FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CASES = {
    # The routers stay skewed, so that replicas move.
    "full_recompute": Case(
        Layout(expert=2),
        config={**FULL_RECOMPUTE, "moe_aux_loss_coeff": 0.0},
        ddp={"overlap_grad_reduce": True},
        iterations=20,
    ),
    "keep_inputs": Case(Layout(expert=2), fuse_main_grad=True, settings={"keep": "inputs"}),
    "pp2_ep2": Case(Layout(expert=2, pipeline=2), ddp={"overlap_grad_reduce": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_with_replicas_matches_training_without(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    without = CASES[name]
    pool: RankPool = request.getfixturevalue(
        "four_ranks" if without.layout.pipeline > 1 else "two_ranks"
    )
    folders = [tmp_path / kind for kind in ("without", "within")]
    metrics = tmp_path / "metrics.jsonl"
    within = dataclasses.replace(
        without, settings={**without.settings, **REPLICAS}, metrics_to=str(metrics)
    )
    outcomes = [
        pool.run(train, dataclasses.replace(case, save_to=str(folder)), "flashmoe")
        for case, folder in zip((without, within), folders, strict=True)
    ]
    for want, got in zip(*outcomes, strict=True):
        assert_same(got, want)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    moved = [line["flashmoe/replicas"] for line in lines]
    assert len(moved) >= without.iterations - 1
    assert min(moved) > 0
    assert len(set(moved)) > 1 or without.iterations < 20
    for line in lines:
        assert line["flashmoe/locality"] > 0.55
        assert line["flashmoe/backward/replica_mib"] > line["flashmoe/forward/replica_mib"] > 0
    shapes = [
        {key: getattr(stored, "size", None) for key, stored in metadata.items()}
        for metadata in (
            FileSystemReader(folder).read_metadata().state_dict_metadata for folder in folders
        )
    ]
    assert shapes[0] == shapes[1]
    assert any("experts" in key for key in shapes[0])
