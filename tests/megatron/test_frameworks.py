"""Frameworks that make Megatron's models from configurations and never parse its arguments.

All that they carry is the dispatcher's name in a configuration and FLASHMOE_AUTOLOAD=1.
"""

from pathlib import Path

from tests.megatron.stock_script import BRIDGE
from tests.programs import run_python

PROGRAM = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from flashmoe_megatron.autoload import autoload
autoload()  # as torch does where the package is installed

from megatron.core import parallel_state
from tests.megatron.harness import Layout, build_model, transformer_config

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(
    expert_model_parallel_size=2, expert_tensor_parallel_size=1
)


def train(dispatcher):
    (model,) = build_model(transformer_config(Layout(expert=2), dispatcher), Layout(expert=2))
    found = []
    for length in (8, 16, 12, 4):  # and a micro-batch has other tokens on another rank
        size = length // (1 + dist.get_rank())
        tokens = torch.arange(16 * size).view(16, size) % 128
        mask = torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)
        loss = model(tokens, torch.arange(size).expand(16, -1), mask, labels=tokens).mean()
        loss.backward()
        found.append(loss.item())
    grads = [each.grad.norm().item() for _, each in sorted(model.named_parameters())]
    return torch.tensor(found + grads)


difference = (train("flashmoe") - train("alltoall")).abs().max().item()
assert "megatron.training" not in sys.modules
Path(f"{__file__}.{dist.get_rank()}").write_text(f"{difference < 1e-4}")
"""


def test_a_configuration_alone_chooses_the_dispatcher(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ran = run_python(BRIDGE, program, ranks=2, FLASHMOE_AUTOLOAD="1")
    assert [Path(f"{program}.{rank}").read_text() for rank in range(2)] == ["True", "True"]
    said = [line for line in ran.stdout.splitlines() if line.startswith("flashmoe: backend")]
    assert len(said) == 1
    assert "no bound of tokens" in said[0]
