"""The command that times a user's own layer, on a GPU and with its kernel."""

import importlib.util
import json
from pathlib import Path

import pytest

from flashmoe_megatron.bench import command
from flashmoe_megatron.bench.correctness import GATE
from flashmoe_megatron.bench.shapes import SHAPES
from flashmoe_megatron.planner import kept_bytes
from tests.published import CONFIGS, GPT_OSS

pytestmark = pytest.mark.gpu


def test_a_published_layer_on_the_kernel(tmp_path: Path, capsys) -> None:
    config, picture = tmp_path / "config.json", tmp_path / "bench.png"
    config.write_text(json.dumps(CONFIGS["qwen3-30b-a3b"][0]))
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    drawn = ["--picture", str(picture)] if has_matplotlib else []
    assert command.main(["--config", str(config), "--others", "torch", "--json", *drawn]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"], found["is_reference"]) == ("kernel", False)
    assert found["layer"] == vars(SHAPES["qwen3-30b"])
    assert found["machine"]["gpus"]
    every, some, none, torchs = found["rows"]
    for row in found["rows"]:
        assert row["error"] <= GATE
        assert 0 < row["forward"]["min_ms"] < row["both"]["max_ms"]
    # Pad rows and the plan come on top of what the formula counts.
    planned = kept_bytes(SHAPES["qwen3-30b"].config(1), "all")
    assert planned <= every["kept"] < 1.25 * planned
    assert none["kept"] < some["kept"] < every["kept"] < torchs["kept"]
    assert picture.exists() == has_matplotlib


def test_gpt_oss_on_the_kernel(tmp_path: Path, capsys) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["gpt-oss-20b"][0]))
    assert command.main(["--config", str(config), "--others", "torch", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"], found["experts"]) == ("kernel", vars(GPT_OSS))
    for row in found["rows"]:
        assert row["error"] <= GATE
        assert 0 < row["forward"]["min_ms"] < row["both"]["max_ms"]


def test_a_layer_that_does_not_fit(capsys) -> None:
    assert command.main(["4096x7168x2048x2048x8", "--gated"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "2048 experts on a GPU" in printed.err
    assert "wanted --one-of " in printed.err
