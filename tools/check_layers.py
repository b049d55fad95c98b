"""Checks that dependencies go one way, in csrc/ and in the Python package.

The lists are the architecture, lowest layer first. A file may use its own directory or module
and anything in a lower line; never a higher line, and never a neighbour on its own line. A module
with a dot lies in a lower line than the rest of its folder.

Ranks agree on everything in ranks.py: no other file of the package may use a collective or a store
of torch.distributed, but for the exchanges that carry rows, gradients, weights and figures.

Megatron's field with the dispatcher's name is read in one file alone, which knows when a layer of
another dispatcher is ours.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CSRC = [
    ["include"],  # the contract with the outside; everyone may know it
    ["base"],
    ["placement"],  # plain C++ as well
    ["protocol"],  # plain C++: the tests compile it for the host
    ["ptx"],
    ["comm"],
    ["tile"],
    ["moe"],
    ["actor"],
    ["kernel"],
    ["instances"],
    ["host"],
    ["api"],
]
PYTHON = [
    [
        *("door", "driver_release", "errors", "gate_rules", "promise", "scales", "_version"),
        *("streams", "touched"),
    ],
    ["attempts", "config", "driver", "releases", "saved", "torch_groups"],
    ["blockwise", "ending", "planner", "replicas", "weights"],
    ["low_rank"],
    ["adapted"],
    ["ranks"],
    ["telemetry.record", "measured.files"],
    ["measured.calibration"],
    ["telemetry", "router"],
    ["options"],
    ["checks", "eager", "expert_group", "hooks", "multipath"],
    ["call"],
    ["kernel", "hosts", "oracle"],
    ["measured.fit"],
    ["separate"],
    ["select", "autograd", "own_router"],
    ["layer"],
    ["data_parallel", "gates", "measured", "repeats", "unchanged"],
    ["adapters"],
    ["bench"],
    [
        *("autoload", "automodel", "calibrate", "deepspeed", "run", "schedule", "torchtitan"),
        "transformers",
    ],
    ["doctor"],
    ["__main__"],
]
KERNEL = [
    ["bindings"],
    ["captured", "early_fc2", "gradients", "memory", "ops", "records", "rows", "symmetric"],
    ["group_memory"],
    ["tables"],
    ["backend"],
]
HOSTS = [
    ["grid", "routes"],
    ["rail"],
    ["crossing"],
    ["guests"],
    ["backend"],
]
MULTIPATH = [
    ["balancer", "queues"],
    ["links", "memory"],
    ["board", "reductions", "thread_queues", "trials", "watchdog"],
    ["ring", "transfers"],
    ["peer_copies"],
    ["choose"],
    ["multipath"],
]
SEPARATE = [
    ["plan", "precision"],
    ["exchange", "records", "steps"],
    ["degree", "kernels", "ways"],
    ["agreement", "orders", "own_experts", "slices"],
    ["parts", "replicas"],
    ["backend"],
    ["reference"],
]
MEASURED = [
    ["clock", "files", "reach", "start"],
    ["calibration", "fit"],
    ["machine", "trace", "two_gpus"],
    ["__main__"],
]
BENCH = [
    ["shapes", "stopwatch", "style"],
    ["described", "machine", "timer"],
    ["problem"],
    ["correctness"],
    ["unfused"],
    ["layers", "megatron_layer"],
    ["measure"],
    ["picture", "table"],
    ["command"],
    ["__main__"],
]
ADAPTERS = [
    ["collectives", "experts", "forwards", "gradients", "held", "options", "patch", "probe"],
    ["indexed", "metrics"],
    ["automodel", "deepspeed", "megatron", "torchtitan", "transformers"],
]
MEGATRON = [
    ["fixes", "fp8", "settings"],
    ["dispatcher"],
    ["bridge", "config", "peers"],
    ["arguments", "offload", "shape"],
    ["buckets"],
    ["lora"],
    ["early_routing", "weights"],
    ["routed", "unchanged"],
    ["repeat"],
    ["gate_routers", "megakernel", "metrics", "schedule"],
    ["layer"],
]
MEGATRON_CONFIG = [
    ["asked", "computation"],
    ["communicators"],
    ["notices", "refusals"],
    ["replaced"],
]
MEGATRON_BUCKETS = [
    ["hooks", "links", "state"],
    ["sizes"],
    ["ddp"],
]
DEEPSPEED = [
    ["experts", "forwards", "routes", "settings"],
    ["gates", "routed"],
    ["layers", "metrics", "slices", "unchanged"],
    ["autoep", "native", "notices", "refusals", "repeats"],
    ["attach"],
    ["initialize"],
]
TRANSFORMERS = [
    ["form"],
    ["experts"],
    ["parallel"],
    ["register"],
]
AUTOMODEL = [
    ["form"],
    ["experts"],
    ["seam"],
    ["backend"],
]
DOCTOR = [
    ["fact"],
    ["attention", "installed", "machine"],
    ["trial"],
]
PACKAGE = Path("flashmoe_megatron")
NAMED = r"^([\w.]+):\w+$"
"""The module of a name as pkgutil.resolve_name takes it."""
EVERYWHERE = "__init__"  # names the public, so it may know all
AGREES = "ranks.py"
EXCHANGES = {
    "bench/correctness.py",  # all ranks' tokens, for the oracle
    "bench/unfused.py",
    "data_parallel.py",  # experts and their gradients between replicas
    "hosts/rail.py",
    "multipath/links.py",
    "multipath/multipath.py",  # what is too small for several links
    "measured/machine.py",  # times these collectives
    "separate/agreement.py",
    "separate/exchange.py",
    "separate/ways.py",
    "telemetry/reporter.py",  # sums of figures, without a wait
}
COLLECTIVES = {
    f"{verb}{form}"
    for verb in ("all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce")
    for form in ("", "_coalesced", "_into_tensor", "_object", "_object_list", "_single")
} | {
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *("send", "isend", "recv", "irecv", "send_object_list", "recv_object_list"),
    *("batch_isend_irecv", "barrier", "monitored_barrier"),
}
STORES = {"_get_default_store", "FileStore", "HashStore", "PrefixStore", "TCPStore"}

NAMES_DISPATCHER = "adapters/megatron/dispatcher.py"
DISPATCHERS_FIELD = "moe_token_dispatcher_type"

Edge = tuple[Path, str, str]


def layer_of_header(parts: tuple[str, ...]) -> str:
    """The layer of a path below csrc/, flashmoe/ being a directory without a meaning of its own."""
    return parts[1] if parts[0] == "flashmoe" and len(parts) > 2 else parts[0]


def csrc_edges(root: Path) -> Iterator[Edge]:
    """Every inclusion of one file under csrc/ by another."""
    for path in sorted(p for p in root.rglob("*") if p.suffix in {".cu", ".cuh", ".h", ".cpp"}):
        user = layer_of_header(path.relative_to(root).parts)
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', path.read_text(), re.M):
            if (root / name).is_file():
                yield path, user, layer_of_header(Path(name).parts)
            elif (path.parent / name).is_file():
                below = (path.parent / name).resolve().relative_to(root.resolve())
                yield path, user, layer_of_header(below.parts)


def python_edges(root: Path, folder: str = "") -> Iterator[Edge]:
    """Every import of one module of the package, or of one of its folders, by another.

    Imports inside functions count as well, and so do names of modules, which are imported later.
    """
    prefix = [root.name, *Path(folder).parts]
    for path in sorted((root / folder).rglob("*.py")):
        user = ".".join(path.relative_to(root / folder).with_suffix("").parts[:2])
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = re.findall(NAMED, node.value)
            else:
                continue
            for name in names:
                parts = name.split(".")
                if parts[: len(prefix)] == prefix:
                    yield path, user, ".".join(parts[len(prefix) : len(prefix) + 2])


def messages(root: Path) -> Iterator[str]:
    """One line for every collective and store that a file other than an exchange uses."""
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).as_posix() in EXCHANGES | {AGREES}:
            continue
        tree = ast.parse(path.read_text())
        modules: dict[str, str] = {}  # what names of the file stand for
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name if alias.asname else alias.name.split(".")[0]
                    modules[alias.asname or whole] = whole
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in ast.walk(tree):
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            first, *rest = ast.unparse(node).split(".")
            *parents, used = [*modules.get(first, "").split("."), *rest]
            if parents[:2] == ["torch", "distributed"] and used in COLLECTIVES | STORES:
                yield (
                    f"{path}:{node.lineno}: '{used}' of torch.distributed is for {AGREES} and the "
                    "exchanges of tools/check_layers.py"
                )


def dispatchers(root: Path) -> Iterator[str]:
    """One line for every place but one that reads the name of the dispatcher.

    The constant FIELD of that file stands for the name, and may not be read with getattr.
    """
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).as_posix() == NAMES_DISPATCHER:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.expr):
                continue
            by_name = isinstance(node, ast.Attribute) and node.attr == DISPATCHERS_FIELD
            by_text = isinstance(node, ast.Constant) and node.value == DISPATCHERS_FIELD
            by_constant = isinstance(node, ast.Call) and (
                ast.unparse(node.func) == "getattr" and "FIELD" in map(ast.unparse, node.args)
            )
            if by_name or by_text or by_constant:
                yield (
                    f"{path}:{node.lineno}: '{DISPATCHERS_FIELD}' is read in {NAMES_DISPATCHER} "
                    "alone: ask is_ours"
                )


def violations(edges: Iterator[Edge], layers: list[list[str]]) -> Iterator[str]:
    """One line for every edge that goes up, sideways, or out of the architecture."""
    height = {name: i for i, line in enumerate(layers) for name in line}
    for path, *ends in edges:
        user, used = (name if name in height else name.split(".")[0] for name in ends)
        if user in (used, EVERYWHERE):
            continue
        for name in (user, used):
            if name not in height:
                yield f"{path}: '{name}' is in no layer of tools/check_layers.py"
                break
        else:
            if height[used] >= height[user]:
                yield f"{path}: '{user}' must not use '{used}'"


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    found = [
        *violations(csrc_edges(Path("csrc")), CSRC),
        *violations(python_edges(PACKAGE), PYTHON),
        *messages(PACKAGE),
        *dispatchers(PACKAGE),
        *violations(python_edges(PACKAGE, "kernel"), KERNEL),
        *violations(python_edges(PACKAGE, "hosts"), HOSTS),
        *violations(python_edges(PACKAGE, "multipath"), MULTIPATH),
        *violations(python_edges(PACKAGE, "separate"), SEPARATE),
        *violations(python_edges(PACKAGE, "measured"), MEASURED),
        *violations(python_edges(PACKAGE, "doctor"), DOCTOR),
        *violations(python_edges(PACKAGE, "bench"), BENCH),
        *violations(python_edges(PACKAGE, "adapters"), ADAPTERS),
        *violations(python_edges(PACKAGE, "adapters/megatron"), MEGATRON),
        *violations(python_edges(PACKAGE, "adapters/megatron/config"), MEGATRON_CONFIG),
        *violations(python_edges(PACKAGE, "adapters/megatron/buckets"), MEGATRON_BUCKETS),
        *violations(python_edges(PACKAGE, "adapters/deepspeed"), DEEPSPEED),
        *violations(python_edges(PACKAGE, "adapters/transformers"), TRANSFORMERS),
        *violations(python_edges(PACKAGE, "adapters/automodel"), AUTOMODEL),
    ]
    print("\n".join(found) or "layers: ok")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
