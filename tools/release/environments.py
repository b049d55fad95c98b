"""Tries a wheel in bare environments, one for each Python at hand.

    python -m tools.release.environments dist/flashmoe_megatron-*.whl

Each environment gets the wheel with all that it requires, and nothing of the checkout. There it has
to train a layer on a CPU, to print the screen of ``python -m flashmoe_megatron``, and to please
``pip check``. Every environment fetches torch.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
STEP = """
import torch
import flashmoe_megatron
from flashmoe_megatron import FlashMoELayer, MoEConfig

torch.manual_seed(0)
config = MoEConfig(
    hidden=64, intermediate=128, num_experts=4, topk=2, activation="silu", gated=True,
    num_ranks=1, max_tokens=32,
)
layer = FlashMoELayer(config, router=True, device="cpu", dtype=torch.float32)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
x = torch.randn(32, 64)
losses = []
for _ in range(3):
    loss = (layer(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
assert losses[2] < losses[0], losses
print("losses", *(f"{each:.4f}" for each in losses), "of", flashmoe_megatron.__file__)
"""


def try_wheel(wheel: Path, python: str, folder: Path, *, extra_arguments: list[str]) -> bool:
    """Installs a wheel in a new environment, and uses it there.

    Args:
        wheel: The file.
        python: An interpreter.
        folder: Takes the environment, and is the working directory.
        extra_arguments: For ``pip install``.

    Returns:
        Whether all went well.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    interpreter = folder / "venv" / "bin" / "python"
    steps = [
        [python, "-m", "venv", str(folder / "venv")],
        [str(interpreter), "-m", "pip", "install", "--quiet", *extra_arguments, str(wheel)],
        [str(interpreter), "-c", STEP],
        [str(interpreter), "-m", "flashmoe_megatron"],
        [str(interpreter), "-m", "pip", "check"],
    ]
    for step in steps:
        done = subprocess.run(
            step, cwd=folder, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        print(done.stdout.strip(), flush=True)
        if done.returncode:
            print(f"failed: {' '.join(step[1:4])} ended with status {done.returncode}", flush=True)
            return False
    return True


def try_all(wheel: Path, pythons: list[str], extra_arguments: list[str]) -> int:
    """Tries a wheel under several Pythons; returns how many failed or are not here."""
    failed = 0
    for version in pythons:
        python = shutil.which(f"python{version}")
        print(f"== Python {version}", flush=True)
        if python is None or subprocess.run([python, "-V"], capture_output=True).returncode:
            print("not here", flush=True)
            failed += 1
            continue
        with tempfile.TemporaryDirectory() as folder:
            is_good = try_wheel(
                wheel.resolve(), python, Path(folder), extra_arguments=extra_arguments
            )
            failed += not is_good
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.release.environments", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pythons", nargs="+", default=list(PYTHONS))
    parser.add_argument("--pip", nargs="+", default=[], metavar="ARGUMENT", help="for pip install")
    options = parser.parse_args(arguments)
    if not options.wheel.is_file():
        print(f"error: {options.wheel} is no file, wanted a wheel", file=sys.stderr)
        return 2
    failed = try_all(options.wheel, options.pythons, options.pip)
    print(f"{len(options.pythons) - failed} of {len(options.pythons)} environments are good")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
