r"""Trains models of NeMo Automodel with its own parallelizer, beside its torch dispatcher.

Four ranks make Automodel's meshes, experts over two of them and FSDP2 over all, and its
``parallelize_model`` spreads a small Qwen3-MoE and a DeepSeek-V3 over them, with each function that
its experts know. Losses and gradients of every parameter are compared, a checkpoint of either model
is read by the other through Hugging Face's names, a router's choices are replayed, and what is not
served has to be refused. Automodel's GPT-OSS needs Transformer Engine or a GPU for its attention;
its experts' function is among those that are tried::

    python3.12 -m venv automodel && . automodel/bin/activate
    pip install torch==2.13.0 transformers==5.18.0 pyyaml tiktoken sentencepiece torchdata \
        datasets peft psutil einops
    pip install --no-deps nemo-automodel==0.7.0 megatron-fsdp==0.5.0 torchao
    PYTHONPATH=. torchrun --nproc_per_node 4 -m tests.external.automodel
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

EP, SEQUENCE, VOCABULARY, LAYERS, NUM_EXPERTS = 2, 16, 96, 2, 8
TOLERANCE = 2e-5
"""Largest difference of losses and gradients in float32, relative to the largest of a tensor."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


def qwen3(backend: Any, **moe: Any) -> Any:
    """Experts with SwiGLU; moe are changes of Automodel's own MoE configuration."""
    import transformers
    from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM

    config = transformers.Qwen3MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=64,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
    )
    return Qwen3MoeForCausalLM(config, backend=backend, moe_overrides=moe or None)


def deepseek(backend: Any) -> Any:
    """Groups of experts, sigmoids, a shared expert and a first layer without experts."""
    import transformers
    from nemo_automodel.components.models.deepseek_v3.model import DeepseekV3ForCausalLM

    config = transformers.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        moe_intermediate_size=64,
        n_routed_experts=NUM_EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    return DeepseekV3ForCausalLM(config, backend=backend)


def build(
    make: Callable[..., Any],
    backend: Any,
    mesh: Any,
    *,
    seed: int = 7,
    checkpointing: bool | str = False,
    **more: Any,
) -> Any:
    """Builds a model with the same numbers on all ranks, and has Automodel spread it."""
    from nemo_automodel.components.moe.parallelizer import parallelize_model

    torch.manual_seed(seed)
    model = make(backend, **more)
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):  # zeros would show nothing
            torch.nn.init.normal_(parameter, std=0.1)
    parallelize_model(
        model,
        mesh.device_mesh,
        mesh.moe_mesh,
        activation_checkpointing=checkpointing,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=torch.float32
        ),
        **mesh.parallelize_axis_kwargs(),
    )
    return model


def experts_of(model: Any) -> list[Any]:
    """The routed experts of a model's layers."""
    from nemo_automodel.components.moe.experts import GroupedExperts

    return [module for module in model.modules() if isinstance(module, GroupedExperts)]


def step(model: Any, *, masked: int = 0) -> torch.Tensor:
    """Computes a rank's loss of its own batch, and all gradients; the last tokens are padding."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)
    mask = torch.ones_like(tokens)
    mask[:, SEQUENCE - masked :] = 0
    out = model(tokens, padding_mask=(mask == 0) if masked else None)
    logits = getattr(out, "logits", out)[:, : SEQUENCE - masked]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, : SEQUENCE - masked].flatten()
    )
    loss.backward()
    return loss.detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that is spread over ranks. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_near(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    bound = TOLERANCE * max(float(want.abs().max()), 1e-3)
    difference = float((got - want).abs().max())
    assert difference <= bound, f"{name}: {difference} of {float(want.abs().max())}"


def compare(fused: Any, stock: Any, *, masked: int = 0) -> str:
    """Compares the experts, a step and all gradients of two models; returns a line.

    Raises:
        AssertionError: A layer is not ours, or a name, a shape or a number is another.
    """
    ours, theirs = map(experts_of, (fused, stock))
    assert ours
    assert len(ours) == len(theirs)
    assert all(hasattr(each, "flashmoe_options") for each in ours)
    assert not any(hasattr(each, "flashmoe_options") for each in theirs)
    sharded = ours[0].gate_and_up_projs
    assert sharded.device_mesh.mesh_dim_names == ("ep_shard", "ep"), sharded.device_mesh
    losses = [step(model, masked=masked) for model in (fused, stock)]
    num_gradients = compare_gradients(fused, stock, losses)
    return (
        f"{len(ours)} layers of ours; loss {float(losses[0]):.6f} and torch's "
        f"{float(losses[1]):.6f}; {num_gradients} gradients"
    )


def compare_gradients(fused: Any, stock: Any, losses: Sequence[torch.Tensor]) -> int:
    """Compares the losses and all gradients of two models; returns the number of these.

    Raises:
        AssertionError: A name, a shape or a number is another, or experts have no gradients.
    """
    check_near("loss", *losses)
    pairs = [*zip(fused.named_parameters(), stock.named_parameters(), strict=True)]
    num_gradients = num_of_experts = 0
    for (name, one), (other_name, other) in pairs:
        assert name == other_name
        assert one.shape == other.shape
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is None:
            continue
        grads = [whole(each.grad) for each in (one, other)]
        check_near(name, *grads)
        num_gradients += 1
        num_of_experts += ".experts." in name and bool(grads[1].any())
    assert num_of_experts >= 2 * len(experts_of(fused))
    return num_gradients


def check_checkpoints(fused: Any, stock: Any, fresh: Any, mesh: Any, folder: Path) -> str:
    """Saves one model by Automodel's checkpoints, and loads it into one of the other dispatcher."""
    from nemo_automodel.components.checkpoint.checkpointing import (
        Checkpointer,
        CheckpointingConfig,
    )

    for model in (fused, stock):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    lines = []
    for name, saved, loaded in (("ours", fused, fresh[1]), ("torch", stock, fresh[0])):
        config = CheckpointingConfig(
            checkpoint_dir=folder / name, model_save_format="safetensors", save_consolidated=False
        )
        rank = mesh.device_mesh.get_rank()
        checkpointer = Checkpointer(config, rank, 0, 0, moe_mesh=mesh.moe_mesh)
        checkpointer.save_model(saved, str(folder / name))
        dist.barrier()
        path = folder / name / "model"
        checkpointer.load_model(loaded, str(path))
        for (key, one), (_, other) in zip(
            saved.named_parameters(), loaded.named_parameters(), strict=True
        ):
            a, b = whole(one.detach()), whole(other.detach())
            assert torch.equal(a, b), key
        lines.append(name)
        checkpointer.close()
    return f"checkpoints of {' and '.join(lines)} read by the other"


def check_replay(make: Callable[[bool], Any]) -> str:
    """Replays choices that no router made, in a step of either dispatcher; returns a line.

    Raises:
        AssertionError: What was recorded does not give the same bits, or a number is another.
    """
    from nemo_automodel.components.moe.router_replay import RouterReplay

    tokens = torch.arange(2 * SEQUENCE).view(2, -1) % VOCABULARY
    models, losses = [], []
    for is_stock in (False, True):
        RouterReplay.clear_registry()
        model = make(is_stock)
        with torch.no_grad(), RouterReplay.record():
            want = model(tokens)
        captured = RouterReplay.collect()
        with torch.no_grad(), RouterReplay.replay(captured):
            again = model(tokens)
        assert torch.equal(*(getattr(out, "logits", out) for out in (want, again)))
        turned = [(choices + 1) % NUM_EXPERTS for choices in captured]
        with RouterReplay.replay(turned):
            losses.append(step(model))
        models.append(model)
    compare_gradients(*models, losses)
    chosen = step(models[1])
    assert not torch.equal(chosen, losses[1])  # the same choices would give the same bits
    return f"choices of {len(captured)} routers recorded and replayed; loss {float(losses[0]):.6f}"


def refused(function: Callable[[], object], sentence: str) -> None:
    """Runs what has to be refused.

    Raises:
        AssertionError: It is not, or by another sentence.
    """
    from flashmoe_megatron.errors import ConfigError

    said = ""
    try:
        function()
    except ConfigError as error:
        said = str(error)
    assert sentence in said, f"wanted {sentence}, got {said or 'no refusal'}"


def check_refusals(make: Callable[[], Any], bare: Callable[[], Any]) -> int:
    """Asks for all that is not served; returns how many sentences that gave.

    Args:
        make: Makes a model that is spread over the ranks.
        bare: Makes one that is not yet, which is when Automodel changes classes of experts.
    """
    from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.moe.quantized_experts import apply_mxfp4_to_moe_experts

    from flashmoe_megatron import automodel

    def with_function(function: Any) -> Callable[[], object]:
        model = make()
        for experts in experts_of(model):
            experts.expert_activation_grouped = function
        return lambda: step(model)

    def other(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return rows

    from nemo_automodel.components.moe.experts import swiglu_oai_deepep

    lora = PeftConfig(target_modules=["*experts*"], dim=4)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: apply_lora_to_linear_modules(bare(), lora), "LoRA on experts with dispatcher="),
        (lambda: apply_mxfp4_to_moe_experts(bare()), "MXFP4 storage of experts with dispatcher="),
        (with_function(other), "the experts call other between"),
        (with_function(partial(swiglu_oai_deepep, alpha=1.5)), "with alpha=1.5: wanted 1.702"),
        (lambda: automodel.BackendConfig(dispatcher="torch"), "dispatcher='torch' in flashmoe_"),
        (lambda: automodel.BackendConfig(flashmoe={"max_token": 8}), "option 'max_token' is unk"),
        (lambda: automodel.BackendConfig(flashmoe=8), "flashmoe=8: wanted options by name"),
    ]
    for experts in ("te", "gmm", "torch_mm_mxfp8"):
        kept = partial(BackendConfig, dispatcher="flashmoe", experts=experts)
        cases.append((kept, f"backend.experts='{experts}' with dispatcher='flashmoe'"))
    for function, sentence in cases:
        refused(function, sentence)
    return len(cases)


RECIPE = """
backend:
  _target_: flashmoe_megatron.automodel.BackendConfig
  attn: sdpa
  linear: torch
  flashmoe:
    max_tokens: 64
"""


def from_recipe(folder: Path) -> Any:
    """The backend that Automodel makes of a recipe's lines."""
    from nemo_automodel.components.config.loader import load_yaml_config

    path = folder / f"recipe{dist.get_rank()}.yaml"
    path.write_text(RECIPE)
    return load_yaml_config(path).backend.instantiate()


FUNCTIONS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "swiglu, clamped": {"swiglu_limit": 0.01},
    "swigluoai, biases": {
        "expert_activation": "swigluoai",
        "expert_bias": True,
        "activation_limit": 0.1,
    },
    "quick_geglu, biases": {"expert_activation": "quick_geglu", "expert_bias": True},
    "geglu": {"expert_activation": "geglu"},
    "relu2": {"expert_activation": "relu2"},
    "weights after fc2": {"apply_router_weight_after_down": True},
}
"""Changes of Automodel's MoE configuration, each for another function of experts."""


def main(say: Callable[[str], object] = print) -> None:
    os.environ["FLASHMOE_AUTOLOAD"] = "1"
    from flashmoe_megatron.autoload import autoload

    autoload()  # as torch does where the package is installed
    dist.init_process_group("gloo")
    torch.cuda.current_device = lambda: 0  # models name a device and never use it
    torch.compiler.set_stance("force_eager")
    from nemo_automodel import __version__
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.mesh import MeshContext, ParallelismSizes
    from nemo_automodel.components.models.common import BackendConfig

    mesh = MeshContext.build(FSDP2Config(), ParallelismSizes(ep_size=EP))
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])

    def tell(line: str) -> None:
        if dist.get_rank() == 0:
            say(line)

    stock = partial(BackendConfig, attn="sdpa", linear="torch", experts="torch", dispatcher="torch")
    ours = partial(stock, dispatcher="flashmoe")

    def made(function: Callable[..., Any], *, is_stock: bool, **more: Any) -> Any:
        return build(function, stock() if is_stock else ours(), mesh, **more)

    def pair(function: Callable[..., Any], **more: Any) -> list[Any]:
        return [made(function, is_stock=is_stock, **more) for is_stock in (False, True)]

    tell(f"NeMo Automodel {__version__}, EP {EP}, FSDP2 over {dist.get_world_size()}")
    for name, changes in FUNCTIONS.items():
        models = pair(qwen3, **changes)
        tell(f"Qwen3-MoE, {name}: {compare(*models)}")
        for model in models:
            model.zero_grad()
        compare(*models, masked=5)
    from nemo_automodel.components.models.kimi_k3.situ import _weighted_situ

    models = pair(qwen3)
    for each in (experts for model in models for experts in experts_of(model)):
        each.expert_activation_grouped = partial(_weighted_situ, beta=0.1, linear_beta=0.2)
    tell(f"Qwen3-MoE, Kimi-K3's SiTU: {compare(*models)}")
    for checkpointing in (True, "selective"):
        models = pair(qwen3, checkpointing=checkpointing)
        tell(f"Qwen3-MoE, activation checkpointing {checkpointing}: {compare(*models)}")
    tell(f"DeepSeek-V3: {compare(*pair(deepseek))}")
    models = pair(qwen3)
    compare(*models)
    tell(check_checkpoints(*models, pair(qwen3, seed=9), mesh, folder))
    replayed = partial(made, qwen3, enable_routing_replay=True)
    tell(check_replay(lambda is_stock: replayed(is_stock=is_stock)))
    recipe = build(qwen3, from_recipe(folder), mesh)
    assert {each.flashmoe_options.max_tokens for each in experts_of(recipe)} == {64}
    tell(f"a recipe's lines: {compare(recipe, made(qwen3, is_stock=True))}")
    num_refusals = check_refusals(lambda: made(qwen3, is_stock=False), lambda: qwen3(ours()))
    tell(f"{num_refusals} refusals by name")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
