"""Runs every expert class of a release of transformers on flashmoe, beside its own forward.

A class counts if ``use_experts_implementation`` decorates it. The list beside this file says of
each what it computes, or why it is refused; the page's table is made from that list::

    PYTHONPATH=build/transformers-5.24.0 python -m tests.frameworks.expert_classes --write

writes it again from the release that is imported. Without ``--write`` the program prints it.
"""

import argparse
import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flashmoe_megatron.errors import ConfigError

LIST = Path(__file__).with_suffix(".json")
DECORATOR = "use_experts_implementation"
TOLERANCE = 2e-6
"""Largest difference of outputs and gradients in float32, relative to their largest element."""
NUM_TOKENS, NUM_EXPERTS, TOPK = 16, 4, 2

SIZES = {
    **dict.fromkeys(
        (
            "num_experts",
            "n_routed_experts",
            "num_local_experts",
            "moe_num_experts",
            "num_routed_experts",
        ),
        NUM_EXPERTS,
    ),
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), 128),
    **dict.fromkeys(
        (
            "intermediate_size",
            "moe_intermediate_size",
            "expert_intermediate_size",
            "moe_latent_size",
            "expert_ffn_hidden_size",
            "ffn_hidden_size",
            "moe_ffn_hidden_size",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "num_experts_per_tok",
            "top_k",
            "top_k_experts",
            "moe_topk",
            "num_experts_per_token",
            "moe_k",
        ),
        TOPK,
    ),
}
"""The names that models' configurations have for sizes, and small ones."""


def decorated() -> Iterator[tuple[str, str]]:
    """Yields the model's package and the class's name of every class that is decorated."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    for file in sorted(models.glob("*/modeling_*.py")):
        text = file.read_text()
        if DECORATOR not in text:
            continue
        for node in ast.parse(text).body:
            decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
            if any(DECORATOR in ast.unparse(each) for each in decorators):
                yield f"{file.parent.name}.{file.stem}", node.name


def configurations(package: str) -> Iterator[Any]:
    """Yields small configurations of a model, those of texts first."""
    import transformers

    folder = Path(transformers.__file__).parent / "models" / package
    classes = [
        each
        for file in sorted(folder.glob("configuration_*.py"))
        for each in vars(
            importlib.import_module(f"transformers.models.{package}.{file.stem}")
        ).values()
        if inspect.isclass(each)
        and issubclass(each, transformers.PretrainedConfig)
        and each.__module__.endswith(file.stem)
    ]
    for each in sorted(classes, key=lambda one: "Text" not in one.__name__):
        config = each()
        inner = getattr(config, "text_config", None)
        if isinstance(inner, transformers.PretrainedConfig):
            config = inner
        for name, size in SIZES.items():
            if hasattr(config, name):
                value = getattr(config, name)
                setattr(config, name, [size] * len(value) if isinstance(value, list) else size)
        config._experts_implementation = "eager"
        yield config


def make(module: str, name: str) -> Any:
    """Makes a module of a class with drawn parameters, by the first configuration that fits.

    Raises:
        AssertionError: None of the model's configurations makes one.
    """
    package = module.partition(".")[0]
    cls = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    taken = inspect.signature(cls.__init__).parameters
    more = {"layer_idx": 0, "intermediate_size": SIZES["moe_intermediate_size"]}
    failures = []
    for config in configurations(package):
        try:
            made = cls(config, **{key: value for key, value in more.items() if key in taken})
        except (AttributeError, TypeError) as error:  # a configuration of another part
            failures.append(f"{type(config).__name__}: {error}")
            continue
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_(0, 0.1)
        return made
    raise AssertionError(f"{name} of {module}: no configuration makes it: {'; '.join(failures)}")


def run(experts: Any, implementation: str) -> list[torch.Tensor]:
    """Computes a module's output, and the gradients of its inputs and parameters."""
    generator = torch.Generator().manual_seed(2)
    hidden = getattr(experts, "gate_up_proj", getattr(experts, "up_proj", None)).shape
    width = hidden[1] if experts.is_transposed else hidden[2]
    x = torch.randn(NUM_TOKENS, width, generator=generator).requires_grad_()
    chosen = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(TOPK).indices
    weights = torch.rand(NUM_TOKENS, TOPK, generator=generator).requires_grad_()
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    out = experts(x, chosen, weights)
    out.square().sum().backward()
    return [out.detach(), x.grad, weights.grad, *(each.grad for each in experts.parameters())]


def described(shape: Any, *, has_norm: bool) -> str:
    """Names what experts compute between the projections and after them, as the page does."""
    words = [f"{shape.activation.value} {'with a gate' if shape.gated else 'without a gate'}"]
    if shape.clamp_value is not None:
        words.append("clamped")
    if shape.linear_offset:
        words.append("with an offset")
    if shape.is_softcapped:
        words.append("softcapped")
    if has_norm:
        words.append("and a norm after each expert")
    return ", ".join(words)


def found() -> dict[str, Any]:
    """Tries every class; returns the release, and what each class computes or why it is refused.

    Raises:
        AssertionError: An output or a gradient is not that of the class's own forward.
    """
    import transformers

    import flashmoe_megatron.transformers as door
    from flashmoe_megatron.adapters.transformers.form import has_norm, read_shape

    door.configure(backend="reference", max_tokens=NUM_TOKENS)
    computed: dict[str, str] = {}
    refused: dict[str, str] = {}
    for module, name in decorated():
        experts, label = make(module, name), f"{module.partition('.')[0]}.{name}"
        try:
            shape = read_shape(experts, TOPK, 1)
        except ConfigError as error:
            refused[label] = str(error).removeprefix(f"{name} ")
            continue
        for want, got in zip(run(experts, "eager"), run(experts, "flashmoe"), strict=True):
            difference = float((want - got).abs().max() / want.abs().max())
            assert difference < TOLERANCE, f"{label} differs by {difference}"
        computed[label] = described(shape, has_norm=has_norm(experts))
    return {"release": transformers.__version__, "computed": computed, "refused": refused}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the list again")
    options = parser.parse_args(arguments)
    text = json.dumps(found(), indent=2) + "\n"
    if options.write:
        LIST.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
