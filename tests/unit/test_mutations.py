"""The list of mutations fits the package and the tests as they are now."""

import ast

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, place_of


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_is_a_change_of_the_package_with_a_test(mutation: Mutation) -> None:
    changed = place_of(mutation).read_text().replace(mutation.old, mutation.new)
    ast.parse(changed)  # else pytest would fail whatever the test says
    for test in filter(None, (mutation.caught_by, mutation.on_gpu)):
        file, _, case = test.partition("::")
        functions = {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert case.partition("[")[0] in functions, test


def test_a_line_that_is_not_there_once_is_an_error() -> None:
    with pytest.raises(ValueError, match="found nowhere"):
        place_of(Mutation("stale", "no such text", "", ""))
    with pytest.raises(ValueError, match=r"found flashmoe_megatron/.*, flashmoe_megatron/"):
        place_of(Mutation("vague", "import torch\n", "", ""))
