"""Asks Transformer Engine by a small call, in a process of its own, for the attention it takes.

Two cuDNN libraries that mix make it unfused, and nothing says so. They may also crash or hang; this
ends the other process alone.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from flashmoe_megatron.doctor.fact import Fact

MODULE = "transformer_engine.pytorch.attention.dot_product_attention.utils"
"""The module of Transformer Engine whose ``get_attention_backend`` chooses."""
FUSED = frozenset({"flash", "cudnn"})
PATIENCE_S = 120
MARK = "attention: "
"""Begins the line of the answer, since libraries print lines of their own."""


def name_of_attention(answer: tuple[Any, ...]) -> str:
    """Returns the name of the attention that Transformer Engine has chosen."""
    is_flash, _, is_cudnn, _, is_unfused, *_ = answer
    names = {"flash": is_flash, "cudnn": is_cudnn, "unfused": is_unfused}
    # That is its own order of preference, where several are true.
    return next((name for name, is_chosen in names.items() if is_chosen), "none")


def is_fused(attention: Iterable[str]) -> bool:
    """Returns whether Transformer Engine has chosen a fused attention in every layer."""
    chosen = set(attention)
    return bool(chosen) and chosen <= FUSED


def attention(has_gpu: bool) -> Fact:
    """Says which attention Transformer Engine takes for causal bf16 rows, where both are there.

    Args:
        has_gpu: Whether torch can use a GPU; Transformer Engine computes on no CPU.
    """
    name = "attention"
    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return Fact(name, None, "Transformer Engine is not installed")
    title = f"Transformer Engine {version}"
    if not has_gpu:
        return Fact(name, {"version": version, "chosen": None}, f"{title}, which needs a GPU")
    chosen, cudnn, reason = ask()
    value = {"version": version, "chosen": chosen, "is_fused": is_fused(chosen), "cudnn": cudnn}
    if reason:
        return Fact(name, value, f"{title} fails", f"{title} could not be asked: {reason}")
    text = f"{title} takes {', '.join(chosen) or 'none'}"
    if is_fused(chosen):
        return Fact(name, value, text)
    mixed = f"cuDNN is loaded from {' and '.join(cudnn)}, " if len(cudnn) > 1 else ""
    problem = (
        f"attention of {title} is {', '.join(chosen) or 'unknown'}: {mixed}wanted one cuDNN, and "
        "fused attention; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 shows its reasons"
    )
    return Fact(name, value, text, problem)


def ask(program: str = __name__) -> tuple[list[str], list[str], str]:
    """Returns the attention chosen, the folders of cuDNN, and the last words if neither came."""
    command = [sys.executable, "-m", program]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [], [], f"no answer in {PATIENCE_S} s"
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            answer = json.loads(line.removeprefix(MARK))
            return answer["chosen"], answer["cudnn"], ""
    words = (done.stderr or done.stdout).strip().splitlines()
    return [], [], words[-1] if words else f"it ended with status {done.returncode}"


def call_attention() -> list[str]:
    """Calls Transformer Engine's attention once, forward and backward, and returns its choices."""
    import importlib

    import torch
    from transformer_engine.pytorch import DotProductAttention

    utils: Any = importlib.import_module(MODULE)
    original, chosen = utils.get_attention_backend, []

    def get_attention_backend(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        chosen.append(name_of_attention(answer))
        return answer

    utils.get_attention_backend = get_attention_backend
    rows = [
        torch.randn(128, 2, 8, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for _ in range(3)
    ]
    layer = DotProductAttention(8, 64, attn_mask_type="causal", qkv_format="sbhd")
    layer(*rows).float().sum().backward()
    torch.cuda.synchronize()
    return sorted(set(chosen))


def folders_of_cudnn(maps: str) -> list[str]:
    """Returns the folders that cuDNN's libraries are loaded from.

    Args:
        maps: The text of ``/proc/self/maps``.
    """
    paths = (Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines() if "/libcudnn" in line)
    return sorted({str(path.parent) for path in paths})


if __name__ == "__main__":
    answer = {"chosen": call_attention()}
    answer["cudnn"] = folders_of_cudnn(Path("/proc/self/maps").read_text())
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
