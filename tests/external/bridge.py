r"""Builds recipes of Megatron-Bridge by its own functions, and trains a step beside alltoall.

Bridge needs Python 3.12, and most of it imports Transformer Engine, for which stand-ins are enough
here; Megatron's own layers are its local ones. Each recipe is cut to two layers of small experts on
two ranks, goes through Bridge's checks, and has to have our experts in the model itself::

    python3.12 -m venv bridge && . bridge/bin/activate
    pip install torch transformers==5.12.1 omegaconf hydra-core datasets peft accelerate requests \
        importlib_metadata einops rich tensorboard regex six tqdm pyyaml sentencepiece pillow pytest
    pip install --no-deps megatron-bridge==0.6.2 megatron-core==0.19.2 diffusers
    FLASHMOE_REPLACES=alltoall,flex PYTHONPATH=. torchrun --nproc_per_node 2 \
        -m tests.external.bridge
"""

import importlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.external.beside import LAYERS, LOCAL, SEQUENCE, VOCABULARY, compare, layers

ABSENT = (
    "transformer_engine",
    "megatron.energon",
    "webdataset",
    "nvidia_resiliency_ext",
    "modelopt",
)
"""Packages that Bridge imports and that nothing here calls."""
BESIDE = (
    "megatron.bridge.diffusion",
    "megatron.bridge.recipes.flux",
    "megatron.bridge.recipes.wan",
)
"""Parts of Bridge for diffusion models, which need more such packages."""


@dataclass(frozen=True)
class Recipe:
    """A row of the page's table: its words, the module below megatron.bridge, and the function."""

    row: str
    module: str
    function: str


PERF, OWN = "perf_recipes", "recipes"
RECIPES = (
    Recipe(
        f"Qwen3-30B-A3B, BF16, 16, {PERF}",
        f"{PERF}.qwen.h100.qwen3_moe",
        "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config",
    ),
    Recipe(
        f"Qwen3-30B-A3B, FP8 by tensor, 16, {PERF}",
        f"{PERF}.qwen.h100.qwen3_moe",
        "qwen3_30b_a3b_pretrain_16gpu_h100_fp8cs_config",
    ),
    Recipe(
        f"Qwen3-30B-A3B, BF16, EP 8, 32, {PERF}",
        f"{PERF}.qwen.h100.qwen3_moe",
        "qwen3_30b_a3b_pretrain_32gpu_h100_bf16_dev_config",
    ),
    Recipe(
        f"Qwen3-30B-A3B, BF16, 8, {OWN}",
        f"{OWN}.qwen.h100.qwen3_moe",
        "qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config",
    ),
    Recipe(
        f"Qwen3-235B-A22B, BF16, 256, {PERF}",
        f"{PERF}.qwen.h100.qwen3_moe",
        "qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config",
    ),
    Recipe(
        f"Qwen3-235B-A22B, FP8 by tensor, 256, {PERF}",
        f"{PERF}.qwen.h100.qwen3_moe",
        "qwen3_235b_a22b_pretrain_256gpu_h100_fp8cs_config",
    ),
    Recipe(
        f"Qwen3-235B-A22B, BF16, 256, {OWN}",
        f"{OWN}.qwen.h100.qwen3_moe",
        "qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config",
    ),
    Recipe(
        f"DeepSeek-V3, BF16, 1024, {PERF}",
        f"{PERF}.deepseek.h100.deepseek_v3",
        "deepseek_v3_pretrain_1024gpu_h100_bf16_config",
    ),
    Recipe(
        f"DeepSeek-V3, FP8 by block, 1024, {PERF}",
        f"{PERF}.deepseek.h100.deepseek_v3",
        "deepseek_v3_pretrain_1024gpu_h100_fp8sc_config",
    ),
    Recipe(
        f"GPT-OSS-120B, BF16, 64, {PERF}",
        f"{PERF}.gpt_oss.h100.gpt_oss",
        "gpt_oss_120b_pretrain_64gpu_h100_bf16_config",
    ),
    Recipe(
        f"GPT-OSS-20B, BF16, 16, {OWN}",
        f"{OWN}.gpt_oss.h100.gpt_oss",
        "gpt_oss_20b_pretrain_16gpu_h100_bf16_config",
    ),
    Recipe(
        f"Moonlight-16B-A3B, BF16, 8, {OWN}",
        f"{OWN}.moonlight.h100.moonlight_16b",
        "moonlight_16b_pretrain_8gpu_h100_bf16_config",
    ),
    Recipe(
        f"Kimi-K2, BF16, 1024, {PERF}",
        f"{PERF}.kimi.h100.kimi_k2",
        "kimi_k2_pretrain_1024gpu_h100_bf16_config",
    ),
    Recipe(
        f"Qwen3-Next-80B-A3B, BF16, 128, {PERF}",
        f"{PERF}.qwen.h100.qwen3_moe",
        "qwen3_next_80b_a3b_pretrain_128gpu_h100_bf16_config",
    ),
    Recipe(
        f"GLM-5.1, BF16, fine-tuning, 416, {PERF}",
        f"{PERF}.glm_moe_dsa.h100.glm5",
        "glm51_sft_416gpu_h100_bf16_config",
    ),
    Recipe(
        f"Nemotron-3-Nano-30B, BF16, 16, {PERF}",
        f"{PERF}.nemotronh.h100.nemotronh",
        "nemotron_3_nano_pretrain_16gpu_h100_bf16_config",
    ),
)
"""The page's recipes."""

CUT = {
    "num_layers": LAYERS,
    "hidden_size": 128,
    "ffn_hidden_size": 128,
    "moe_ffn_hidden_size": 64,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "num_attention_heads": 4,
    "seq_length": SEQUENCE,
    "vocab_size": VOCABULARY,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "mtp_num_layers": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "experimental_attention_variant": None,  # gated delta nets and sparse attention need kernels
    "linear_attention_freq": None,
    "layernorm_zero_centered_gamma": False,  # nor do local layers have it
    "moe_router_force_load_balancing": False,  # its draws go on from one model to the next
}
"""Sizes of a model for two ranks; what the recipe chooses besides stays."""


def prepare() -> None:
    """Imports Bridge as it is where a GPU and Transformer Engine are missing."""
    from examples import cpu_bridge
    from flashmoe_megatron.autoload import autoload
    from tests.external.stand_ins import say_installed

    cpu_bridge.enable()
    autoload()  # as torch does where the package is installed
    say_installed("transformer-engine", "2.13.0")
    stand_in(ABSENT)
    logging.disable(logging.WARNING)
    importlib.import_module("megatron.bridge")
    importlib.import_module("megatron.bridge.training.model_load_save")


def stand_in(absent: tuple[str, ...]) -> None:
    """Imports Megatron, which then knows what is missing, and puts stand-ins in its place."""
    from tests.external.stand_ins import StandIns

    for module in ("models.gpt", "models.gpt.gpt_layer_specs", "distributed", "optimizer"):
        importlib.import_module(f"megatron.core.{module}")
    importlib.import_module("megatron.core.transformer.moe.moe_layer")
    sys.meta_path.append(StandIns(absent))
    sys.meta_path.insert(0, StandIns(BESIDE))


def no_hub() -> None:
    """Lets transformers make configurations by their model's name, for there is no hub here."""
    import transformers

    def make(name: str, *_: Any, **__: Any) -> Any:
        sizes = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
        if "gpt-oss" in name:
            return transformers.GptOssConfig(**sizes, architectures=["GptOssForCausalLM"])
        if "Qwen3-Next" in name:
            return transformers.Qwen3NextConfig(
                **sizes, architectures=["Qwen3NextForCausalLM"], layer_types=None
            )
        if "Nemotron" in name:
            return transformers.NemotronHConfig(
                vocab_size=VOCABULARY, architectures=["NemotronHForCausalLM"]
            )
        if "GLM-5" in name:
            return transformers.GlmMoeDsaConfig(
                **sizes, architectures=["GlmMoeDsaForCausalLM"], indexer_rope_interleave=True
            )
        if "Qwen3" in name:
            return transformers.Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"])
        return transformers.DeepseekV3Config(**sizes, architectures=["DeepseekV3ForCausalLM"])

    transformers.AutoConfig.from_pretrained = make


class Mixer(torch.nn.Module):
    """A matrix in the place of Mamba's mixer, whose kernels need a GPU."""

    def __init__(self, config: Any, d_model: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(d_model, d_model) * config.init_method_std)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states @ self.weight, None


def make_hybrid_local(provider: Any) -> None:
    """Cuts a model of Mamba, experts and attention to one, two and one layers, all local."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules as Parts

    local = get_gpt_layer_local_spec(
        num_experts=provider.num_moe_experts,
        moe_grouped_gemm=False,
        normalization=provider.normalization,
    ).submodules
    attention = Parts(
        input_layernorm=local.input_layernorm,
        self_attention=local.self_attention,
        self_attn_bda=local.self_attn_bda,
    )
    experts = Parts(pre_mlp_layernorm=local.pre_mlp_layernorm, mlp=local.mlp, mlp_bda=local.mlp_bda)
    mamba = MambaLayerSubmodules(mixer=ModuleSpec(module=Mixer), mamba_bda=local.self_attn_bda)
    hybrid_block.TENorm = WrappedTorchNorm
    provider.hybrid_layer_pattern, provider.num_layers = "ME*E", None
    provider.hybrid_stack_spec = ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            moe_layer=ModuleSpec(module=TransformerLayer, submodules=experts),
        ),
    )


def build(recipe: Recipe, *, is_stock: bool, is_named: bool = False) -> Any:
    """Builds the model of a recipe by Bridge, cut and in float32; returns it.

    The checks are those of Bridge before a training: of overlaps, and those of its provider. With
    ``is_named`` the recipe gets our own name, and Bridge's functions that look at it or write it.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    from flashmoe_megatron.adapters.megatron import keep_dispatcher

    destroy_moe_metrics_tracker()  # it has room for as many layers as the model before
    module = importlib.import_module(f"megatron.bridge.{recipe.module}")
    container = getattr(module, recipe.function)()
    provider = container.model
    for name, value in {**CUT, **LOCAL}.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    if provider.recompute_modules:  # the other parts ask for Transformer Engine
        parts = {"core_attn", "mlp", "moe"}
        provider.recompute_modules = [each for each in provider.recompute_modules if each in parts]
    if getattr(provider, "num_query_groups", None):
        provider.num_query_groups = provider.num_attention_heads
    if isinstance(getattr(provider, "moe_layer_freq", None), list):
        provider.moe_layer_freq = [1] * LAYERS
    if getattr(provider, "moe_shared_expert_intermediate_size", None):
        provider.moe_shared_expert_intermediate_size = 64
    if hasattr(provider, "hybrid_stack_spec"):
        make_hybrid_local(provider)
    provider.transformer_layer_spec = lambda config, **_: get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    if is_stock:
        provider.moe_token_dispatcher_type = "alltoall"  # what flex would need is not here
        keep_dispatcher(provider)
    if is_named:
        provider.moe_token_dispatcher_type = "flashmoe"
        flex = importlib.import_module("megatron.bridge.training.flex_dispatcher_backend")
        flex.apply_flex_dispatcher_backend(provider, "hybridep")
        dropping = importlib.import_module("megatron.bridge.training.utils.moe_token_drop")
        dropping.apply_moe_token_drop(provider, -1.0, moe_pad_expert_input_to_capacity=False)
        assert container.comm_overlap.overlap_moe_expert_parallel_comm
    provider.bf16 = True  # Bridge's checks want half precision; the comparison is in float32
    if container.comm_overlap is not None:
        container.comm_overlap.finalize()
        container.comm_overlap.data_parallel_size = dist.get_world_size()
        container.comm_overlap.setup(provider, container.optimizer, container.ddp)
    provider.finalize()
    provider.bf16 = False
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    return provider.provide(pre_process=True, post_process=True)


def check(recipe: Recipe, *, is_named: bool = False) -> str:
    """Builds and runs a recipe with our layers and with Megatron's; returns a line.

    Raises:
        AssertionError: A layer is not ours, or a number is another.
    """
    models = [build(recipe, is_stock=False, is_named=is_named), build(recipe, is_stock=True)]
    got, want = compare(*models)
    ours = [*layers(models[0])]
    name = ours[0].config.moe_token_dispatcher_type
    overlaps = ours[0].config.overlap_moe_expert_parallel_comm
    return (
        f"{recipe.row}: the field says {name}{', overlapped' if overlaps else ''}; "
        f"{len(ours)} layers of ours; loss {got:.6f} and alltoall's {want:.6f}"
    )


def check_conversion(recipe: Recipe, folder: Path) -> str:
    """Converts a Qwen3-MoE to Hugging Face and back; returns a line.

    Raises:
        AssertionError: A weight is another than alltoall's, or not what was saved.
    """
    from megatron.bridge import AutoBridge
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=CUT["hidden_size"],
        intermediate_size=CUT["ffn_hidden_size"],
        moe_intermediate_size=CUT["moe_ffn_hidden_size"],
        num_hidden_layers=LAYERS,
        num_attention_heads=CUT["num_attention_heads"],
        num_key_value_heads=CUT["num_attention_heads"],
        head_dim=CUT["hidden_size"] // CUT["num_attention_heads"],
        num_experts=CUT["num_moe_experts"],
        num_experts_per_tok=CUT["moe_router_topk"],
        architectures=["Qwen3MoeForCausalLM"],
    )
    bridge = AutoBridge.from_hf_config(config)
    ours, stock = (build(recipe, is_stock=is_stock) for is_stock in (False, True))
    exported, wanted = (
        dict(bridge.export_hf_weights([model], cpu=True, show_progress=False))
        for model in (ours, stock)
    )
    assert list(exported) == list(wanted)
    assert all(torch.equal(exported[name], wanted[name]) for name in wanted)
    of_experts = [name for name in exported if ".experts." in name]
    assert len(of_experts) == LAYERS * CUT["num_moe_experts"] * 3
    load_again(bridge, config, [ours], exported, folder)
    return (
        f"{len(exported)} tensors to Hugging Face, {len(of_experts)} of experts, with the bits of "
        "alltoall's, and back"
    )


def load_again(
    bridge: Any, config: Any, models: list[Any], exported: dict[str, torch.Tensor], folder: Path
) -> None:
    """Saves what was exported of models as Hugging Face does, and loads it into them. Collective.

    Raises:
        AssertionError: A weight is another than before.
    """
    from safetensors.torch import save_file

    if dist.get_rank() == 0:
        config.save_pretrained(folder)
        weights = {name: tensor.contiguous() for name, tensor in exported.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    named = [(name, each) for model in models for name, each in model.named_parameters()]
    saved = [parameter.detach().clone() for _, parameter in named]
    with torch.no_grad():
        for _, parameter in named:
            parameter.zero_()
    bridge.load_hf_weights(models, hf_path=str(folder))
    for (name, parameter), before in zip(named, saved, strict=True):
        assert torch.equal(parameter, before), name


def main(say: Callable[[str], object] = print) -> None:
    dist.init_process_group("gloo")
    prepare()
    no_hub()
    from megatron.bridge import __version__
    from megatron.bridge.training import model_load_save
    from megatron.core import __version__ as core
    from megatron.core import parallel_state

    assert hasattr(model_load_save.build_and_load_model, "_flashmoe_original")
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    is_first = dist.get_rank() == 0
    if is_first:
        say(f"Megatron-Bridge {__version__}, Megatron-Core {core}")
    for recipe in RECIPES:
        line = check(recipe)
        if is_first:
            say(line)
    line = check(RECIPES[0], is_named=True)
    folders = [tempfile.mkdtemp(suffix="Qwen3")]
    dist.broadcast_object_list(folders)
    converted = check_conversion(RECIPES[3], Path(folders[0]))
    if is_first:
        say(f"by our own name: {line}")
        say(f"Qwen3-MoE: {converted}")
    dist.barrier()
    if is_first:
        shutil.rmtree(folders[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
