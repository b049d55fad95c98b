"""The list of mutations fits the package and the tests as they are now."""

import ast
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, PACKAGE, ROOT, Mutation, mutated, place_of
from tests.patterns import Sources
from tests.programs import run_python


@pytest.fixture(scope="module")
def package() -> Sources:
    return Sources(ROOT / PACKAGE)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_is_a_change_of_the_package(mutation: Mutation, package: Sources) -> None:
    file, changed = mutated(mutation, package)
    tree = ast.parse(changed)  # else pytest would fail whatever the test says
    assert ast.dump(tree) != ast.dump(ast.parse(package.texts[file]))


def test_each_has_tests_that_pytest_finds() -> None:
    """The name of a case has its parameters, and is another one when these change."""
    cases = {case for one in MUTATIONS for case in (one.caught_by, one.on_gpu) if case}
    run_python("-m", "pytest", "--collect-only", "--quiet", "-o", "addopts=", *sorted(cases))


def test_code_that_is_not_there_once_is_an_error(package: Sources) -> None:
    with pytest.raises(ValueError, match="found nowhere"):
        place_of(Mutation("stale", "forward", "no_such(text)", "", ""), package)
    with pytest.raises(ValueError, match="found nowhere"):
        place_of(Mutation("renamed", "no_such_function", "return", "", ""), package)
    with pytest.raises(ValueError, match=r"found .*flashmoe_megatron/.*, .*flashmoe_megatron/"):
        place_of(Mutation("vague", "forward", "return", "", ""), package)


SOURCE = '''
WORDS = ("ä", "b")


class Layer:
    word = "c"

    def forward(self, x, *, number):
        """Returns a sum."""
        if number > 1:  # more
            x = self.add(
                x,
                number,
            )
        return x + number

    def add(self, x, number):
        def inner():
            return x + number

        return inner() + 0


def add(x):
    return x + 0
'''


@pytest.mark.parametrize(
    ("where", "pattern", "found"),
    [
        ("WORDS", '"ä",', ['"ä",']),
        ("Layer.word", '"c"', ['"c"']),
        ("forward", "return x + number", ["return x + number"]),
        ("Layer.forward", "x=self.add(x, number)", ["x = self.add(\n{16}x,\n{16}number,\n{12})"]),
        ("forward", "if ...: x", ["if number > 1:  # more\n{12}x"]),
        ("forward", "x = ... return", ["x = self.add(\n{16}x,\n{16}number,\n{12})\n{8}return"]),
        ("forward", "x\n", []),
        ("forward", "+ number\n", ["+ number"]),
        ("Layer", "x + number", ["x + number", "x + number"]),
        ("inner", "x + number", ["x + number"]),
        ("add.inner", "+ 0", []),
        ("Layer.add", "+ 0", ["+ 0"]),
        ("add", "+ 0", ["+ 0", "+ 0"]),
        ("dd", "+ 0", []),
    ],
)
def test_code_is_found_by_function_whatever_its_layout(
    where: str, pattern: str, found: list[str], tmp_path: Path
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "source.py").write_text(SOURCE)
    blanks = {f"{{{number}}}": " " * number for number in (8, 12, 16)}
    for written, meant in blanks.items():
        found = [one.replace(written, meant) for one in found]
    sources = Sources(tmp_path)
    assert [
        sources.texts[place.file][place.begin : place.end] for place in sources.find(where, pattern)
    ] == found
