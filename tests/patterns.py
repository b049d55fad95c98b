"""Finds a piece of the package's code by the function that it is in.

Neither the file nor the layout of the source matters. A place is named by a function, a class or a
name that is assigned to, as in ``Layer.forward`` or only ``forward``. A pattern is a piece of code:
blanks, comments and commas before a closing bracket are not compared. ``...`` stands for any tokens
and an end of a line for that of a statement, which need not be there otherwise.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

ANYTHING = "..."
END = "\n"
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Token(NamedTuple):
    """A word of a source with the offsets of its first character and of what follows it."""

    text: str
    begin: int
    end: int


class Part(NamedTuple):
    """A function, a class or an assignment: its dotted name and where it begins and ends."""

    name: str
    begin: int
    end: int


class Place(NamedTuple):
    """A piece of a file: ``text[begin:end]``."""

    file: Path
    begin: int
    end: int


def tokens_of(source: str) -> list[Token]:
    """Splits a source, or a piece of one, into the tokens that are compared."""
    starts = [0, *accumulate(map(len, io.StringIO(source)))]
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _LAYOUT or not token.string:
            continue
        (line, column), (last_line, last_column) = token.start, token.end
        if token.string in (")", "]", "}") and found and found[-1].text == ",":
            found.pop()  # is there or not, as the formatter breaks lines
        begin, end = starts[line - 1] + column, starts[last_line - 1] + last_column
        found.append(Token(token.string, begin, end))
    return found


def parts_of(source: str) -> Iterator[Part]:
    """Yields all functions, classes and assignments to names, the inner ones, too."""
    in_bytes = source.encode()  # as ast counts columns
    starts = [0, *accumulate(map(len, in_bytes.splitlines(keepends=True)))]

    def offset(line: int, column: int) -> int:
        return len(in_bytes[: starts[line - 1] + column].decode())

    def walk(node: ast.AST, above: str) -> Iterator[Part]:
        for child in ast.iter_child_nodes(node):
            inner = above
            names = []
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [child.name]
                inner = f"{above}{child.name}."
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            for name in names:
                begin = offset(child.lineno, child.col_offset)
                yield Part(above + name, begin, offset(child.end_lineno, child.end_col_offset))
            yield from walk(child, inner)

    return walk(ast.parse(source), "")


def match(pattern: list[str], tokens: list[Token], first: int = 0) -> int | None:
    """Returns the number of the token after a match that begins at ``first``, if there is one."""
    at = first
    for number, wanted in enumerate(pattern, 1):
        if wanted == ANYTHING:
            ends = (match(pattern[number:], tokens, later) for later in range(at, len(tokens)))
            return next((end for end in ends if end is not None), None)
        while wanted != END and at < len(tokens) and tokens[at].text == END:
            at += 1
        if at == len(tokens) or tokens[at].text != wanted:
            return None
        at += 1
    return at


class Sources:
    """The Python sources below a folder, as they were when this was made."""

    def __init__(self, folder: Path) -> None:
        self.texts = {file: file.read_text() for file in sorted(folder.rglob("*.py"))}
        self._tokens = {file: tokens_of(text) for file, text in self.texts.items()}
        self._parts: dict[str, list[tuple[Path, Part]]] = {}
        """Each part by the last word of its name."""
        for file, text in self.texts.items():
            for part in parts_of(text):
                self._parts.setdefault(part.name.rpartition(".")[2], []).append((file, part))

    def find(self, name: str, pattern: str) -> list[Place]:
        """Finds a piece of code in all functions, classes and assignments of a name.

        Args:
            name: A dotted name or how one ends, as in ``Layer.forward`` or ``forward``.
            pattern: The piece of code.
        """
        wanted = [token.text for token in tokens_of(pattern)]
        found = []
        for file, part in self._parts.get(name.rpartition(".")[2], []):
            if not f".{part.name}".endswith(f".{name}"):
                continue
            tokens = [
                token
                for token in self._tokens[file]
                if part.begin <= token.begin and token.end <= part.end
            ]
            tokens.append(Token(END, part.end, part.end))
            for first in range(len(tokens)):
                end = match(wanted, tokens, first)
                if end is not None and tokens[first].text != END:
                    last = tokens[end - 1 if wanted[-1] != END else end - 2]
                    found.append(Place(file, tokens[first].begin, last.end))
        return list(dict.fromkeys(found))  # a part may be in another one of its name
