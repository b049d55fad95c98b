"""Checks the form of sentences in comments, docstrings and pages.

A sentence that begins with "Of", "Those of", "That of" or "Whose" leans on the name above it, and a
reader has to guess its subject; so does an argument whose text is ``See there.``. Where sentences
are plain, five more forms are refused, which leave out the verb or the actor, or use a word in an
uncommon sense. CONTRIBUTING.md has the rule. Messages in strings are not looked at.

::

    python tools/check_prose.py [--plain] [FILE_OR_FOLDER ...]
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc", "examples", "flashmoe_megatron", "tests", "tools")
RECORDS = ROOT / "tools" / "bench" / "results"
"""Pages of measurements, which stay as they were written."""
PLAIN = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "csrc",
    "examples",
    "flashmoe_megatron/PERFORMANCE.md",
    "flashmoe_megatron/README.md",
    "flashmoe_megatron/__init__.py",
    "flashmoe_megatron/__main__.py",
    "flashmoe_megatron/_version.py",
    "flashmoe_megatron/adapters/__init__.py",
    "flashmoe_megatron/adapters/automodel",
    "flashmoe_megatron/adapters/deepspeed/__init__.py",
    "flashmoe_megatron/adapters/deepspeed/attach.py",
    "flashmoe_megatron/adapters/deepspeed/autoep.py",
    "flashmoe_megatron/adapters/deepspeed/experts.py",
    "flashmoe_megatron/adapters/deepspeed/forwards.py",
    "flashmoe_megatron/adapters/deepspeed/initialize.py",
    "flashmoe_megatron/adapters/deepspeed/layers.py",
    "flashmoe_megatron/adapters/deepspeed/metrics.py",
    "flashmoe_megatron/adapters/deepspeed/native.py",
    "flashmoe_megatron/adapters/deepspeed/refusals.py",
    "flashmoe_megatron/adapters/deepspeed/routed.py",
    "flashmoe_megatron/adapters/deepspeed/routes.py",
    "flashmoe_megatron/adapters/deepspeed/settings.py",
    "flashmoe_megatron/adapters/deepspeed/slices.py",
    "flashmoe_megatron/adapters/experts.py",
    "flashmoe_megatron/adapters/forwards.py",
    "flashmoe_megatron/adapters/gradients.py",
    "flashmoe_megatron/adapters/held.py",
    "flashmoe_megatron/adapters/indexed.py",
    "flashmoe_megatron/adapters/megatron/COMING_FROM.md",
    "flashmoe_megatron/adapters/megatron/__init__.py",
    "flashmoe_megatron/adapters/megatron/arguments.py",
    "flashmoe_megatron/adapters/megatron/buckets",
    "flashmoe_megatron/adapters/megatron/config",
    "flashmoe_megatron/adapters/megatron/early_routing.py",
    "flashmoe_megatron/adapters/megatron/fixes.py",
    "flashmoe_megatron/adapters/megatron/fp8.py",
    "flashmoe_megatron/adapters/megatron/layer.py",
    "flashmoe_megatron/adapters/megatron/megakernel.py",
    "flashmoe_megatron/adapters/megatron/metrics.py",
    "flashmoe_megatron/adapters/megatron/offload.py",
    "flashmoe_megatron/adapters/megatron/peers.py",
    "flashmoe_megatron/adapters/megatron/routed.py",
    "flashmoe_megatron/adapters/megatron/schedule.py",
    "flashmoe_megatron/adapters/megatron/settings.py",
    "flashmoe_megatron/adapters/megatron/shape.py",
    "flashmoe_megatron/adapters/megatron/weights.py",
    "flashmoe_megatron/adapters/metrics.py",
    "flashmoe_megatron/adapters/options.py",
    "flashmoe_megatron/adapters/patch.py",
    "flashmoe_megatron/adapters/probe.py",
    "flashmoe_megatron/adapters/torchtitan/README.md",
    "flashmoe_megatron/adapters/torchtitan/__init__.py",
    "flashmoe_megatron/adapters/torchtitan/override.py",
    "flashmoe_megatron/adapters/transformers/__init__.py",
    "flashmoe_megatron/adapters/transformers/experts.py",
    "flashmoe_megatron/adapters/transformers/form.py",
    "flashmoe_megatron/adapters/transformers/parallel.py",
    "flashmoe_megatron/adapters/transformers/register.py",
    "flashmoe_megatron/autograd.py",
    "flashmoe_megatron/autoload.py",
    "flashmoe_megatron/automodel.py",
    "flashmoe_megatron/bench",
    "flashmoe_megatron/calibrate.py",
    "flashmoe_megatron/call.py",
    "flashmoe_megatron/checks.py",
    "flashmoe_megatron/config.py",
    "flashmoe_megatron/data_parallel.py",
    "flashmoe_megatron/deepspeed.py",
    "flashmoe_megatron/doctor",
    "flashmoe_megatron/door.py",
    "flashmoe_megatron/driver.py",
    "flashmoe_megatron/eager.py",
    "flashmoe_megatron/ending.py",
    "flashmoe_megatron/errors.py",
    "flashmoe_megatron/expert_group.py",
    "flashmoe_megatron/gates.py",
    "flashmoe_megatron/hosts",
    "flashmoe_megatron/kernel",
    "flashmoe_megatron/layer.py",
    "flashmoe_megatron/measured",
    "flashmoe_megatron/multipath",
    "flashmoe_megatron/options.py",
    "flashmoe_megatron/oracle.py",
    "flashmoe_megatron/own_router.py",
    "flashmoe_megatron/planner.py",
    "flashmoe_megatron/ranks.py",
    "flashmoe_megatron/releases.py",
    "flashmoe_megatron/replicas",
    "flashmoe_megatron/router.py",
    "flashmoe_megatron/run.py",
    "flashmoe_megatron/schedule.py",
    "flashmoe_megatron/select.py",
    "flashmoe_megatron/separate",
    "flashmoe_megatron/streams.py",
    "flashmoe_megatron/telemetry",
    "flashmoe_megatron/torch_groups.py",
    "flashmoe_megatron/torchtitan.py",
    "flashmoe_megatron/touched.py",
    "flashmoe_megatron/transformers.py",
    "flashmoe_megatron/weights.py",
    "pyproject.toml",
    "tools/README.md",
    "tools/bench/bench_training",
    "tools/bench/cards",
    "tools/bench/multipath.py",
    "tools/simulate",
    "tools/timeline",
    "tools/weak_scaling",
)
"""Files and folders whose sentences have none of the five forms."""

_CODE = "code"
"""Stands for anything but prose, so that the sentence around it keeps its length of one word."""
_C_LIKE = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|//[^\n]*|/\*.*?\*/', re.S)
_HASH = re.compile(r"(?:^|(?<=\s))#(?!!)[^\n]*", re.M)
_SPAN = re.compile(r"``[^`]+``|`[^`]+`|(?<=\])\([^()\s]+\)")
"""Code, and the target of a link."""
_NO_PROSE_OF_PAGES = re.compile(r"^```.*?^```|<!--.*?-->", re.S | re.M)
_MARK_OF_PAGES = re.compile(r"^\s*(?:[-*+]|\d+\.|#+|>)\s+|\||\n\s*\n", re.M)
_STARTS = re.compile(
    r"(?:\A|\n\s*\n|[.!?:;][\"')\]*_]*\s)[\s(*_]*(?P<words>(?:Of|Those of|That of|Whose)\b)"
)
_FIRST = re.compile(r"\A[\s(*_]*(?P<words>(?:of|those of|that of|whose)\b)", re.I)
"""The first word of a comment, which may be in lower case."""
_SEE = re.compile(r"\bSee there\b")
_NO_VERB = re.compile(r"\A[\s(*_]*(?:(?:What|Whether|Which|Who)\b|Where\b(?![^.]*,))")
"""A first word that leaves a comment or a docstring without a main verb."""
_FORMS = {
    "a clause with an actor and a verb": re.compile(
        r"\b(?:after|before|behind|beside|by|for|from|of|through|to|under|with)"
        r"\s+(?:which|whom|what)\b"
    ),
    "the actor's name": re.compile(r"\b(?:nobody|whoever|(?:one|those)\s+that)\b", re.I),
    '"learns", "receives" or "sends"': re.compile(r"\b(?:told|untold|hears?|heard)\b", re.I),
    '"after", "concurrently", "alternately" or "again"': re.compile(
        r"\b(?:behind|beside|anew|in\s+turns)\b", re.I
    ),
}
"""The words that are wanted in place of a form."""

Text = tuple[int, str]
"""The line at which a piece of prose begins, and the piece."""


def findings(path: Path, *, is_plain: bool = False) -> Iterator[str]:
    """Yields a line for every sentence of a file that has to be rewritten.

    Args:
        path: The file.
        is_plain: Whether its sentences may have none of the five forms.
    """
    source = path.read_text()
    is_page = path.suffix == ".md"
    for line, text in _READERS[path.suffix](source):
        prose = _SPAN.sub(lambda span: _CODE + "\n" * span[0].count("\n"), text)
        subject = "a sentence with a subject"
        found = {(match.start("words"), subject) for match in _STARTS.finditer(prose)}
        first = None if is_page else _FIRST.match(prose)
        if first is not None:
            found.add((first.start("words"), subject))
        found.update((match.start(), subject) for match in _SEE.finditer(prose))
        if is_plain:
            if not is_page and _NO_VERB.match(prose):
                found.add((0, "a sentence that begins with a verb or a noun"))
            for wanted, form in _FORMS.items():
                found.update((match.start(), wanted) for match in form.finditer(prose))
        for at, wanted in sorted(found):
            shown = " ".join(prose[at : at + 60].split())
            number = line + prose.count("\n", 0, at)
            yield f'{path}:{number}: wanted {wanted}, got "{shown}"'


def files(given: list[str]) -> Iterator[Path]:
    """Those given, or all of the project that hold prose."""
    roots = [Path(name) for name in given] or [
        *sorted(path for path in ROOT.iterdir() if path.is_file()),
        *(ROOT / folder for folder in FOLDERS),
    ]
    for root in roots:
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.suffix in _READERS and path.is_file() and RECORDS not in path.parents:
                yield path


def _is_plain(path: Path) -> bool:
    return any((ROOT / name) in (path.resolve(), *path.resolve().parents) for name in PLAIN)


def _python(source: str) -> Iterator[Text]:
    """Docstrings, also those below an attribute, and comments."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, text
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    yield from _joined([(token.start, token.string) for token in comments])


def _c_like(source: str) -> Iterator[Text]:
    """Comments of C, C++ and CUDA."""
    found = [match for match in _C_LIKE.finditer(source) if match[0].startswith("/")]
    yield from _joined([(_place(source, match.start()), match[0]) for match in found])


def _hash(source: str) -> Iterator[Text]:
    """Comments of shell scripts, TOML and YAML."""
    found = list(_HASH.finditer(source))
    yield from _joined([(_place(source, match.start()), match[0]) for match in found])


def _page(source: str) -> Iterator[Text]:
    """Paragraphs, items, headings and cells of a page of Markdown, without its code."""
    prose = _NO_PROSE_OF_PAGES.sub(lambda block: "\n" * block[0].count("\n"), source)
    start = 0
    for mark in [*_MARK_OF_PAGES.finditer(prose), None]:
        end = len(prose) if mark is None else mark.start()
        yield prose.count("\n", 0, start) + 1, prose[start:end]
        start = len(prose) if mark is None else mark.end()


def _place(source: str, at: int) -> tuple[int, int]:
    return source.count("\n", 0, at) + 1, at - source.rfind("\n", 0, at) - 1


def _joined(comments: list[tuple[tuple[int, int], str]]) -> Iterator[Text]:
    """Comments on lines below each other, at one column, are one piece of prose."""
    block: list[str] = []
    begin = after = column = -1
    for (line, at), text in comments:
        if block and (line, at) != (after, column):
            yield begin, "\n".join(block)
            block = []
        if not block:
            begin = line
        block.append(re.sub(r"^(?:[/*#!<\s])+|\s*\*/$", "", text))
        after, column = line + text.count("\n") + 1, at
    if block:
        yield begin, "\n".join(block)


_READERS = {
    ".py": _python,
    ".md": _page,
    **dict.fromkeys((".c", ".cc", ".cu", ".cuh", ".h"), _c_like),
    **dict.fromkeys((".sh", ".toml", ".yaml"), _hash),
}


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", metavar="FILE_OR_FOLDER", help="default: all prose")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="refuse the five forms in all of them, not where they are refused anyway",
    )
    options = parser.parse_args(given)
    paths = options.paths
    if missing := [path for path in paths if not Path(path).exists()]:
        parser.error(f"no file or folder {', '.join(missing)}")
    found = [
        line.removeprefix(f"{ROOT}/")
        for path in files(paths)
        for line in findings(path, is_plain=options.plain or _is_plain(path))
    ]
    print("\n".join(found) or "prose: ok")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
