"""Cards: what is said of a training is what its log and its watch have, and nothing else counts."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_megatron.call import Given
from flashmoe_megatron.doctor import attention
from flashmoe_megatron.hooks import Hooks
from flashmoe_megatron.kernel import backend as kernel
from flashmoe_megatron.kernel import bindings
from tools.bench.bench_training.logs import read_log
from tools.bench.cards import __main__ as cards
from tools.bench.cards import training, watched
from tools.bench.cards.arms import Arm, arms_of
from tools.bench.cards.card import Band, Speed, band_of, card_of, row_need
from tools.bench.cards.models import COUNTED, ITERATIONS, MODELS, RECORDED, Model
from tools.bench.cards.page import markdown
from tools.bench.cards.records import all_todo, folder_of, read_records, todo, write_record

QWEN3 = MODELS[0]
FP8_FLAGS = ("--fp8-format", "--fp8-recipe", "--flashmoe-experts", "--flashmoe-quantize")
OURS = Arm("flashmoe", "whole", is_forced=False)
THEIRS = Arm("alltoall", "pieces", is_forced=False)
MACHINE = {"gpus": ["H100"], "power_limit": "700 W", "driver": "580", "torch": "2.11"}


def log_line(number: int, ms: float, loss: float, total: int = ITERATIONS + RECORDED) -> str:
    """An iteration as Megatron 0.19 prints it."""
    return (
        f" [2026-11-28 16:00:{number:02d}.000000] iteration {number:8d}/{total:8d} | consumed "
        f"samples: {8 * number:12d} | elapsed time per iteration (ms): {ms:.1f} | throughput per "
        f"GPU (TFLOP/s/GPU): 300.0 | learning rate: 1.0E-04 | lm loss: {loss:.6E} | grad norm: 1 |"
    )


def record(ended: str = "complete", shift: float = 0.0, **rest: Any) -> dict[str, Any]:
    """A run's record, whose losses are apart from other runs' by a relative shift."""
    return {
        "ended": ended,
        "losses": [(10 - i / 10) * (1 + shift) for i in range(ITERATIONS)],
        "iteration_ms": [900.0] * (ITERATIONS - COUNTED) + [200.0] * COUNTED,
        "flops": 70e12,
        "busy_ms": 190.0,
        "peak_gib": 50.0,
        "attention": ["cudnn"],
        "commit": "abc",
        "megatron": "def",
        "max_sm_clock": "1980 MHz",
        "date": "2026-11-28T16:00:00",
        **MACHINE,
        **rest,
    }


def test_the_last_ten_of_thirty_iterations_count() -> None:
    times = [900.0] * 20 + [*[200.0] * 9, 300.0] + [5.0] * 3
    speed = Speed.of(times, flops=140e12, tokens=32768, gpus=2)
    assert speed.seconds == pytest.approx(0.2)
    assert speed.range_s == pytest.approx((0.2, 0.3))
    assert speed.tflops == pytest.approx(350)
    assert speed.tokens_per_s == pytest.approx(163840)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_inputs_of_the_formula(model: Model) -> None:
    """The batch that Megatron's formula takes is the one whose tokens a card counts."""
    words = model.arguments(2)
    batch = int(words[words.index("--global-batch-size") + 1])
    sequence = int(words[words.index("--seq-length") + 1])
    assert batch * sequence == 2 * model.tokens
    assert int(words[words.index("--train-iters") + 1]) == ITERATIONS + RECORDED
    assert model.number("num-experts") >= model.number("moe-router-topk")


@pytest.mark.parametrize(
    ("shift", "noise", "inside"),
    [(0.003, None, True), (0.01, None, False), (0.01, 0.006, True), (0.013, 0.006, False)],
)
def test_losses_stay_in_the_band_of_alltoall(
    shift: float, noise: float | None, inside: bool
) -> None:
    records = {OURS.name: record(shift=shift), THEIRS.name: record()}
    if noise is not None:
        records[OURS.noise] = record(shift=noise)
    band = band_of(OURS, records)
    assert band is not None
    assert (band.first_outside is None) == inside
    assert band.inside == (ITERATIONS if inside else 0)
    assert band.largest == pytest.approx(shift)
    assert band.has_noise == (noise is not None)
    assert ("by one bf16 unit alone" in band.said) == (noise is None)


def test_a_loss_that_is_missing_is_outside() -> None:
    ours = [3.0, float("nan"), 1.0]
    band = Band.between(ours, [3.0, 2.0, 1.0], None)
    assert (band.inside, band.of, band.first_outside) == (2, 3, 2)


def test_losses_in_fp8_are_compared_with_those_of_alltoall_in_fp8() -> None:
    """The run that tells rounding's noise is in bfloat16, and widens no band of FP8."""
    ours = Arm("flashmoe", "whole", is_forced=False, variant="fp8-dgrad")
    theirs = Arm("alltoall", "pieces", is_forced=False, variant="fp8")
    records = {
        THEIRS.name: record(shift=0.1),
        OURS.noise: record(shift=0.3),
        theirs.name: record(shift=0.01),
        ours.name: record(shift=0.012),
    }
    band = band_of(ours, records)
    assert band is not None
    assert band.largest == pytest.approx(0.002 / 1.01)
    assert (band.first_outside, band.has_noise) == (None, False)
    of_theirs = band_of(theirs, records)
    assert of_theirs is not None
    assert of_theirs.largest == pytest.approx(0.09 / 1.1)


def test_no_band_without_both_runs() -> None:
    assert band_of(OURS, {OURS.name: record()}) is None
    assert band_of(THEIRS, {THEIRS.name: record()}) is None
    failed = {OURS.name: record(), THEIRS.name: record("failed")}
    assert band_of(OURS, failed) is None


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """First what was never tried, in the order of models; behind all, what failed least often."""
    first, second = QWEN3, MODELS[1]
    folder = folder_of(tmp_path, first, 1)
    arms = arms_of(first, 1)
    write_record(folder, arms[0], record())
    write_record(folder, arms[1], record("failed", tries=2))
    write_record(folder, arms[2], record("time", tries=1))
    write_record(folder, arms[3], record("bound", row_blocks=9, room=8))
    (folder / f"{arms[4].name}.json").write_text('{"ended": "comp')  # a machine was lost
    assert todo(read_records(folder), arms) == [*arms[4:], arms[2], arms[1]]
    names = [arms[6].name, arms[1].name, arms[5].name]
    chosen = all_todo(tmp_path, [first, second], 1, names)
    assert [(model.name, names.index(arm.name)) for model, arm in chosen] == [
        (first.name, 0),
        (second.name, 0),
        (first.name, 2),
        (second.name, 2),
        (first.name, 1),
    ]
    of_one = [f"{second.name}/{names[2]}", f"{first.name}/{names[1]}", names[0]]
    chosen = all_todo(tmp_path, [first, second], 1, of_one)
    assert [f"{model.name}/{arm.name}" for model, arm in chosen] == [
        of_one[0],
        f"{first.name}/{names[0]}",
        f"{second.name}/{names[0]}",
        of_one[1],  # which has failed before
    ]
    order = [(model.name, arm) for model, arm in all_todo(tmp_path, [first, second], 1)]
    fresh = [(first.name, arm) for arm in arms[4:]]
    fresh += [(second.name, arm) for arm in arms_of(second, 1)]
    assert order == [*fresh, (first.name, arms[2]), (first.name, arms[1])]


def test_a_card_says_what_it_misses() -> None:
    records = {OURS.name: record(), THEIRS.name: record("failed")}
    card = card_of(QWEN3, records, 1)
    assert [line["arm"] for line in card["arms"]] == [OURS.name]
    assert card["missing"][THEIRS.name] == "failed"
    assert len(card["missing"]) == len(arms_of(QWEN3, 1)) - 1
    assert set(card["missing"].values()) == {"failed", "not run"}
    text = "\n".join(markdown(card))
    assert "| 0.200 (0.200 to 0.200) | 350 | 163,840 | 190.0 | 50.0 |" in text
    assert "10.00000, 9.10000, 8.10000" in text
    assert f"{THEIRS.name}: failed" in text
    assert QWEN3.cuts in " ".join(markdown(card))
    assert "32,768 tokens a GPU and iteration." in " ".join(text.split())


def test_runs_of_two_machines_are_told_apart() -> None:
    records = {OURS.name: record(), THEIRS.name: record(power_limit="500 W", commit="xyz")}
    card = card_of(QWEN3, records, 1)
    assert card["power_limit"] == ["700 W", "500 W"]
    assert card["commit"] == ["abc", "xyz"]
    assert "abc and xyz" in " ".join(markdown(card))


def test_a_card_says_which_arms_shared_their_host() -> None:
    alone, shared = record(), record(at_once=4)
    said = " ran while the host trained 3 other models, each on GPUs and cores of its own."
    for records, who in (
        ({OURS.name: alone, THEIRS.name: shared}, f"`{THEIRS.name}`"),
        ({OURS.name: shared, THEIRS.name: shared}, "All arms"),
    ):
        assert f" {who}{said}" in " ".join(" ".join(markdown(card_of(QWEN3, records, 1))).split())
    assert said not in " ".join(markdown(card_of(QWEN3, {OURS.name: alone}, 1)))


def test_a_bound_is_a_record_with_its_need() -> None:
    output = "\n".join(
        [
            *[log_line(i, 200, 9) for i in range(1, 17)],
            "RowBoundError: rank 0 was to receive 748 blocks of 128 rows, but its buffers hold 732",
        ]
    )
    result = outcome(output, 1)
    assert (result["ended"], result["row_blocks"], result["room"]) == ("bound", 748, 732)
    assert len(result["losses"]) == 16
    # 65,536 rows in 512 full blocks, and one that is partly empty for each of 128 experts.
    assert row_need(512 + 128, QWEN3, 1) == 1
    kept = record(**result)
    line = card_of(QWEN3, {OURS.name: kept}, 1)["arms"][0]
    assert line["row_need"] == pytest.approx((748 - 128) / 512, abs=1e-3)
    assert line["row_bound"] == 1
    text = "\n".join(markdown(card_of(QWEN3, {OURS.name: kept}, 1)))
    assert "ended by bound behind 16 iterations" in text


def outcome(output: str, status: int | None) -> dict[str, Any]:
    """What a run's output says of its end."""
    return training.outcome_of(output, status, training_log(output))


def training_log(output: str) -> dict[int, Any]:
    """The iterations of an output, read as from a file."""
    path = SimpleNamespace(read_text=lambda errors: output)
    return read_log(path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "more", "status", "ended"),
    [
        (ITERATIONS + RECORDED, "", 0, "complete"),
        (ITERATIONS, "ends while activities are recorded", None, "complete"),
        (ITERATIONS - 1, "", None, "time"),
        (3, "OutOfMemoryError", 1, "failed"),
        (0, "error: got unfused, wanted fused attention in all layers", 1, "unfused"),
    ],
)
def test_how_a_run_ended(count: int, more: str, status: int | None, ended: str) -> None:
    output = "\n".join([*[log_line(i, 200, 9) for i in range(1, count + 1)], more])
    result = outcome(output, status)
    assert result["ended"] == ended
    assert len(result["losses"]) == len(result["iteration_ms"]) == min(count, ITERATIONS)


def test_clocks_are_those_of_the_iterations_that_count() -> None:
    output = "\n".join(log_line(i, 1000, 9) for i in range(1, ITERATIONS + 1))
    samples = "\n".join(
        f"2026/11/28 16:00:{second:02d}.500, {mhz}, {watts}"
        for second, mhz, watts in [(3, 300, 90), (20, 1500, 690), (29, 1400, 700), (31, 200, 80)]
    )
    found = training.clocks_of(f"{samples}\n2026/11/28 16:00:2", output)
    assert found == {"sm_mhz": [1400, 1500], "watts": [690, 700]}
    assert training.clocks_of("", output) == {}
    assert training.clocks_of(samples, "") == {}


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ((True, "3", False, None, False, []), "flash"),
        ((False, None, True, 1, False, []), "cudnn"),
        ((False, None, False, None, True, []), "unfused"),
        ((False, None, False, None, False, []), "none"),
    ],
)
def test_the_attention_that_was_chosen(answer: tuple[Any, ...], name: str, tmp_path: Path) -> None:
    watch = watched.Watch(tmp_path / "seen.json", 5)
    choose = watch.chosen_attention(lambda: answer)
    assert choose() is answer
    choose()
    assert watch.seen["attention"] == [name]
    assert attention.is_fused([name]) == (name in ("flash", "cudnn"))
    assert not attention.is_fused(["cudnn", name, "unfused"])


def test_unfused_attention_ends_a_run_behind_its_first_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(watched.os, "_exit", end)
    watch = watched.Watch(tmp_path / "seen.json", 5)
    step = watch.train_step(lambda: "done")
    with pytest.raises(SystemExit, match="3"):
        step()
    wanted = "error: got no attention of Transformer Engine's, wanted fused attention"
    assert capsys.readouterr().err.startswith(wanted)
    watch.seen["attention"] = ["cudnn"]
    watch.iteration = 0
    assert step() == "done"
    assert json.loads((tmp_path / "seen.json").read_text())["attention"] == ["cudnn"]


def test_a_training_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last iterations are recorded, and the peak is that of those in front of them."""
    calls: list[object] = []
    profiler = SimpleNamespace(
        start=lambda: calls.append("start"),
        stop=lambda: calls.append("stop"),
        profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=list)),
    )
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    monkeypatch.setattr(watched, "flops_of_an_iteration", lambda: 7e13)
    monkeypatch.setattr(watched, "leave", lambda status: calls.append(("leave", status)))
    watch = watched.Watch(tmp_path / "seen.json", 5)
    watch.seen["attention"] = ["cudnn"]
    make = watch.buffers(lambda *_, training: None)
    blocks = iter([640, 600, 640, 630, 620])
    step = watch.train_step(
        lambda: calls.append("step") or make(None, next(blocks), None, training=True)
    )
    for _ in range(5):
        step()
    assert calls == ["step"] * 2 + ["start"] + ["step"] * 3 + ["stop", ("leave", 0)]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["row_blocks"] == 640
    assert (seen["peak_gib"], seen["flops"], seen["busy_ms"]) == (3.0, 7e13, 0.0)


def test_the_kernels_buffers_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.KernelBackend, "_empty", lambda *_: None)
    monkeypatch.setattr(kernel.KernelBackend, "_make_buffers", kernel.KernelBackend._make_buffers)
    watch = watched.Watch(tmp_path / "seen.json", 5)
    watch.watch_launches(kernel)
    backend = object.__new__(kernel.KernelBackend)
    backend._sizes = bindings.FlashMoESizes()
    backend.hooks = Hooks()
    for blocks in (7, 5):
        backend._make_buffers(blocks, Given(*[torch.empty(1)] * 3, True, True), training=True)
    assert watch.seen["row_blocks"] == 7


def test_time_in_which_several_work_counts_once() -> None:
    assert watched.covered([]) == 0
    assert watched.covered([(5, 9), (0, 4), (2, 6), (20, 21), (7, 8)]) == 10


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_flashmoe_has_what_it_is_compared_with(model: Model, gpus: int) -> None:
    arms = arms_of(model, gpus)
    assert len({arm.name for arm in arms}) == len(arms)
    for arm in arms:
        words = arm.flags(model, gpus)
        reference = Arm("alltoall", "pieces", arm.is_forced)
        assert reference in arms
        assert ("--moe-router-force-load-balancing" in words) == arm.is_forced
        assert ("--flashmoe-row-bound" in words) == (arm.graph == "whole")
        assert ("--flashmoe-spare-slots" in words) == (arm.variant == "slots")
        assert gpus > 1 or arm.variant != "slots"
        fp8 = [words[words.index(flag) + 1] for flag in FP8_FLAGS if flag in words]
        assert fp8 == {
            "fp8": ["e4m3", "blockwise", *(["fp8"] if arm.dispatcher == "flashmoe" else [])],
            "fp8-dgrad": ["e4m3", "blockwise", "fp8_dgrad", "step"],
        }.get(arm.variant, [])
        assert arm.graph != "whole" or arm.dispatcher == "flashmoe"


def test_what_cannot_be_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run", "--megatron", str(tmp_path), "--out", str(tmp_path / "out")]
    assert cards.main(arguments) == 2
    assert "pretrain_gpt.py is no file, wanted Megatron-LM's script" in capsys.readouterr().err
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cards.main(arguments) == 2
    assert "no CUDA GPU is usable here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_name_of_no_arm_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    slots = "flashmoe-slots-whole-natural"
    for name, gpus in ((slots, 1), (f"{MODELS[1].name}/{slots}", 2), ("flashmoe", 2)):
        with pytest.raises(SystemExit):
            cards.main(["run", "--gpus", str(gpus), "--arms", OURS.name, name])
        assert f"got --arms {name}, wanted {OURS.name}, " in capsys.readouterr().err


def test_an_arm_that_fails_shows_why_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("raise SystemExit('SomeError: the reason')")
    (tmp_path / "COMMIT").write_text("f8837c0\n")
    program = [sys.executable, str(script)]
    monkeypatch.setattr(training, "command_of", lambda *_: program)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cards.common, "machine", lambda commit: {"commit": commit})
    out = tmp_path / "out"
    arguments = ["run", "--megatron", str(tmp_path), "--out", str(out), "--commit", "abc"]
    arguments += ["--models", QWEN3.name, "--arms", OURS.name]
    for tries in (1, 2):
        assert cards.main(arguments) == 1
        assert "SomeError: the reason" in capsys.readouterr().out
        found = read_records(folder_of(out, QWEN3, 1))[OURS.name]
        assert (found["ended"], found["tries"], found["megatron"]) == ("failed", tries, "f8837c0")
    assert cards.main([*arguments, "--minutes", "0.1"]) == 0
    assert "no time is left" in capsys.readouterr().out
    assert cards.main(["pages", "--out", str(out), "--models", QWEN3.name]) == 0
    assert f"{OURS.name}: failed" in capsys.readouterr().out


TAKES_ITS_TURN = """
import sys, time
from pathlib import Path
from tools.bench.cards.watched import wait_for_turn
folder, name, others = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
begin = folder / "begin"
(folder / f"{name}.imported").touch()
if len(list(folder.glob("*.imported"))) == others:
    time.sleep(0.3)
    begin.touch()

def train():
    with (folder / "order").open("a") as order:
        print(name, "begins" if begin.exists() else "is early", file=order, flush=True)
        print(name, "ends", file=order, flush=True)

wait_for_turn(train)()
"""


def test_a_run_ends_with_its_arms_if_the_file_that_it_waits_for_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pretrain_gpt.py").write_text("import time; time.sleep(600)")
    spawn, processes = training.spawn, []

    def noted(*given: Any, **options: Any) -> Any:
        processes.append(spawn(*given, **options))
        return processes[-1]

    monkeypatch.setattr(training, "spawn", noted)
    monkeypatch.setattr(
        training, "command_of", lambda _, __, script, *___: [sys.executable, str(script)]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    begin = tmp_path / "begin"
    arguments = ["run", "--megatron", str(tmp_path), "--out", str(tmp_path / "out")]
    arguments += ["--models", QWEN3.name, "--ahead", "1"]
    arguments += ["--begin", str(begin), "--begin-minutes", "0.001"]
    with pytest.raises(SystemExit, match=f"^error: --begin {begin} has not come in 0.001 minutes$"):
        cards.main(arguments)
    assert [process.poll() is None for process in processes] == [False]


def test_arms_start_at_the_same_time_and_train_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(TAKES_ITS_TURN)
    names = [arm.name for arm in arms_of(QWEN3, 1)[:3]]

    def command(_: Model, arm: Arm, script: Path, *__: Any) -> list[str]:
        return [sys.executable, str(script), str(tmp_path), arm.name, str(len(names))]

    monkeypatch.setattr(training, "command_of", command)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cards.common, "machine", lambda commit: {"commit": commit})
    arguments = ["run", "--megatron", str(tmp_path), "--out", str(tmp_path / "out")]
    arguments += ["--begin", str(tmp_path / "begin")]  # the last arm that starts makes it
    assert cards.main([*arguments, "--models", QWEN3.name, "--arms", *names]) == 1
    order = (tmp_path / "order").read_text().split("\n")
    assert order == [*(f"{name} {what}" for name in names for what in ("begins", "ends")), ""]
    folder = folder_of(tmp_path / "out", QWEN3, 1)
    assert not list(folder.glob("*.turn"))
    assert {path.suffix for path in folder.iterdir()} == {".json", ".log"}
