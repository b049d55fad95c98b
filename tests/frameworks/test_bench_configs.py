"""The bench reads the layer of a model from what transformers itself saves."""

from pathlib import Path

import pytest
import transformers

from flashmoe_megatron.bench.described import from_config
from flashmoe_megatron.errors import ConfigError

LAYERS = {
    "Qwen3MoeConfig": (2048, 768, 128, 8),
    "Qwen2MoeConfig": (2048, 1408, 60, 4),
    "MixtralConfig": (4096, 14336, 8, 2),
    "DeepseekV3Config": (7168, 2048, 256, 8),
    "GptOssConfig": (2880, 2880, 128, 4),
    "OlmoeConfig": (2048, 2048, 64, 8),
    "PhimoeConfig": (4096, 6400, 16, 2),
    "Glm4MoeConfig": (4096, 1408, 128, 8),
    "Llama4Config": (5120, 8192, 16, 1),
    "Qwen3VLMoeConfig": (2048, 1408, 60, 4),
    "Qwen3_5MoeConfig": (2048, 512, 256, 8),
    "Qwen3NextConfig": (2048, 512, 512, 10),
    "Ernie4_5_MoeConfig": (2560, 1536, 64, 6),
    "MiniMaxM2Config": (3072, 1536, 256, 8),
    "NemotronHConfig": (4096, 7688, 8, 2),
    "LongcatFlashConfig": (6144, 2048, 512, 12),
    "DbrxConfig": (2048, 3584, 4, 1),
    "JambaConfig": (4096, 14336, 16, 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_saved_config(name: str, tmp_path: Path) -> None:
    getattr(transformers, name)().save_pretrained(tmp_path)
    found = from_config(tmp_path / "config.json").shape
    sizes = (found.hidden, found.intermediate, found.num_experts, found.topk)
    assert sizes == LAYERS[name]
    assert found.gated == (name != "NemotronHConfig")


@pytest.mark.parametrize("name", ["LlamaConfig", "Gemma4TextConfig", "BertConfig"])
def test_a_saved_config_without_experts(name: str, tmp_path: Path) -> None:
    getattr(transformers, name)().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no experts"):
        from_config(tmp_path / "config.json")
