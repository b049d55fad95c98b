"""The calibration file: what is written is read back, and everything else is refused by name."""

import json
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.measured.calibration import (
    Calibration,
    Entry,
    load_calibration,
    read_entries,
    write_entries,
)
from flashmoe_megatron.telemetry.metrics import compute_metrics
from flashmoe_megatron.telemetry.totals import Layout, Totals
from tests.unit import cases, records

GPU = "NVIDIA H200"
CONFIG = records.CONFIG


def entry(**changes: Any) -> Entry:
    made = Entry.of(
        CONFIG, num_tokens=256, gpu=GPU, dtype="bfloat16", direction="forward", time_ms=0.8
    )
    return replace(made, **changes)


def load(path: Path, **changes: Any) -> Calibration:
    wanted = {"configs": [CONFIG], "gpu": GPU, "dtype": "bfloat16", **changes}
    return load_calibration(path, **wanted)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    write_entries(path, [entry(), entry(direction="backward", time_ms=2.0)])
    return path


def test_overlap_efficiency_is_t2_over_tn(file: Path) -> None:
    # The same layer on 4 ranks: the file's shape is that of the layer, not of the run.
    config = cases.make_config(num_ranks=4)
    places = {3: records.place(config=config)}
    totals = Totals(Layout(places), places)
    shape = {"expert_rows": (1, 2), "rows_pulled": (1,) * 4, "results_pushed": (1,) * 4}
    for _ in range(2):
        totals.add(records.record(**shape))  # 1 ms each
    calibration = load(file, configs=[config], num_tokens=256)
    values = compute_metrics(totals, ["overlap_efficiency"], calibration)
    assert values == {"flashmoe/forward/overlap_efficiency": pytest.approx(0.8)}


def test_other_numbers_of_tokens_have_no_efficiency(file: Path) -> None:
    calibration = load(file)
    assert calibration.time_ms(CONFIG, "forward", num_tokens=256) == 0.8
    assert calibration.time_ms(CONFIG, "forward", num_tokens=255) == 0.8
    assert calibration.time_ms(CONFIG, "forward", num_tokens=250) is None
    assert calibration.time_ms(CONFIG, "backward", num_tokens=256) == 2.0


def test_a_run_that_cannot_tell_how_it_runs_takes_the_file_s_word(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_entries(path, [entry(bounded=True, keep="inputs", grads="main_grad")])
    ran_as = {"bounded": True, "keep": "inputs", "grads": "main_grad"}
    for calibration in (load(path), load(path, keep="inputs"), load(path, **ran_as)):
        assert calibration.time_ms(CONFIG, "forward", num_tokens=256) == 0.8


def test_a_backward_of_another_kind_has_no_efficiency(file: Path) -> None:
    write_entries(file, [entry(direction="backward", grads="main_grad", time_ms=3.0)])
    assert load(file, grads="own").time_ms(CONFIG, "backward", num_tokens=256) is None


def test_a_layer_that_ran_in_another_way_is_replaced(file: Path) -> None:
    write_entries(file, [entry(bounded=True, time_ms=0.9)])
    assert [(one.direction, one.bounded, one.time_ms) for one in read_entries(file)] == [
        ("forward", True, 0.9),
        ("backward", False, 2.0),
    ]


def test_a_later_measurement_replaces_its_own_kind_alone(file: Path) -> None:
    write_entries(file, [entry(time_ms=0.7), entry(gpu="another", time_ms=9.0)])
    assert [(one.gpu, one.direction, one.time_ms) for one in read_entries(file)] == [
        (GPU, "forward", 0.7),
        (GPU, "backward", 2.0),
        ("another", "forward", 9.0),
    ]
    assert [path.name for path in file.parent.iterdir()] == [file.name], "a draft was left behind"


def test_a_file_is_for_all_who_train_on_the_machine(file: Path) -> None:
    """Whoever has measured: temporary files are their owner's alone."""
    assert file.stat().st_mode & 0o777 == 0o644
    write_entries(file, [entry(time_ms=3.0)])
    assert file.stat().st_mode & 0o777 == 0o644


def test_writing_refuses_to_replace_another_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"loss": 3.0}')
    with pytest.raises(ConfigError, match="wanted an object of format, version and entries"):
        write_entries(path, [entry()])
    assert path.read_text() == '{"loss": 3.0}'


def test_a_failed_write_leaves_the_file_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_text()

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match=r"cannot be written: No space left"):
        write_entries(file, [entry(time_ms=0.1)])
    assert file.read_text() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "NVIDIA H100"}, "has gpu 'NVIDIA H200' and not 'NVIDIA H100'"),
        ({"dtype": "float32"}, "has dtype 'bfloat16' and not 'float32'"),
        ({"num_tokens": 512}, "has num_tokens 256 and not 512"),
        ({"bounded": True}, "has bounded False and not True"),
        ({"keep": "inputs"}, "has keep 'all' and not 'inputs'"),
        ({"grads": "main_grad"}, "has grads 'own' and not 'main_grad'"),
        ({"configs": [replace(CONFIG, hidden=128)]}, "has hidden 64 and not 128"),
        ({"configs": [CONFIG, replace(CONFIG, topk=4)]}, "has topk 2 and not 4"),
        ({"configs": [replace(CONFIG, clamp_value=7.0)]}, "has clamp_value None and not 7.0"),
        ({"configs": [replace(CONFIG, linear_offset=1.0)]}, "has linear_offset 0.0 and not 1.0"),
        ({"configs": [replace(CONFIG, glu_interleave=1)]}, "has glu_interleave 0 and not 1"),
    ],
)
def test_a_file_of_another_run_is_refused(file: Path, changes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        load(file, **changes)
    assert str(file) in str(raised.value)
    assert "flashmoe_megatron.calibrate" in str(raised.value)


def test_only_two_ranks_can_be_calibrated() -> None:
    with pytest.raises(ConfigError, match="calibrated on 4 ranks, wanted 2"):
        Entry.of(
            cases.make_config(num_ranks=4),
            num_tokens=1,
            gpu=GPU,
            dtype="bfloat16",
            direction="forward",
            time_ms=1.0,
        )


def content(**changes: Any) -> dict[str, Any]:
    return {
        "format": "flashmoe-calibration",
        "version": 3,
        "entries": [{**asdict(entry()), **changes}],
    }


BROKEN: dict[str, tuple[Any, str]] = {
    "nan": ('{"format": NaN}', "NaN is no number"),
    "no JSON": ("T(2) = 0.8 ms", "cannot be read"),
    "nested": ("[" * 100_000, "cannot be read"),
    "a list": ([], "got list, wanted an object"),
    "other keys": ({**content(), "note": ""}, "'note', 'version'"),
    "format": ({**content(), "format": "flashmoe"}, "format 'flashmoe'"),
    "older": ({**content(), "version": 2}, "version 2, wanted .* of version 3; measure again"),
    "newer": ({**content(), "version": 4}, "version 4"),
    "empty": ({**content(), "entries": []}, "no list of entries"),
    "no list": ({**content(), "entries": {}}, "no list of entries"),
    "no object": ({**content(), "entries": [3]}, "entry 0: got int"),
    "missing": ({**content(), "entries": [{"hidden": 64}]}, r"entry 0: got \['hidden'\]"),
    "unknown": (content(tile=128), "got .*'tile'"),
    "string": (content(hidden="64"), "hidden is '64', wanted int"),
    "bool": (content(topk=True), "topk is True, wanted int"),
    "int": (content(gated=1), "gated is 1, wanted bool"),
    "float": (content(num_tokens=256.0), "num_tokens is 256.0, wanted int"),
    "zero": (content(time_ms=0), "time_ms is 0, wanted above 0"),
    "negative": (content(time_ms=-1.0), "time_ms is -1.0, wanted above 0"),
    "too large": (content(time_ms=10**400), "wanted above 0, at most"),
    "overflow": (json.dumps(content()).replace("0.8", "1e999"), "time_ms is inf, wanted above 0"),
    "activation": (content(activation="swish"), "entry 0: activation='swish': wanted one of"),
    "width": (content(hidden=-64), "entry 0: hidden=-64: must be an int, a positive multiple"),
    "clamp": (content(clamp_value=-7.0), "entry 0: clamp_value=-7.0: wanted None or a positive"),
    "offset": (content(linear_offset="1"), "linear_offset is '1', wanted float"),
    "blocks": (content(glu_interleave=3), "entry 0: glu_interleave=3: wanted 0, 1, or a power"),
    "direction": (content(direction="both"), "direction is 'both', wanted one of"),
    "dtype": (content(dtype="torch.bfloat16"), "dtype is 'torch.bfloat16'"),
    "gpu": (content(gpu=""), "gpu is empty"),
    "bounded": (content(bounded=1.2), "bounded is 1.2, wanted bool"),
    "keep": (content(keep="some"), "keep is 'some', wanted one of"),
    "grads": (content(grads="bf16"), "grads is 'bf16', wanted one of"),
    "twice": ({**content(), "entries": content()["entries"] * 2}, "is there twice"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(name: str, tmp_path: Path) -> None:
    value, words = BROKEN[name]
    path = tmp_path / "calibration.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(ConfigError, match=words) as raised:
        read_entries(path)
    assert str(path) in str(raised.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: .*No such file"):
        read_entries(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read: .*directory"):
        read_entries(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_entries(tmp_path / "none" / "calibration.json", [entry()])


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(pickle.dumps({"entries": [1.0]}))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_entries(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(asdict(entry()))), values)
def test_any_value_is_read_back_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    path = tmp_path_factory.mktemp("any") / "calibration.json"
    path.write_text(json.dumps(content(**{name: value})))
    try:
        (read,) = read_entries(path)
    except ConfigError:
        return
    assert getattr(read, name) == value


@given(
    st.floats(1e-9, 1e9, allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, time_ms: float, gpu: str
) -> None:
    path = tmp_path_factory.mktemp("file") / "calibration.json"
    wanted = entry(time_ms=time_ms, gpu=gpu)
    write_entries(path, [wanted])
    assert read_entries(path) == [wanted]
