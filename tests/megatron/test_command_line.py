"""Settings, flags, the launcher and the opt-in autoload, each as a user meets them."""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_megatron.adapters import megatron
from flashmoe_megatron.adapters.megatron import settings as settings_module
from flashmoe_megatron.adapters.megatron.arguments import extend_parser
from flashmoe_megatron.adapters.megatron.settings import (
    Settings,
    configure,
    current_settings,
    flag_of,
)
from flashmoe_megatron.config import MAX_TIMEOUT
from flashmoe_megatron.errors import ConfigError, FlashMoEError, original_of
from flashmoe_megatron.options import options_of
from tests import programs
from tests.distributed import PATIENCE_S
from tests.megatron.harness import megatron_parser


@pytest.fixture
def _forget_settings() -> object:
    yield
    settings_module._chosen = None


def test_parser_knows_the_type_and_the_flags() -> None:
    parsed = extend_parser(megatron_parser()).parse_args(
        [
            "--moe-token-dispatcher-type",
            "flashmoe",
            "--flashmoe-backend",
            "reference",
            "--flashmoe-timeout",
            "7.5",
            "--flashmoe-reserved-sms",
            "8",
            "--flashmoe-row-bound",
            "1.5",
            "--flashmoe-symmetric-memory",
            "nvshmem",
            "--flashmoe-max-tokens",
            "4096",
        ]
    )
    assert parsed.moe_token_dispatcher_type == "flashmoe"
    assert parsed.flashmoe_backend == "reference"
    assert parsed.flashmoe_timeout == 7.5
    assert parsed.flashmoe_reserved_sms == 8
    assert parsed.flashmoe_row_bound == 1.5
    assert parsed.flashmoe_symmetric_memory == "nvshmem"
    assert parsed.flashmoe_max_tokens == 4096


def test_defaults_of_the_flags_are_those_of_the_settings() -> None:
    parsed = extend_parser(megatron_parser()).parse_args([])
    given = {
        name.removeprefix("flashmoe_"): value
        for name, value in vars(parsed).items()
        if name.startswith("flashmoe_")
    }
    assert Settings(**given) == Settings()
    assert [Settings(metrics=m).backend_options()["counters"] for m in ("default", "none")] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("args", "seconds"),
    [
        (None, 120.0),
        ({}, 120.0),
        ({"distributed_timeout_minutes": 10}, 600.0),
        ({"distributed_timeout_minutes": 10**9}, MAX_TIMEOUT),
    ],
    ids=str,
)
def test_a_peer_is_waited_for_as_long_as_the_script_does(
    args: dict[str, int] | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_script = None if args is None else argparse.Namespace(**args)
    monkeypatch.setattr(settings_module, "megatron_args", lambda: of_script)
    assert Settings().backend_options()["timeout"] == seconds
    assert Settings(timeout=7.5).backend_options()["timeout"] == 7.5


def test_parser_without_the_dispatcher_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="--moe-token-dispatcher-type"):
        extend_parser(argparse.ArgumentParser())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"backend": "cuda"},
            "--flashmoe-backend 'cuda': wanted one of auto, kernel, scheduled, reference",
        ),
        ({"symmetric_memory": "nvls"}, "--flashmoe-symmetric-memory 'nvls'"),
        ({"timeout": 0.0}, "--flashmoe-timeout 0.0: wanted seconds above 0"),
        ({"reserved_sms": -1}, "--flashmoe-reserved-sms -1"),
        ({"row_bound": 0.9}, "--flashmoe-row-bound 0.9: wanted a number of at least 1"),
        ({"max_tokens": 0}, "--flashmoe-max-tokens 0"),
        ({"heap": 1}, "option 'heap' is unknown: wanted some of "),
    ],
)
def test_settings_without_meaning_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configure(**options)


@pytest.mark.usefixtures("_forget_settings")
def test_settings_from_code_go_first() -> None:
    assert current_settings() == Settings()
    configure(backend="reference", max_tokens=12)
    assert current_settings() == Settings(backend="reference", max_tokens=12)


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
    )


SCRIPT = """
import sys
from pathlib import Path
assert "torch" not in sys.modules, "the launcher imported torch before the script"
from beside import VALUE
from megatron.core.transformer.moe.moe_layer import MoELayer
assert hasattr(MoELayer.dispatch, "_flashmoe_original")
print(__name__, sys.argv[1:], VALUE)
"""


def test_launcher_runs_a_script_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 42\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python("-m", "flashmoe_megatron.run", str(tmp_path / "script.py"), "--a", "b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "__main__ ['--a', 'b'] 42"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no safe path before 3.11")
def test_launcher_leaves_a_safe_path_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.path[0])")
    done = run_python("-P", "-m", "flashmoe_megatron.run", str(script))
    assert done.stdout.strip() == str(Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "wanted a training script, got nothing"),
        (["--quiet"], "wanted a training script, got --quiet"),
        (["no.py"], "no such file"),
    ],
)
def test_launcher_says_what_it_wants(arguments: list[str], words: str) -> None:
    done = run_python("-m", "flashmoe_megatron.run", *arguments)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


BAD_WIDTH = """
from flashmoe_megatron import MoEConfig
MoEConfig(hidden=100, intermediate=64, num_experts=4, topk=2, activation="silu", gated=True,
          num_ranks=2, max_tokens=32)
"""


def test_launcher_prints_an_error_once_as_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BAD_WIDTH)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = run_python(*ranks, "-m", "flashmoe_megatron.run", str(tmp_path / "script.py"))
    assert done.returncode == 1
    found = re.findall(r"^flashmoe_megatron.run: .*", done.stderr, re.M)
    wanted = r"flashmoe_megatron.run: ConfigError: rank [01]: hidden=100: must be an int, .*"
    assert [re.fullmatch(wanted, line) is not None for line in found] == [True], done.stderr
    assert done.stderr.count("Traceback") == 1  # torchrun's own


def test_launcher_leaves_other_errors_alone(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import no_such_module")
    done = run_python("-m", "flashmoe_megatron.run", str(tmp_path / "script.py"))
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'no_such_module'\n")


def test_launcher_names_the_extra_with_megatron(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").touch()
    (tmp_path / "script.py").write_text("import megatron.core")
    done = run_python("-m", "flashmoe_megatron.run", str(tmp_path / "script.py"))
    sentence = 'Megatron-Core is not installed: pip install "flashmoe-megatron[megatron]"'
    assert (done.returncode, done.stderr) == (
        1,
        f"flashmoe_megatron.run: MissingError: {sentence}\n",
    )


IGNORING = "import sys; sys.argv[1:] = []"
PARSING = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--flashmoe-mine")
print(parser.parse_known_args()[0].flashmoe_mine)
"""
CONFIGURING = """
import argparse
from flashmoe_megatron.adapters.megatron import configure, current_settings
argparse.ArgumentParser().parse_known_args()
configure(keep="inputs")
current_settings()
print("a layer was built")
"""


@pytest.mark.parametrize(
    ("script", "flag", "said"),
    [
        (PARSING, "--flashmoe-mine=3", ""),
        (
            PARSING,
            "--flashmoe-kep=all",
            "takes --flashmoe-kep, the nearest is --flashmoe-keep: ",
        ),
        (CONFIGURING, "--flashmoe-keep=all", "no parser of the script takes --flashmoe-keep: want"),
        (IGNORING, "--flashmoe-keep=all", "no parser of the script takes --flashmoe-keep: wanted"),
    ],
    ids=["parsed", "not parsed", "configured", "ignored"],
)
def test_launcher_refuses_a_flag_that_no_parser_takes(
    script: str, flag: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(script)
    done = run_python("-m", "flashmoe_megatron.run", str(tmp_path / "script.py"), flag)
    assert done.returncode == bool(said), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == bool(said)
    assert "a layer was built" not in done.stdout


def build(names: list[str], error: FlashMoEError) -> None:
    """Builds modules within each other, as Megatron does, of which the innermost has an error."""
    try:
        if names[1:]:
            build(names[1:], error)
        raise error
    except FlashMoEError as caught:
        raise type(caught)(f"{caught} when instantiating {names[0]}")  # noqa: B904 - as Megatron


def test_the_first_words_of_an_error_are_found() -> None:
    error = ConfigError("hidden=100")
    with pytest.raises(ConfigError, match="MoELayer when instantiating Block$") as caught:
        build(["Block", "MoELayer"], error)
    assert original_of(caught.value) is error
    assert original_of(error) is error


def test_install_warns_where_there_is_no_megatron(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(megatron.importlib.util, "find_spec", lambda name: None)
    megatron.install()
    assert 'pip install "flashmoe-megatron[megatron]"' in caplog.text


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_launcher_prints_its_help(flag: str) -> None:
    done = run_python("-m", "flashmoe_megatron.run", flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m flashmoe_megatron.run SCRIPT [ARGUMENTS]")
    for one in options_of(Settings):
        assert flag_of(one.name) in done.stdout


AUTOLOAD = """
import os
from flashmoe_megatron.autoload import autoload
for os.environ["FLASHMOE_AUTOLOAD"] in {values}:
    autoload()
from megatron.core.transformer.moe.moe_layer import MoELayer
print(hasattr(MoELayer.dispatch, "_flashmoe_original"))
"""


@pytest.mark.parametrize(
    ("values", "answer"),
    [(("1",), "True"), (("yes",), "True"), (("TRUE", "on"), "True"), (("0", "", "off"), "False")],
)
def test_autoload_is_opt_in(values: tuple[str, ...], answer: str, with_megatron: Path) -> None:
    program = AUTOLOAD.format(values=values)
    done = programs.run_python("-c", program, forked_from=with_megatron, FLASHMOE_AUTOLOAD="")
    assert done.stdout.strip() == answer, done.stderr


REFUSED = """
import torch
from flashmoe_megatron.autoload import autoload
autoload()
from megatron.core.transformer.moe.moe_layer import MoELayer
from flashmoe_megatron.errors import ConfigError, FlashMoEError, original_of
try:
    MoELayer(None)
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("environment", "lines"), [({}, 1), ({"RANK": "1"}, 0), ({"TORCHELASTIC_RUN_ID": "1"}, 0)]
)
def test_autoload_refuses_other_values_at_the_first_layer(
    environment: dict[str, str], lines: int, with_megatron: Path
) -> None:
    sentence = "FLASHMOE_AUTOLOAD='please': wanted 1, yes, true, on to install flashmoe, or 0"
    wrong = {"FLASHMOE_AUTOLOAD": "please", **environment}
    done = programs.run_python("-c", REFUSED, forked_from=with_megatron, **wrong)
    assert done.stdout.strip() == sentence, done.stderr
    assert done.stderr.count(sentence) == lines


HELPERS = """
from flashmoe_megatron.adapters.megatron import install
install()
from megatron.core.datasets import utils
utils.compile_helpers()
print("kept")
"""


def test_built_dataset_helpers_are_kept(with_megatron: Path) -> None:
    """A wheel has no Makefile: stock Megatron would end the process here."""
    done = programs.run_python("-c", HELPERS, forked_from=with_megatron)
    assert done.stdout.strip() == "kept", done.stderr


IMPORTS = """
import sys
from flashmoe_megatron.adapters.patch import when_imported
seen = []
when_imported("beside", lambda module: seen.append(module.VALUE))
when_imported("beside", lambda module: seen.append(module.__name__))
assert seen == []
import beside
assert seen == [42, "beside"], seen
when_imported("beside", lambda module: seen.append("at once"))
assert seen[-1] == "at once"
when_imported("broken", lambda module: seen.append("never"))
try:
    import broken
except ZeroDivisionError:
    assert seen[-1] == "at once"
else:
    raise AssertionError("the module's own error was lost")
print("ok", beside.__spec__.origin == beside.__file__)
"""


def test_callbacks_follow_the_import(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 42\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "script.py").write_text(IMPORTS)
    done = run_python(str(tmp_path / "script.py"))
    assert done.stdout.strip() == "ok True", done.stderr


def test_torch_calls_the_autoload() -> None:
    """Torch calls what is registered in its group of entry points when it is imported."""
    try:
        distribution = importlib.metadata.distribution("flashmoe-megatron")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flashmoe-megatron is not installed, only importable")
    (entry,) = distribution.entry_points.select(group="torch.backends")
    assert entry.load().__module__ == "flashmoe_megatron.autoload"
