"""Fuzzes one target with libFuzzer, guided by what of the code each input runs.

    python -m tests.fuzz.guided settings --seconds 600
    python tools/build.py --coverage && \\
        FLASHMOE_LIBRARY=$PWD/flashmoe_megatron/libflashmoe_coverage.so \\
        python -m tests.fuzz.guided c_interface --seconds 600

libFuzzer comes with atheris. Python is instrumented as it is imported; the library's host code
tells its branches if it was built to, else Python alone is the guide. The inputs that led to new
code are kept under ``--corpus`` (``runs/fuzz/TARGET``); a run begins with them and with the
committed ones, which ``tests/fuzz/seeds.py`` adds to. An input that crashes, raises or takes longer
than ``--input-seconds`` is written to ``runs/fuzz`` and ends the run with a status other than 0;
``--replay FILE`` runs it alone.
"""

# ruff: noqa: T201 - a program: it prints

import argparse
import ctypes
import importlib
import os
import sys
from pathlib import Path

from tests.fuzz import seeds

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("target", choices=seeds.TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--input-seconds", type=int, default=10, help="of one input, then it hangs")
    parser.add_argument("--corpus", type=Path, help="folder of inputs to begin with and to add to")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument("--replay", type=Path, help="run this input and nothing else")
    options = parser.parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is accepted must not reach a GPU

    import atheris

    with atheris.instrument_imports(include=["flashmoe_megatron", "tests.fuzz"]):
        target = importlib.import_module(f"tests.fuzz.{options.target}")
    if options.replay is not None:
        print(target.exercise(options.replay.read_bytes()))
        return 0

    found = ROOT / "runs" / "fuzz"
    corpus = options.corpus or found / options.target
    corpus.mkdir(parents=True, exist_ok=True)
    committed = found / "seeds" / options.target  # libFuzzer takes folders, and ends the process
    seeds.unpack(options.target, committed)
    found.mkdir(parents=True, exist_ok=True)
    flags = [
        f"-max_total_time={options.seconds}",
        f"-timeout={options.input_seconds}",
        f"-artifact_prefix={found}/{options.target}-",
        f"-seed={options.seed}",
        "-max_len=256",
        # Its measure is the process's peak, which begins with that of the one that has started it.
        "-rss_limit_mb=0",
        "-print_final_stats=1",
        "-use_value_profile=1",
    ]
    atheris.Setup([sys.argv[0], *flags, str(corpus), str(committed)], target.exercise)
    if options.target == "c_interface":
        from flashmoe_megatron.kernel import bindings  # instrumented by now

        guided = share_coverage(bindings.load())
        print(f"the library {'tells' if guided else 'does not tell'} its coverage", flush=True)
    atheris.Fuzz()
    return 0


COMPARISONS = [f"{kind}cmp{size}" for kind in ("", "const_") for size in (1, 2, 4, 8)]


def share_coverage(library: ctypes.CDLL) -> bool:
    """Hands libFuzzer's functions to a library that was built to call them.

    Returns:
        Whether it was.
    """
    if not hasattr(library, "flashmoe_tell_coverage"):
        return False
    import atheris.core_with_libfuzzer as core

    fuzzer = ctypes.CDLL(core.__file__)

    def address(name: str) -> ctypes.c_void_p:
        return ctypes.cast(getattr(fuzzer, f"__sanitizer_cov_{name}"), ctypes.c_void_p)

    for name in COMPARISONS:
        hook = ctypes.c_void_p.in_dll(library, f"flashmoe_hook_{name}")
        hook.value = address(f"trace_{name}").value
    library.flashmoe_tell_coverage(address("8bit_counters_init"), address("pcs_init"))
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
