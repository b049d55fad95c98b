"""Asks Transformer Engine by one call, in a process of its own, for the attention it takes.

Two cuDNN libraries that mix make it unfused, and nothing says so. They may also crash or hang; this
ends the other process alone. The call is one of a training, since Transformer Engine chooses for
each shape: forward and backward of causal bf16 rows, 4,096 long, with groups of heads 128 wide.
"""

import json
import logging
import os
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
LENGTH, HEADS, GROUPS, WIDTH = 4096, 8, 2, 128
"""Unfused attention of eight heads takes about a GiB for a moment; of a model's 32 it takes 4."""
REASONS = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"}
"""Has Transformer Engine tell its logger what speaks against fused attention."""


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
    answer, words = ask()
    if answer is None:
        value = {"version": version, "chosen": [], "is_fused": False, "cudnn": []}
        return Fact(name, value, f"{title} fails", f"{title} could not be asked: {words}")
    chosen, cudnn, reasons = answer["chosen"], answer["cudnn"], answer["reasons"]
    value = {"version": version, "is_fused": is_fused(chosen), **answer}
    several = f"cuDNN is loaded from {' and '.join(cudnn)}" if len(cudnn) > 1 else ""
    text = f"{title} takes {', '.join(chosen) or 'none'}" + f"; {several}" * bool(several)
    if is_fused(chosen):
        return Fact(name, value, text)
    problem = (
        f"attention of {title} is {', '.join(chosen) or 'unknown'}: "
        + f"{several}, " * bool(several)
        + "wanted one cuDNN, and fused attention"
        + f"; it says: {'; '.join(reasons)}" * bool(reasons)
    )
    return Fact(name, value, text, problem)


def ask(program: str = __name__) -> tuple[dict[str, list[str]] | None, str]:
    """Has another process call Transformer Engine's attention.

    Returns:
        What it chose, what speaks against fused attention, and the folders that cuDNN is loaded
        from; or nothing, and the process's last words.
    """
    command = [sys.executable, "-m", program]
    environment = {**os.environ, **REASONS}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer in {PATIENCE_S} s"
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK)), ""
    words = (done.stderr or done.stdout).strip().splitlines()
    return None, words[-1] if words else f"it ended with status {done.returncode}"


class _Reasons(logging.Handler):
    """Keeps what Transformer Engine's logger says against fused attention, each sentence once."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        words = " ".join(record.getMessage().split())
        if words.startswith("Disabling FusedAttention") and words not in self.said:
            self.said.append(words)


def call_attention(device: str = "cuda") -> dict[str, list[str]]:
    """Calls Transformer Engine's attention once, forward and backward.

    Returns:
        What it chose, and what it said against fused attention.
    """
    import importlib

    import torch
    from transformer_engine.pytorch import DotProductAttention

    utils: Any = importlib.import_module(MODULE)
    original, chosen, reasons = utils.get_attention_backend, [], _Reasons()
    logging.getLogger("DotProductAttention").addHandler(reasons)

    def get_attention_backend(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        chosen.append(name_of_attention(answer))
        return answer

    utils.get_attention_backend = get_attention_backend
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    query, key, value = (
        torch.randn(LENGTH, 1, heads, WIDTH, **options) for heads in (HEADS, GROUPS, GROUPS)
    )
    layer = DotProductAttention(
        HEADS, WIDTH, num_gqa_groups=GROUPS, attn_mask_type="causal", qkv_format="sbhd"
    )
    loss = layer(query, key, value).float().square().mean()
    loss.backward()
    loss.item()  # waits for the device, whose errors come late
    return {"chosen": sorted(set(chosen)), "reasons": reasons.said}


def folders_of_cudnn(maps: str) -> list[str]:
    """Returns the folders that cuDNN's libraries are loaded from.

    Args:
        maps: The text of ``/proc/self/maps``.
    """
    paths = (Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines() if "/libcudnn" in line)
    return sorted({str(path.parent) for path in paths})


if __name__ == "__main__":
    answer = call_attention()
    answer["cudnn"] = folders_of_cudnn(Path("/proc/self/maps").read_text())
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
