"""Options are written once: their checks, flags and tables all come from one field."""

import argparse
import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from flashmoe_megatron.adapters.deepspeed import settings as deepspeed
from flashmoe_megatron.adapters.megatron import settings as megatron
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import (
    BackendOptions,
    FrameworkOptions,
    add_flags,
    make_options,
    options_of,
    read_flags,
)
from tools.tables.options import OPTIONS

KINDS = [BackendOptions, FrameworkOptions, megatron.Settings, deepspeed.Settings]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("keep", "some", "keep='some': wanted one of auto, all, preactivations, inputs"),
        ("keep", None, "keep=None: wanted one of auto, all, "),
        ("reserved_sms", -1, "reserved_sms=-1: wanted an int, at least 0, at most "),
        ("reserved_sms", np.int64(4), "reserved_sms=.* of type numpy.int64: wanted an int"),
        ("reserved_sms", True, "reserved_sms=True: wanted an int"),
        (
            "row_bound",
            0.9,
            "row_bound=0.9: wanted a number of at least 1, .*, or in Megatron auto, or None$",
        ),
        ("row_bound", float("nan"), "row_bound=nan: wanted a number of at least 1"),
        ("symmetric_memory", "nvls", "symmetric_memory='nvls': wanted one of cuda, nvshmem$"),
        ("timeout", 0, "timeout=0: wanted seconds above 0"),
        ("timeout", None, "timeout=None: wanted seconds above 0, 1e-06 to 1e.09$"),
        ("counters", 1, "counters=1: wanted true or false"),
    ],
)
def test_every_option_is_checked(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BackendOptions(**{name: value})


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("timeout_s", "timeout"),
        ("symmetric_backend", "symmetric_memory"),
        ("row_bonud", "row_bound"),
    ],
)
def test_an_unknown_option_gets_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"'{given}' is unknown, the nearest is '{nearest}'"):
        make_options(BackendOptions, {given: 1})


@pytest.mark.parametrize("given", ["calibration", "hot", "", "metrics"])
def test_an_unknown_option_that_is_like_none_gets_all_names(given: str) -> None:
    with pytest.raises(ConfigError, match=f"^option '{given}' is unknown: wanted some of keep, "):
        make_options(BackendOptions, {given: 1})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__module__)
def test_every_default_is_accepted_and_explained(kind: type[BackendOptions]) -> None:
    kind()
    for one in options_of(kind):
        assert one.metadata["help"].endswith(".")
        assert (one.default is None) == bool(one.metadata["unset"]), one.name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__module__)
def test_flags_give_the_options_back(kind: type[BackendOptions]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, kind, "x", names=[one.name for one in options_of(kind)])
    given = read_flags(parser.parse_args([]), kind, "x")
    assert kind(**given) == kind()
    args = parser.parse_args(
        ["--x-reserved-sms", "8", "--x-row-bound", "1.5", "--x-keep", "inputs"]
    )
    chosen = kind(**read_flags(args, kind, "x"))
    assert (chosen.reserved_sms, chosen.row_bound, chosen.keep) == (8, 1.5, "inputs")


def test_ranks_agree_on_whether_there_is_a_file() -> None:
    """Not on its path: hosts may keep it at different places."""
    none, first, second = (
        FrameworkOptions(calibration=path, degree_fit=path).agreed for path in (None, "/a", "/b")
    )
    assert first == second
    assert {name for name, value in none.items() if value != first[name]} == {
        "calibration",
        "degree_fit",
    }


def test_what_the_backend_gets_is_every_option_of_it() -> None:
    changed: dict[str, Any] = {
        "keep": "inputs",
        "reserved_sms": 2,
        "row_bound": 3.0,
        "spare_slots": 1,
        "placement": "lookahead",
        "replica_policy": "popular",
        "degree": "2,4",
        "degree_fit": "fit.json",
        "exchange": "2dh",
        "symmetric_memory": "nvshmem",
        "timeout": 5.0,
        "host_overlap": 1,
        "combine": "routes",
        "host_slots": 2,
        "rank_invariant": True,
    }
    for kind in (megatron.Settings, deepspeed.Settings):
        given = kind(**changed, metrics="none").backend_options()
        assert given == {**changed, "counters": False}
        assert BackendOptions(**given) == BackendOptions(**changed, counters=False)
    assert [one.name for one in dataclasses.fields(BackendOptions)] == list(given)


def test_tables_name_every_flag_and_key() -> None:
    flags, keys = (OPTIONS[whose]() for whose in ("megatron", "deepspeed"))
    parser = argparse.ArgumentParser()
    add_flags(parser, megatron.Settings, megatron.FLAG_PREFIX)
    assert set(re.findall(r"^\| `(--[a-z-]+)` ", flags, re.MULTILINE)) == {
        flag for flag in parser._option_string_actions if flag.startswith("--flashmoe")
    }
    assert "| `enabled` | `false` |" in keys
    assert "`max_tokens_per_rank`" not in keys
