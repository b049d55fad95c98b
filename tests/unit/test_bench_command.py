"""The command that times a user's own layer: layers it reads, rows it prints, ways it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import matplotlib as mpl
import pytest
import torch

from flashmoe_megatron.bench import __main__, command, measure, stopwatch
from flashmoe_megatron.bench.correctness import GATE
from flashmoe_megatron.bench.described import from_config, from_megatron
from flashmoe_megatron.bench.layers import FusedLayer, UnfusedLayer
from flashmoe_megatron.bench.machine import machine_here
from flashmoe_megatron.bench.problem import Problem, make_problem
from flashmoe_megatron.bench.shapes import SHAPES, Form, Shape
from flashmoe_megatron.config import Activation
from flashmoe_megatron.errors import ConfigError, DeviceError
from flashmoe_megatron.measured.reach import check_peers
from flashmoe_megatron.separate.reference import ReferenceBackend
from tests.distributed import PATIENCE_S
from tests.published import CONFIGS, GPT_OSS, SWIGLU

PACKAGE = Path(__file__).parents[2] / "flashmoe_megatron"
LAYER = "40x64x64x8x2"


def written(folder: Path, content: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("model", CONFIGS)
def test_a_layer_of_a_published_config(model: str, tmp_path: Path) -> None:
    content, shape, form = CONFIGS[model]
    path = written(tmp_path, content)
    found = from_config(path)
    assert (found.shape, found.form, found.not_timed) == (shape, form, "")
    assert found.origin == f"{content['model_type']} of config.json"
    other = from_config(path, tokens=100, gated=not shape.gated).shape
    assert (other.tokens, other.gated) == (100, not shape.gated)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"model_type": "llama", "hidden_size": 64}, r"llama has no experts \(none of num_experts"),
        ({"num_experts": 8, "hidden_size": 64}, r"has nothing for moe_intermediate_size \(or "),
        ({**CONFIGS["dbrx"][0], "d_model": "wide"}, "has 'wide' for moe_latent_size"),
        (
            {**CONFIGS["a list for all layers"][0], "moe_topk": [8, 4]},
            r"has \[8, 4\] for num_experts_per_tok",
        ),
        ([], "is a list, wanted an object"),
    ],
)
def test_a_config_without_a_layer(content: Any, wanted: str, tmp_path: Path, capsys) -> None:
    path = written(tmp_path, content)
    assert command.main(["--config", str(path)]) == 2
    with pytest.raises(ConfigError, match=wanted) as raised:
        from_config(path)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"flashmoe_megatron.bench: {raised.value}\n"


@pytest.mark.parametrize(
    ("model", "change", "wanted"),
    [
        ("deepseek-v4", {"swiglu_limit": -1.0}, "clamp_value=-1.0: wanted None or a positive"),
        ("gpt-oss-20b", {"hidden_size": 100}, "hidden=100: must be an int, a positive multiple"),
    ],
)
def test_a_config_of_a_layer_that_is_not_served(
    model: str, change: dict[str, Any], wanted: str, tmp_path: Path, capsys
) -> None:
    path = written(tmp_path, {**CONFIGS[model][0], **change})
    assert command.main(["--config", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"flashmoe_megatron.bench: {wanted}")
    assert printed.err.count("\n") == 1


def test_what_no_layer_here_does_is_said(tmp_path: Path, capsys, monkeypatch) -> None:
    use_few_calls(monkeypatch)
    content = {**CONFIGS["qwen3-30b-a3b"][0], "hidden_act": "mish", "swiglu_limits": [0.0, 7.0]}
    assert command.main(["--config", str(written(tmp_path, content)), "--others"]) == 0
    said = "SwiGLU; not timed: clamps that differ between layers, the function mish\n"
    assert said in capsys.readouterr().out


FLAGS = (
    "--num-layers 4 --hidden-size 2048 --ffn-hidden-size 8192 --moe-ffn-hidden-size 768 --swiglu "
    "--num-experts 128 --moe-router-topk 8 --seq-length 4096 --micro-batch-size 2 --bf16 "
    "--moe-token-dispatcher-type alltoall --lr 1e-4"
)


def test_a_layer_of_megatrons_flags() -> None:
    assert from_megatron(FLAGS.split()).shape == Shape(8192, 2048, 768, 128, 8, gated=True)
    parallel = "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"
    found = from_megatron([*FLAGS.split(), *parallel.split(), "--expert-model-parallel-size", "8"])
    assert (found.shape.tokens, found.num_ranks) == (2048, 8)
    dense = from_megatron(
        FLAGS.replace("--swiglu", "").replace("--moe-ffn", "--no-moe-ffn").split()
    )
    assert (dense.shape.gated, dense.shape.intermediate) == (False, 8192)
    assert (found.form, dense.form) == (
        Form(Activation.SILU, has_bias=True),
        Form(Activation.GELU, has_bias=True),
    )
    gpt_oss = "--quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1"
    assert from_megatron([*FLAGS.replace("--swiglu", gpt_oss).split()]).form == GPT_OSS
    assert from_megatron([*FLAGS.split(), "--disable-bias-linear"]).form == SWIGLU
    shape = command.shape_here(found, None, 1)
    assert shape.num_experts == 16
    assert command.shape_here(found, None, 2).num_experts == 128


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--megatron", "--hidden-size", "64"], "--megatron: got no --moe-ffn-hidden-size, --num-"),
        (["--megatron", *FLAGS.split(), "--num-experts", "many"], "many"),
        (
            ["--megatron", *FLAGS.replace("--swiglu", "--activation-func-clamp-value 7").split()],
            "clamp_value=7.0 with activation=gelu, gated=False: wanted gated=True",
        ),
        (["40x100x64x8x2"], "hidden=100: must be an int, a positive multiple of 64"),
        (["40x64x64x8"], "shape 40x64x64x8: wanted TOKENSxHIDDEN"),
        ([LAYER, "--one-of", "3"], "8 experts: wanted a multiple of 3 ranks"),
        ([LAYER, "--one-of", "0"], "--one-of 0: wanted at least 1"),
        ([LAYER, "--tokens", "8"], "--tokens with a shape, which has them"),
        (["--config", "none.json"], "--config none.json: cannot be read"),
        ([LAYER, "--config", "none.json"], "got a shape and --config, wanted one layer"),
        ([LAYER, "--picture", "bench.jpg"], "wanted a name that ends in .png"),
        ([LAYER, "--picture", "nowhere/bench.png"], "nowhere is no folder"),
        ([LAYER, "--row-bound", "0.5"], "row_bound"),
    ],
)
def test_one_sentence_where_nothing_is_measured(
    arguments, wanted: str, capsys, monkeypatch
) -> None:
    assert command.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert wanted in printed.err
    assert printed.err.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    assert command.main(arguments) == 2
    assert capsys.readouterr().err == ""


def test_a_picture_wants_matplotlib(capsys, monkeypatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.main([LAYER, "--picture", "bench.png"]) == 2
    assert 'pip install "flashmoe-megatron[experiments]"' in capsys.readouterr().err


def test_without_torch_one_line_says_so(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert __main__.main([LAYER]) == 2
    said = capsys.readouterr().err
    assert "torch cannot be imported" in said
    assert said.count("\n") == 1


def test_a_broken_library_is_one_line(capsys, monkeypatch) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise DeviceError("libflashmoe.so is no libflashmoe: it is no shared library")

    monkeypatch.setattr(measure, "kernel_layer", broken)
    assert command.main([LAYER, "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "flashmoe_megatron.bench: libflashmoe.so is no libflashmoe: it is no shared library\n"
    )


def use_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    monkeypatch.setattr(measure, "FEWEST", 1)


def test_rows_of_a_layer(capsys, monkeypatch) -> None:
    use_few_calls(monkeypatch)
    assert command.main([LAYER, "--gated", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"], found["is_reference"], found["num_ranks"]) == ("reference", True, 1)
    assert found["layer"] == vars(Shape(40, 64, 64, 8, 2, gated=True))
    assert found["experts"] == vars(SWIGLU)
    *ours, torchs, megatrons = found["rows"]
    flops = 2 * 3 * 40 * 2 * 64 * 64
    for row in (*ours, torchs):
        assert row["error"] < GATE
        for passes, timing in ((1, row["forward"]), (3, row["both"])):
            assert timing["tflops"] == pytest.approx(
                passes * flops / timing["median_ms"] / 1e9, rel=0.02, abs=6e-5
            )
    # Inputs and two pre-activations, the pre-activations alone, and nothing, of 2 bytes each.
    assert [row["kept"] for row in ours] == [80 * (64 + 128) * 2, 80 * 128 * 2, 0]
    assert torchs["kept"] is None
    assert megatrons["reason"].startswith("is left out: ")
    assert megatrons["forward"] is None


def test_gpt_oss_is_timed_with_all_that_its_experts_compute(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    use_few_calls(monkeypatch)
    config = ["--config", str(written(tmp_path, CONFIGS["gpt-oss-20b"][0]))]
    assert command.main(config) == 0
    printed = capsys.readouterr().out
    assert "experts: quick GEGLU, clamped at 7, 1 added to up rows, biases\n" in printed
    assert "Megatron, alltoall is left out: it is measured with SwiGLU or GELU, without" in printed
    assert command.main([*config, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["experts"] == vars(GPT_OSS)
    assert all(row["error"] < GATE for row in found["rows"][:-1])
    assert found["rows"][-1]["forward"] is None


def test_a_picture_says_what_it_shows(tmp_path: Path, capsys, monkeypatch) -> None:
    use_few_calls(monkeypatch)
    config = written(tmp_path, CONFIGS["nemotron-3-nano"][0])
    picture = tmp_path / "bench.svg"
    arguments = ["--config", str(config), "--others", "torch", "--picture", str(picture)]
    with mpl.rc_context({"svg.fonttype": "none"}):
        assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    drawn = picture.read_text()
    for text in (
        "nemotron_h of config.json: 8192 tokens a rank, hidden 2688",
        "128 experts, top-6",
        "experts: squared ReLU",
        "made small for a CPU: 128 tokens a rank, hidden 256, intermediate 256, 8 experts, top-6",
        "the REFERENCE on a CPU: it tries the command and tells nothing about a GPU",
        f"1 x CPU, torch {torch.__version__}",
    ):
        assert text in printed
        assert text in drawn
    for text in ("forward, ms", "GiB that a forward keeps", "torch, grouped GEMM", "keep inputs"):
        assert text in drawn


class SpoiltLayer(FusedLayer):
    """A layer whose output is a hundredth too large."""

    def __call__(self) -> torch.Tensor:
        return super().__call__() * 1.01


def test_a_wrong_layer_has_no_times_and_a_status(capsys, monkeypatch) -> None:
    def spoilt(problem: Problem, **_: object) -> FusedLayer:
        return SpoiltLayer(problem, ReferenceBackend(problem.config), use_main_grad=False)

    def failing(problem: Problem) -> UnfusedLayer:
        raise RuntimeError("no grouped products\nhere")

    use_few_calls(monkeypatch)
    monkeypatch.setattr(measure, "kernel_layer", spoilt)
    monkeypatch.setitem(measure.OTHERS, "torch", ("torch", failing))
    assert command.main([LAYER, "--others", "torch"]) == 1
    printed = capsys.readouterr().out
    for keep in ("all (auto)", "preactivations", "inputs"):
        assert f"flashmoe, keep {keep} is wrong: error 0.01" in printed
    assert "0.0104, wanted at most 0.006\n" in printed
    assert "torch fails here: RuntimeError: no grouped products\n" in printed


def test_a_wrong_baseline_has_no_times(capsys, monkeypatch) -> None:
    class Spoilt(UnfusedLayer):
        def __call__(self) -> torch.Tensor:
            return super().__call__() * 1.01

    use_few_calls(monkeypatch)
    other = ("torch", lambda problem: Spoilt(problem, use_main_grad=False))
    monkeypatch.setitem(measure.OTHERS, "torch", other)
    assert command.main([LAYER, "--others", "torch"]) == 0
    assert "torch is wrong: error 0.0" in capsys.readouterr().out


def test_a_baseline_that_ends_the_gpu_is_a_row(monkeypatch) -> None:
    def ended(*_: object) -> NoReturn:
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with")

    monkeypatch.setattr(stopwatch, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "empty_cache", ended)
    problem = make_problem(Shape(8, 64, 64, 4, 2, gated=True), device=torch.device("cpu"))
    row = measure._tried("torch", problem, ended)
    assert row.reason == "fails here: RuntimeError: CUDA error: device-side assert triggered"


def test_memory_that_is_not_there() -> None:
    free = 78 * 2**30
    for name in ("qwen3-30b", "mixtral-8x7b", "paper-16k-e128"):
        measure.check_fits(SHAPES[name], 1, free)
    whole = Shape(4096, 7168, 2048, 256, 8, gated=True)
    with pytest.raises(ConfigError, match=r"about \d+ GiB.*--one-of 4, which has 64 experts"):
        measure.check_fits(whole, 1, 30 * 2**30)
    measure.check_fits(whole.one_of(4), 1, 30 * 2**30)
    with pytest.raises(ConfigError, match="wanted fewer --tokens, or more GPUs"):
        measure.check_fits(whole, 1, 2**30)


def test_what_stands_in_for_a_gpu_is_no_gpu_of_the_machine(monkeypatch) -> None:
    monkeypatch.setattr(stopwatch, "HAS_GPU", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert machine_here()["gpus"] == []


def test_gpus_that_cannot_reach_each_other(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: max(one, two) < 2)
    check_peers("kernel", 2)
    with pytest.raises(DeviceError, match="GPU 0 cannot reach the memory of GPU 2"):
        check_peers("kernel", 3)
    check_peers("scheduled", 3)


@pytest.mark.timeout(PATIENCE_S + 20)
def test_two_ranks_with_the_package_alone(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / PACKAGE.name).symlink_to(PACKAGE)
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "flashmoe_megatron.bench", LAYER, "--gated"),
            *("--others", "torch", "--json"),
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["num_ranks"] == 2
    assert all(row["error"] < GATE for row in found["rows"])
    assert len(found["rows"]) == 4
