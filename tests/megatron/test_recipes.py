"""What the page says of published commands is what a configuration meets that sets the same."""

import contextlib
import dataclasses

import pytest

from flashmoe_megatron.adapters import megatron as adapter
from flashmoe_megatron.errors import ConfigError
from tests.megatron.harness import Layout, transformer_config
from tests.megatron.recipes import published, refused_flags, split_page, tables

FORMER_NAMES = {"cuda_graph_modules": "cuda_graph_scope"}
"""Fields of the newest release of Megatron-Core, and their names in the oldest."""


def test_the_page_has_the_answers() -> None:
    _, table, _ = split_page()
    assert table == tables(), "python -m tests.megatron.recipes writes the page's tables"


def test_configurations_get_these_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt setting is an error here: every one is a field of the installed release.

    Megatron allows FP8 where Transformer Engine is new enough; here it need not be installed.
    """
    from megatron.core.transformer import transformer_config as megatron_config

    monkeypatch.setattr(megatron_config, "is_te_min_version", lambda *_: True)
    adapter.install()
    known = {field.name for field in dataclasses.fields(megatron_config.TransformerConfig)}
    recipes = published()
    assert len(recipes) == 22
    for recipe in recipes:
        settings = {
            name if name in known else FORMER_NAMES[name]: value
            for name, value in recipe.settings.items()
        }
        settings |= {"bf16": True, "num_attention_heads": 64}
        settings["sequence_parallel"] = settings["tensor_model_parallel_size"] > 1
        refused = refused_flags(recipe)
        answer = pytest.raises(ConfigError) if refused else contextlib.nullcontext()
        with answer as said:
            transformer_config(Layout(), "flashmoe", **settings)
        if said is not None:
            assert str(said.value).startswith(refused[0].flag), recipe
