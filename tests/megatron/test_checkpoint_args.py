"""Checkpoints of flashmoe name a dispatcher that tools without flashmoe know."""

import argparse
import re
from pathlib import Path
from types import ModuleType

import pytest

from flashmoe_megatron.adapters.megatron.arguments import patch_checkpointing
from tests.distributed import PATIENCE_S
from tests.megatron.stock_script import MODEL, torchrun
from tests.programs import run_python


@pytest.mark.parametrize(
    ("dispatcher", "saved"), [("flashmoe", "alltoall"), ("alltoall", "alltoall"), ("flex", "flex")]
)
def test_saved_arguments_name_a_dispatcher_of_megatrons(dispatcher: str, saved: str) -> None:
    checkpointing = ModuleType("checkpointing")
    checkpointing.generate_state_dict = lambda args: {"args": args}  # type: ignore[attr-defined]
    patch_checkpointing(checkpointing)
    args = argparse.Namespace(moe_token_dispatcher_type=dispatcher, hidden_size=64)
    state = checkpointing.generate_state_dict(args)
    assert vars(state["args"]) == {"moe_token_dispatcher_type": saved, "hidden_size": 64}
    assert args.moe_token_dispatcher_type == dispatcher  # the run's own


READ = """
import sys, torch
args = torch.load(sys.argv[1], weights_only=False)["args"]
assert not any(name.startswith("flashmoe_megatron.adapters") for name in sys.modules)
print("saved", args.moe_token_dispatcher_type)
"""


@pytest.mark.timeout(4 * PATIENCE_S)
def test_a_checkpoint_of_the_stock_script(megatron_lm: Path, tmp_path: Path) -> None:
    """A process without flashmoe reads the arguments; runs resume with their own dispatcher."""
    script = str(megatron_lm / "pretrain_gpt.py")
    ours = ("-m", "flashmoe_megatron.run", script)
    run = (*MODEL, "--save", "saved", "--save-interval", "2", "--train-iters", "2")
    flashmoe = ("--moe-token-dispatcher-type", "flashmoe")
    torchrun(megatron_lm, tmp_path, *ours, *run, *flashmoe)
    saved = tmp_path / "saved/iter_0000002/common.pt"
    read = run_python("-c", READ, saved, before=[megatron_lm])
    assert read.stdout.strip() == "saved alltoall", read.stderr
    # Stock Megatron loads no distributed optimizer without Transformer Engine and Apex.
    resume = ("--load", "saved", "--use-checkpoint-args", "--no-load-optim", "--no-load-rng")
    for dispatcher in ("alltoall", "flashmoe"):
        output = torchrun(
            megatron_lm,
            tmp_path,
            *(*ours, *MODEL, *resume, "--moe-token-dispatcher-type", dispatcher),
            *("--train-iters", "3"),
        )
        assert re.search(r"iteration +3/ +3 ", output), output[-3000:]
        assert ("flashmoe: backend reference" in output) == (dispatcher == "flashmoe")
