"""Pictures of the scheduled backend."""

import json
from pathlib import Path
from typing import Any

import pytest

from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.schedule.fit import ALONE, HOST, TOGETHER, Beside, Fit, Machine, write_fit
from flashmoe_megatron.schedule.line import Line
from tools.bench.shapes import ALL_SHAPES
from tools.simulate import __main__ as command
from tools.simulate.schedule import read_levels, speedups


def write(path: Path, hosts: int, ranks: int, gbps: float) -> Path:
    lines = dict.fromkeys(TOGETHER, Line(2e-5, 1e-9 / gbps, 1.0))
    lines |= dict.fromkeys(HOST, Line(1e-4, 1e-5, 1.0))
    lines |= dict.fromkeys(ALONE, Line(1e-5, 0.0, 1.0)) | {"product": Line(1e-5, 2e-15, 1.0)}
    beside = {"all_to_all": Beside(1.1, 1.0)}
    write_fit(path, Fit(Machine("a GPU", hosts, ranks), "bfloat16", lines, {}, beside))
    return path


def test_the_ablation_takes_constants_of_two_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    between = write(tmp_path / "between.json", 2, 1, 40)
    within = write(tmp_path / "within.json", 1, 2, 60)
    fit = read_levels(between, within)
    one, each, every = speedups(ALL_SHAPES["qwen3-30b"].config(1), fit)
    assert 1 < one <= each < every
    with pytest.raises(ConfigError, match="no exchange within hosts: wanted --within"):
        read_levels(between, None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_levels(tmp_path / "none.json", None)

    def span(name: str, stream: str, part: int) -> dict[str, Any]:
        return {
            "name": name, "part": part, "stream": stream, "begin_us": part, "end_us": part + 1
        }  # fmt: skip

    spans = [span("dispatch", "between", 0), span("experts", "compute", 1)]
    layers = [{"degrees": [n, n], "forward": spans, "backward": spans} for n in (1, 2)]
    config = {"max_tokens": 1, "hidden": 64, "intermediate": 64, "num_experts": 2, "topk": 1}
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"machine": "a GPU", "config": config, "layers": layers}))
    out = tmp_path / "new" / "picture"
    files = ("--fit", str(between), "--within", str(within), "--trace", str(trace))
    assert command.main(["schedule", *files, "--shapes", "qwen3-30b", "--out", str(out)]) == 0
    assert "qwen3-30b: 1." in capsys.readouterr().out
    for name in ("picture.png", "picture.svg", "picture_ablation.png"):
        assert (out.parent / name).stat().st_size > 5000, name
