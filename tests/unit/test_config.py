"""What a layer's shape admits."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_megatron.config import (
    BOUNDED_ACTIVATIONS,
    DIM_GRANULE,
    MAX_HOSTS,
    MAX_RANKS,
    MAX_TOPK,
    Activation,
    MoEConfig,
    align_capacity,
)
from flashmoe_megatron.errors import ConfigError


def glu_settings(intermediate: int) -> st.SearchStrategy[dict[str, Any]]:
    blocks = [0, *(block for block in (1, 8, 16, 32, 64, 128) if not intermediate % block)]
    return st.fixed_dictionaries(
        {
            "activation": st.sampled_from(BOUNDED_ACTIVATIONS),
            "clamp_value": st.none() | st.floats(1e-3, 100),
            "linear_offset": st.floats(-10, 10),
            "glu_interleave": st.sampled_from(blocks),
        }
    )


@st.composite
def valid_settings(draw: st.DrawFn) -> dict[str, Any]:
    num_ranks = draw(st.integers(1, MAX_RANKS))
    num_experts = num_ranks * draw(st.integers(1, 32))
    intermediate, gated = DIM_GRANULE * draw(st.integers(1, 256)), draw(st.booleans())
    return {
        "hidden": DIM_GRANULE * draw(st.integers(1, 128)),
        "intermediate": intermediate,
        "num_experts": num_experts,
        "topk": draw(st.integers(1, min(MAX_TOPK, num_experts))),
        "activation": draw(st.sampled_from(Activation)),
        "gated": gated,
        "num_ranks": num_ranks,
        "max_tokens": draw(st.integers(1, 2**20)),
        **(draw(st.just({}) | glu_settings(intermediate)) if gated else {}),
    }


@given(valid_settings())
def test_valid_settings_are_accepted(settings: dict[str, Any]):
    config = MoEConfig(**settings)
    assert config.num_local_experts * config.num_ranks == config.num_experts
    assert config.fc1_rows == config.intermediate * (1 + config.gated)
    assert MoEConfig(**settings) == config
    assert hash(MoEConfig(**settings)) == hash(config)


INVALID = {
    "hidden": st.integers(max_value=0) | st.integers(1, 10**6).filter(lambda n: n % DIM_GRANULE),
    "intermediate": st.integers(max_value=0)
    | st.integers(1, 10**6).filter(lambda n: n % DIM_GRANULE),
    "num_ranks": st.integers(max_value=0) | st.integers(min_value=MAX_RANKS * MAX_HOSTS + 1),
    "num_experts": st.integers(max_value=0),
    "topk": st.integers(max_value=0) | st.integers(min_value=MAX_TOPK + 1),
    "max_tokens": st.integers(max_value=0),
}


@pytest.mark.parametrize("name", INVALID)
@given(data=st.data(), settings=valid_settings())
def test_invalid_settings_are_refused_by_name(
    name: str, data: st.DataObject, settings: dict[str, Any]
):
    settings[name] = value = data.draw(INVALID[name])
    with pytest.raises(ConfigError) as refusal:
        MoEConfig(**settings)
    message = str(refusal.value)
    assert str(value) in message
    assert message.startswith(f"{name}={value}: ")
    assert "must be an int" in message


@pytest.mark.parametrize(
    "name", ["hidden", "intermediate", "num_experts", "topk", "num_ranks", "max_tokens"]
)
def test_an_integer_of_numpy_is_refused_as_no_int(name: str):
    settings = {"hidden": 64, "intermediate": 64, "num_experts": 8, "topk": 2}
    settings |= {"activation": "silu", "gated": True, "num_ranks": 1, "max_tokens": 64}
    assert MoEConfig(**settings)
    value = np.int64(settings[name])
    words = rf"^{name}=.*{int(value)}\)? of type numpy.int64: .*must be an int, "
    with pytest.raises(ConfigError, match=words):
        MoEConfig(**{**settings, name: value})


NO_TERMS = "wanted gated=True and one of silu, quick_gelu"
BAD_GLU = {
    "zero clamp": ({"clamp_value": 0.0}, "clamp_value=0.0: wanted None or a positive number"),
    "negative clamp": ({"clamp_value": -7}, "clamp_value=-7: wanted None or a positive number"),
    "nan clamp": ({"clamp_value": math.nan}, "clamp_value=nan: wanted None or a positive number"),
    "tiny clamp": ({"clamp_value": 1e-60}, "clamp_value=1e-60: wanted None or a positive number"),
    "clamp that is none": ({"clamp_value": True}, "clamp_value=True: wanted None or a positive"),
    "infinite offset": ({"linear_offset": math.inf}, "linear_offset=inf: wanted a number"),
    "clamp without gate": ({"clamp_value": 7.0, "gated": False}, f"clamp_value=7.0.*{NO_TERMS}"),
    "clamped gelu": ({"clamp_value": 7.0, "activation": "gelu"}, f"clamp_value=7.0.*{NO_TERMS}"),
    "offset without gate": ({"linear_offset": 1.0, "gated": False}, f"linear_offset.*{NO_TERMS}"),
    "offset relu": ({"linear_offset": 1.0, "activation": "relu"}, f"linear_offset.*{NO_TERMS}"),
    "blocks without gate": ({"glu_interleave": 32, "gated": False}, "there are no up rows"),
    "no divisor": ({"glu_interleave": 128}, "divides intermediate=192"),
    "no power of two": ({"glu_interleave": 48}, "glu_interleave=48: wanted 0, 1, or a power"),
    "small block": ({"glu_interleave": 4}, "glu_interleave=4: wanted 0, 1, or a power of two"),
    "negative block": ({"glu_interleave": -1}, "glu_interleave=-1: must be an int"),
    "no int": ({"glu_interleave": 32.0}, "glu_interleave=32.0: must be an int"),
}


@pytest.mark.parametrize(("changes", "words"), BAD_GLU.values(), ids=BAD_GLU)
def test_what_a_gated_expert_cannot_have_is_refused(changes: dict[str, Any], words: str):
    settings = {"hidden": 64, "intermediate": 192, "num_experts": 8, "topk": 2, "num_ranks": 1}
    settings |= {"activation": "silu", "gated": True, "max_tokens": 64, **changes}
    with pytest.raises(ConfigError, match=words):
        MoEConfig(**settings)


@given(valid_settings())
def test_experts_must_divide_evenly(settings: dict[str, Any]):
    if settings["num_ranks"] == 1:
        return
    settings["num_experts"] += 1
    with pytest.raises(ConfigError, match="num_experts"):
        MoEConfig(**settings)


@given(valid_settings().filter(lambda settings: settings["num_experts"] < MAX_TOPK))
def test_topk_must_not_exceed_the_experts(settings: dict[str, Any]):
    settings["topk"] = settings["num_experts"] + 1
    with pytest.raises(ConfigError, match="topk"):
        MoEConfig(**settings)


@given(st.integers(0, 10**9), st.integers(1, 4096))
def test_aligned_capacity_is_the_next_multiple(capacity: int, tile: int):
    aligned = align_capacity(capacity, tile)
    assert aligned % tile == 0
    assert capacity <= aligned < capacity + tile


def test_negative_capacity_is_refused():
    with pytest.raises(ConfigError, match="capacity=-1"):
        align_capacity(-1)
