r"""Builds a model by the arguments and the bridge of ms-swift, and trains a step beside alltoall.

ms-swift types the dispatcher as one of three names, so that ``FLASHMOE_REPLACES`` is the way. Its
command line is parsed by its own class, which also makes Megatron's groups; the model comes from
mcore-bridge, which gives a rollout's engine the weights under Hugging Face's names. Transformer
Engine is a stand-in, and Megatron's layers are its local ones::

    python3.12 -m venv swift && . swift/bin/activate
    pip install torch==2.13.0 transformers==5.12.1 ms-swift==4.6.0 pytest
    pip install --no-deps megatron-core==0.19.2 mcore-bridge==1.6.5
    PYTORCH_JIT=0 FLASHMOE_REPLACES=alltoall PYTHONPATH=. torchrun --nproc_per_node 2 \
        -m tests.external.swift
"""

import contextlib
import importlib
import io
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.external.beside import LAYERS, LOCAL, VOCABULARY, compare, compare_over_sleeps, layers

NUM_EXPERTS = 8
TE = "transformer_engine"


def prepare() -> None:
    """Imports ms-swift as it is where a GPU and Transformer Engine are missing."""
    from examples import cpu_bridge
    from flashmoe_megatron.autoload import autoload
    from tests.external.stand_ins import StandIns, say_installed

    cpu_bridge.enable()
    autoload()  # as torch does where the package is installed
    say_installed("transformer-engine", "2.13.0")
    # What is imported before the stand-ins knows that Transformer Engine is missing.
    for module in ("models.gpt", "models.gpt.gpt_layer_specs", "distributed", "optimizer"):
        importlib.import_module(f"megatron.core.{module}")
    importlib.import_module("megatron.core.transformer.moe.moe_layer")
    sys.modules.pop(f"megatron.core.extensions.{TE}", None)  # mcore-bridge changes its classes
    sys.meta_path.append(StandIns([TE]))
    logging.disable(logging.WARNING)
    importlib.import_module("swift.megatron")
    for name in ("quantization", "fp8"):
        module = importlib.import_module(f"{TE}.pytorch.{name}")
        module.FP8GlobalStateManager.with_fp8_parameters = lambda: False


def arguments(folder: Path) -> Any:
    """What ms-swift makes of a command line; its class makes Megatron's groups, too."""
    import transformers
    from swift.megatron.arguments import MegatronSftArguments
    from swift.utils import parse_args

    transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(folder)
    given = {
        "model": folder,
        "model_type": "qwen3_moe",
        "template": "qwen3",
        "dataset": "none",
        "use_hf": "true",
        "perform_initialization": "true",
        "torch_dtype": "float32",
        "output_dir": folder / "out",
        "ddp_backend": "gloo",
        "attention_backend": "local",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": dist.get_world_size(),
    }
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        parse_args(MegatronSftArguments, [*words, "--moe_token_dispatcher_type", "flashmoe"])
    assert "invalid choice: 'flashmoe'" in said.getvalue()  # else the name itself would do
    return parse_args(MegatronSftArguments, words)[0]


def make_local(config: Any) -> None:
    """Leaves out of a configuration what a GPU or Transformer Engine would do."""
    half = {"fp16": False, "bf16": False, "apply_query_key_layer_scaling": False}
    for name, value in {**LOCAL, **half}.items():
        if hasattr(config, name):
            setattr(config, name, value)


def use_local_layers() -> None:
    """Has mcore-bridge build models of Megatron's own layers."""
    from mcore_bridge.model.register import ModelLoader
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    def local_spec(self: Any, vp_stage: int | None = None) -> Any:
        return get_gpt_decoder_block_spec(self.config, use_transformer_engine=False)

    ModelLoader.get_transformer_layer_spec = local_spec


def build(args: Any, *, is_stock: bool) -> Any:
    """Builds a model by the configuration that ms-swift makes; returns it in float32."""
    from mcore_bridge.model.register import ModelLoader
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from swift.megatron.model.utils import get_mcore_model_config
    from transformers import AutoConfig

    from flashmoe_megatron.adapters.megatron import keep_dispatcher

    config = get_mcore_model_config(args, AutoConfig.from_pretrained(args.model))
    assert config.moe_token_dispatcher_type == "alltoall"
    make_local(config)
    if is_stock:
        keep_dispatcher(config)
    use_local_layers()
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    return ModelLoader(config).build_model()


def name_for_the_bridge(model: Any) -> None:
    """Gives local layers' weights the places, too, at which mcore-bridge looks for them."""
    for layer in model.decoder.layers:
        # The bridge knows Transformer Engine's modules, which hold the norm before a product.
        norm = layer.input_layernorm.weight
        object.__setattr__(layer.self_attention.linear_qkv, "layer_norm_weight", norm)
    for layer in layers(model):
        # It knows no experts but grouped ones, and their weights are numbered after the name.
        for name in ("linear_fc1", "linear_fc2"):
            weights = [getattr(each, name).weight for each in layer.experts.local_experts]
            numbered = {f"weight{number}": weight for number, weight in enumerate(weights)}
            object.__setattr__(layer.experts, name, SimpleNamespace(**numbered))


def handed_over(model: Any) -> dict[str, torch.Tensor]:
    """The weights that mcore-bridge gives a rollout's engine. Collective."""
    name_for_the_bridge(model)
    return {name: tensor.clone() for name, tensor in model.config.bridge.export_weights([model])}


def main(say: Callable[[str], object] = print) -> None:
    dist.init_process_group("gloo")
    prepare()
    import mcore_bridge
    import swift
    from megatron.core import __version__ as core

    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    args = arguments(Path(folders[0]))
    is_first = dist.get_rank() == 0
    if is_first:
        say(
            f"ms-swift {swift.__version__}, mcore-bridge {mcore_bridge.__version__}, "
            f"Megatron-Core {core}"
        )
    models = [build(args, is_stock=is_stock) for is_stock in (False, True)]
    got, want = compare(*models)
    handed = [handed_over(model) for model in models]
    assert list(handed[0]) == list(handed[1])
    assert all(torch.equal(handed[0][name], handed[1][name]) for name in handed[0])
    of_experts = [name for name in handed[0] if ".experts." in name]
    assert len(of_experts) == LAYERS * NUM_EXPERTS * 3
    slept = compare_over_sleeps(lambda is_stock: build(args, is_stock=is_stock))
    if is_first:
        say(f"wrapped groups: {slept}")
        say(
            f"Qwen3-MoE: {len([*layers(models[0])])} layers of ours; loss {got:.6f} and alltoall's "
            f"{want:.6f}; {len(handed[0])} tensors for a rollout, {len(of_experts)} of experts"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
