r"""Builds a model by the configuration that verl makes, and trains a step beside alltoall.

verl writes alltoall into the configuration, which ``FLASHMOE_REPLACES`` takes the place of. The
names and shapes that its converter gives a rollout's engine are compared as well::

    python3.12 -m venv verl && . verl/bin/activate
    pip install torch transformers==5.10.0 accelerate peft datasets hydra-core tensorboard ray \
        codetiming dill pandas torchdata pybind11 pylatexenc orjson pyvers jsonschema pytest
    pip install --no-deps verl==0.9.1 tensordict==0.10.0 megatron-core==0.19.2
    FLASHMOE_REPLACES=alltoall PYTHONPATH=. torchrun --nproc_per_node 2 -m tests.external.verl
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.external.beside import (
    LAYERS,
    LOCAL,
    SEQUENCE,
    VOCABULARY,
    compare,
    compare_over_sleeps,
    layers,
)

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
}


def configuration() -> Any:
    """A small configuration of Qwen3-MoE, whose Megatron configuration needs no fused kernel."""
    import transformers

    return transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        architectures=["Qwen3MoeForCausalLM"],
    )


def build(hugging_face: Any, *, is_stock: bool) -> Any:
    """Builds a model by the configuration that verl makes; returns it in float32."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from verl.models.mcore import hf_to_mcore_config

    from flashmoe_megatron.adapters.megatron import keep_dispatcher

    config = hf_to_mcore_config(hugging_face, torch.float32)
    assert config.moe_token_dispatcher_type == "alltoall"
    for name, value in LOCAL.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    if is_stock:
        keep_dispatcher(config)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def handed_over(model: Any, hugging_face: Any) -> dict[str, tuple[int, ...]]:
    """The names and shapes of what verl's converter makes of the experts for a rollout."""
    from verl.models.mcore import get_mcore_weight_converter

    converter = get_mcore_weight_converter(hugging_face, torch.float32)
    found = {}
    for name, parameter in model.named_parameters():
        if ".local_experts." not in name:
            continue
        # It knows grouped experts alone, whose weights are numbered after their name.
        layer, _, rest = name.partition(".local_experts.")
        number, _, linear = rest.partition(".")
        parts = parameter.chunk(2) if "linear_fc1" in linear else [parameter]
        names, tensors = converter.convert_param(f"{layer}.{linear}{number}", [*parts])
        found.update({each: tuple(t.shape) for each, t in zip(names, tensors, strict=True)})
    return found


def main(say: Callable[[str], object] = print) -> None:
    from examples import cpu_bridge
    from flashmoe_megatron.autoload import autoload

    dist.init_process_group("gloo")
    cpu_bridge.enable()
    autoload()  # as torch does where the package is installed
    import verl
    from megatron.core import __version__ as core
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    is_first = dist.get_rank() == 0
    if is_first:
        say(f"verl {verl.__version__}, Megatron-Core {core}")
    hugging_face = configuration()
    models = [build(hugging_face, is_stock=is_stock) for is_stock in (False, True)]
    got, want = compare(*models)
    handed = [handed_over(model, hugging_face) for model in models]
    assert handed[0] == handed[1]
    assert len(handed[0]) == LAYERS * 4 * 3
    slept = compare_over_sleeps(lambda is_stock: build(hugging_face, is_stock=is_stock))
    if is_first:
        say(f"wrapped groups: {slept}")
        say(
            f"Qwen3-MoE: {len([*layers(models[0])])} layers of ours; loss {got:.6f} and alltoall's "
            f"{want:.6f}; {len(handed[0])} matrices of experts for a rollout"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
