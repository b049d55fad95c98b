"""The project's own checks find what they are there to find."""

import os
import re
import subprocess
import sys

import pytest

import check_layers
import check_prose
import nvcc_build

ROOT = nvcc_build.ROOT


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"flashmoe/tile/gemm.cuh": '#include "flashmoe/ptx/wgmma.cuh"\n'}, []),
        ({"flashmoe/ptx/wgmma.cuh": '#include "flashmoe/tile/gemm.cuh"\n'}, ["'ptx'", "'tile'"]),
        ({"flashmoe/comm/heap.cuh": "#include <flashmoe/api.h>\n"}, []),  # no file of ours
        ({"flashmoe/base/shape.cuh": '#include "include/flashmoe.h"\n'}, []),
        ({"flashmoe/base/shape.cuh": '#include "../ptx/wgmma.cuh"\n'}, ["'base'", "'ptx'"]),
        ({"flashmoe/news/x.cuh": '#include "flashmoe/ptx/wgmma.cuh"\n'}, ["'news'", "no layer"]),
    ],
)
def test_layers_of_csrc(tmp_path, files, found):
    rest = {"flashmoe/ptx/wgmma.cuh": "", "flashmoe/tile/gemm.cuh": "", "include/flashmoe.h": ""}
    write(tmp_path, rest | files)
    lines = list(check_layers.violations(check_layers.csrc_edges(tmp_path), check_layers.CSRC))
    assert bool(lines) == bool(found)
    assert all(part in lines[0] for part in found)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"layer.py": "from flashmoe_megatron.config import MoEConfig\n"}, []),
        ({"__init__.py": "from flashmoe_megatron.layer import FlashMoELayer\n"}, []),
        ({"config.py": "import flashmoe_megatron.layer\n"}, ["'config'", "'layer'"]),
        (
            {"config.py": "def late():\n    from flashmoe_megatron import layer\n"},
            ["'config'", "'layer'"],
        ),
        ({"config.py": 'NAME = "flashmoe_megatron.layer:Layer"\n'}, ["'config'", "'layer'"]),
        (
            {"kernel/ops.py": "from flashmoe_megatron.hosts import grid\n"},
            ["'kernel'", "'hosts'"],
        ),
        ({"separate/degree.py": "from flashmoe_megatron.measured.fit import read_fit\n"}, []),
        (
            {"separate/degree.py": "from flashmoe_megatron.measured import trace\n"},
            ["'separate'", "'measured'"],
        ),
        ({"kernel/ops.py": "from flashmoe_megatron.kernel import tables\n"}, ["'ops'", "'tables'"]),
        ({"kernel/ops.py": "from flashmoe_megatron.kernel import bindings\n"}, []),
        ({"news.py": "from flashmoe_megatron import config\n"}, ["'news'", "no layer"]),
    ],
)
def test_layers_of_the_package(tmp_path, files, found):
    root = tmp_path / "flashmoe_megatron"
    write(root, files)
    lines = [
        *check_layers.violations(check_layers.python_edges(root), check_layers.PYTHON),
        *check_layers.violations(check_layers.python_edges(root, "kernel"), check_layers.KERNEL),
    ]
    assert bool(lines) == bool(found)
    assert all(part in lines[0] for part in found)


DIST = "import torch.distributed as dist\n\n"


@pytest.mark.parametrize(
    ("name", "text", "used"),
    [
        ("layer.py", f"{DIST}dist.barrier()\n", "barrier"),
        (
            "hosts/grid.py",
            f"{DIST}def run(x):\n    dist.all_gather_into_tensor(x, x)\n",
            "all_gather",
        ),
        (
            "hosts/grid.py",
            "from torch.distributed import all_reduce as add\n\nadd(1)\n",
            "all_reduce",
        ),
        ("gates.py", f"import functools\n{DIST}run = functools.partial(dist.isend, 1)\n", "isend"),
        ("gates.py", "import torch\n\ntorch.distributed.scatter(1)\n", "scatter"),
        (
            "run.py",
            "from torch.distributed import distributed_c10d\n\n"
            'distributed_c10d._get_default_store().set("a", "b")\n',
            "_get_default_store",
        ),
        ("run.py", f'{DIST}dist.TCPStore("here", 1).get("a")\n', "TCPStore"),
        ("layer.py", f"{DIST}dist.get_rank() + len(dist.get_process_group_ranks(None))\n", None),
        ("layer.py", "import torch\n\ntorch.ones(1).gather(0, 0)\n", None),
        ("ranks.py", f"{DIST}dist.barrier()\n", None),
        ("hosts/rail.py", f"{DIST}dist.barrier()\n", None),
    ],
)
def test_what_ranks_agree_on_is_in_one_file(tmp_path, name, text, used):
    write(tmp_path, {name: text})
    lines = list(check_layers.messages(tmp_path))
    assert bool(lines) == bool(used)
    assert used is None or (f"{name}:" in lines[0] and f"'{used}" in lines[0])


@pytest.mark.parametrize(
    ("name", "text", "is_found"),
    [
        ("layer.py", "def f(config):\n    return config.moe_token_dispatcher_type == 'x'\n", True),
        ("layer.py", "f = lambda c: getattr(c, 'moe_token_dispatcher_type', None)\n", True),
        ("layer.py", "from x import FIELD\nf = lambda c: getattr(c, FIELD)\n", True),
        ("layer.py", "from x import FIELD\nf = lambda c: showing(c, {FIELD: 'x'})\n", False),
        ("layer.py", "make(moe_token_dispatcher_type='alltoall')\n", False),
        (check_layers.NAMES_DISPATCHER, "f = lambda c: c.moe_token_dispatcher_type\n", False),
    ],
)
def test_one_file_reads_the_dispatchers_name(tmp_path, name, text, is_found):
    write(tmp_path, {name: text})
    assert bool(list(check_layers.dispatchers(tmp_path))) == is_found


def test_every_exchange_that_is_named_is_there():
    for name in check_layers.EXCHANGES | {check_layers.AGREES}:
        assert (ROOT / check_layers.PACKAGE / name).is_file(), name


@pytest.mark.parametrize(
    ("importer", "imported", "found"),
    [
        ("megatron/layer.py", "megatron.routed", []),
        ("megatron/__init__.py", "megatron.layer", []),
        ("megatron/routed.py", "megatron.layer", ["'routed'", "'layer'"]),
        ("megatron/routed.py", "megatron.buckets.state", []),
        ("megatron/buckets/state.py", "megatron.routed", ["'buckets'", "'routed'"]),
        ("megatron/buckets/state.py", "megatron.buckets.ddp", ["'state'", "'ddp'"]),
        ("megatron/config/asked.py", "megatron.config.refusals", ["'asked'", "'refusals'"]),
        ("megatron/config/news.py", "megatron.config.asked", ["'news'", "no layer"]),
        ("megatron/news.py", "megatron.settings", ["'news'", "no layer"]),
        ("deepspeed/attach.py", "indexed", []),
        ("deepspeed/routes.py", "deepspeed.layers", ["'routes'", "'layers'"]),
        ("transformers/form.py", "transformers.experts", ["'form'", "'experts'"]),
        ("deepspeed/attach.py", "megatron.settings", ["'deepspeed'", "'megatron'"]),
        ("experts.py", "indexed", ["'experts'", "'indexed'"]),
    ],
)
def test_layers_of_the_adapters(tmp_path, monkeypatch, capsys, importer, imported, found):
    """Looked at as the program does, in a package that has one import, inside a function."""
    package, _, name = f"flashmoe_megatron.adapters.{imported}".rpartition(".")
    text = f"def late():\n    from {package} import {name}\n"
    write(tmp_path / "flashmoe_megatron/adapters", {importer: text})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["check_layers"])
    assert check_layers.main() == bool(found)
    said = capsys.readouterr().out
    assert all(part in said for part in found or ["layers: ok"])


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.py", '"""Counts tokens.\n\nOf each rank its own.\n"""\n', [3]),
        ("a.py", '"""Counts.\n\nArgs:\n    x: Of a rank.\n    y: See there.\n"""\n', [4, 5]),
        ("a.py", 'ROWS = 128\n"""Those of a tile."""\n', [2]),
        ("a.py", "x = 1  # of a rank\n# That of a peer.\n", [1, 2]),
        ("a.py", "# The layer waits. Whose turn it\n# is says the queue. Of two, one.\n", [1, 2]),
        ("a.py", "# The ranks (Of two, one).\n# Offsets. Office.\n# The Order\n# Of Things.\n", []),
        ("a.py", '"""Takes ``Of``: `Whose`."""\nx = "Of a string"\ny = "# Of it"\n', []),
        ("a.py", "# The sum of rows\n# of all ranks, those of peers included.\n", []),
        (
            "a.cuh",
            "// Rows.\n// Of a warp.\nint a;  // of a lane\nint b; /* Whose\n row. */\n",
            [2, 3, 4],
        ),
        (
            "a.cuh",
            'const char* a = "// Of it";  // Most tokens of a CTA.\nint b = \'"\'; // Of\n',
            [2],
        ),
        ("a.sh", "#!/bin/sh\n# Of all.\necho ${#Of} '#Of'\n", [2]),
        (
            "a.md",
            "# Of tiles\n\n- Whose rows.\n- It is one.\n  Of it.\n\n| a | Of b |\n",
            [1, 3, 5, 7],
        ),
        ("a.md", "It is *Gone. Of it* no more.\n\n**Those of** peers.\n", [1, 3]),
        (
            "a.md",
            '| of rows |\n\nA rule: `Of`, "Of".\n\n```\n# Of code.\n```\n<!-- Of it -->\n',
            [],
        ),
    ],
)
def test_prose(tmp_path, name, text, lines):
    path = tmp_path / name
    path.write_text(text)
    found = list(check_prose.findings(path))
    assert [int(line.removeprefix(f"{path}:").partition(":")[0]) for line in found] == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('"""What has arrived."""\n', [1]),
        ('"""Whether rows fit."""\n', [1]),
        ('"""Where rows lie."""\n', [1]),
        ('"""Where rows fit, returns."""\n', []),
        ("# Ranks\n# of which one is late.\n", [2]),
        ("# The rank that nobody names.\n", [1]),
        ("# A row\n#\n# and one\n# that is sent.\n", [3]),
        ("# The others have heard.\n", [1]),
        ("# A launch behind the last one.\n", [1]),
        ("# The libraries run in turns.\n", [1]),
        ('x = "nobody"  # Names the `nobody` of the table.\n', []),
        ("# A record is [here](a.md#what-came-behind).\n", []),
    ],
)
def test_plain_prose(tmp_path, text, lines):
    path = tmp_path / "a.py"
    path.write_text(text)
    found = list(check_prose.findings(path, is_plain=True))
    assert [int(line.removeprefix(f"{path}:").partition(":")[0]) for line in found] == lines
    assert not list(check_prose.findings(path))


def test_plain_folders_are_there():
    assert all((ROOT / name).exists() for name in check_prose.PLAIN)


def test_prose_of_the_whole_project_is_looked_at():
    seen = {path.relative_to(ROOT).parts[0] for path in check_prose.files([])}
    assert {*check_prose.FOLDERS, "README.md", "pyproject.toml"} <= seen


def test_hooks_use_the_versions_of_the_extra_dev():
    pins = r"(ruff|clang-format|codespell)==([\d.]+)"
    hooks = set(re.findall(pins, (ROOT / ".pre-commit-config.yaml").read_text()))
    assert hooks == set(re.findall(pins, (ROOT / "pyproject.toml").read_text()))
    assert len(hooks) == 3


def test_mypy_checks_the_tests_that_need_a_gpu():
    """Each folder that has some is among the files of mypy."""
    _, _, settings = (ROOT / "pyproject.toml").read_text().partition("[tool.mypy]\n")
    files = re.findall(r'"(.*?)"', settings[settings.index("files = [") : settings.index("]")])
    folders = {
        str(path.parent.relative_to(ROOT))
        for path in ROOT.glob("tests/*/test_*.py")
        if re.search(r"\bmark\.(multi_)?gpu\b", path.read_text())
    }
    assert {"tests/gpu", "tests/multi_gpu"} <= folders <= set(files)


TYPED = """
class Backend:
    def forward(self, x: int, *, training: bool) -> tuple[int, int]:
        return x, int(training)


def run():
    backend = Backend()
"""


def test_what_mypy_finds(tmp_path):
    """In tests calls, names and unpackings that no longer fit; in tools that build everything."""
    pytest.importorskip("mypy")
    lines = {
        "backend.forward(1)": ["call-arg"],
        "backend.forward(1, training=True).rows": ["attr-defined"],
        "backend.backward()": ["attr-defined"],
        "one, other, last = backend.forward(1, training=True)": ["misc"],
        "unknown(backend)": ["name-defined"],
        "backend.forward('1', training=True)": [],
        "return backend.forward(1, training=True)": [],
    }
    tools = ["tools/build.py", "tools/nvcc_build.py"]
    wanted = {tool: ["no-untyped-def"] for tool in tools}
    for number, codes in enumerate(lines.values(), TYPED.count("\n") + 1):
        wanted[f"tests/gpu/test_made.py:{number}"] = codes
    write(
        tmp_path,
        {
            "tests/__init__.py": "",
            "tests/gpu/__init__.py": "",
            "tests/gpu/test_made.py": TYPED + "".join(f"    {line}\n" for line in lines),
            **dict.fromkeys(tools, f"{TYPED}    return backend\n"),
        },
    )
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "tests/gpu/test_made.py", *tools],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {place: [] for place in wanted}
    for file, number, code in re.findall(r"(?m)^(\S+):(\d+): error: .*\[(.*)\]$", done.stdout):
        found[file if file in tools else f"{file}:{number}"].append(code)
    assert found == wanted, done.stdout + done.stderr


def test_the_protocols_page_has_every_counter_that_a_launch_waits_for():
    text = (ROOT / "csrc/flashmoe/moe/workspace.cuh").read_text()
    _, _, fields = text.partition("struct Tickets {\n")
    fields = re.sub(r"//.*", "", fields.partition("};")[0])
    names = re.findall(r"(\w+)(?:\[\d+\])?[,;]", fields)
    assert {"tile", "leaving", "barrier", "tokens_copied"} <= set(names)
    page = (ROOT / "csrc/PROTOCOL.md").read_text()
    plain = {"tile", "dispatch", "pushed", "pulled"}  # tickets are taken, and none waits for them
    assert not [
        name
        for name in names
        if name not in plain and f"`{name}" not in page and f"`tickets.{name}" not in page
    ]


def test_readme_begins_with_the_two_commands():
    blocks = re.findall(r"```\w*\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks[:2] == ["bash examples/pretrain_moe.sh\n", "bash tests/run.sh\n"]


def test_readme_is_read_in_a_minute():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 110]


def test_readme_has_a_short_table_of_one_feature_a_row():
    text = (ROOT / "README.md").read_text()
    _, _, table = text.partition("| | Megatron | DeepSpeed | PyTorch |\n")
    rows = [line.split(" | ") for line in table.partition("\n\n")[0].splitlines()[1:]]
    assert 0 < len(rows) <= 15
    assert all(len(row) == 4 for row in rows)
    marks = {cell.strip(" |") for row in rows for cell in row[1:]}
    assert {"yes", "no", "n/a"} <= marks
    assert "*no*" in text
    assert "*n/a*" in text
