"""Files of JSON that keep what was measured once on a machine.

The schema of a file is made from dataclasses: their fields are its keys, and the annotations say
which values belong there.
"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flashmoe_megatron.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: How errors name such a file.
        format: The file's own word for it.
        version: The format's. Files of another version are refused.
        wanted: The end of an error where a file cannot be read.
    """

    name: str
    format: str
    version: int
    wanted: str = ""

    @property
    def head(self) -> dict[str, Any]:
        """The keys that identify a file of this kind."""
        return {"format": self.format, "version": self.version}

    def read(self, path: Path, parse_constant: Callable[[str], Any] | None = None) -> Any:
        """Reads a file's JSON, which may be of another kind.

        ``parse_constant`` takes ``NaN`` and infinities, as in :func:`json.loads`.

        Raises:
            ConfigError: The file cannot be read, or is no JSON.
        """
        try:
            return json.loads(path.read_text(encoding="utf-8"), parse_constant=parse_constant)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self.name} {path}: cannot be read: {error}{self.wanted}"
            ) from error


def write(path: Path, content: Any) -> None:
    """Writes a file of JSON.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.write_text(_text(content), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error


def replace(path: Path, content: Any) -> None:
    """Writes a file of JSON under another name and renames it, so that it is always complete.

    Raises:
        OSError: The file cannot be written; the former one is still there.
    """
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_text(content))
            file.flush()
            os.fsync(file.fileno())
        Path(draft).chmod(0o644)  # mkstemp gives it to its owner alone
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def build(kind: Any, value: Any) -> Any:
    """Makes an annotated type from JSON: a dataclass, or a table, list or row of such types.

    Numbers, texts and truth values in the fields of a dataclass stay as they are.

    Raises:
        TypeError, ValueError, AttributeError: The JSON has another structure.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        made = {
            name: build(hints[name], one) if _is_made(hints.get(name)) else one
            for name, one in value.items()
        }
        return kind(**made)
    inside = get_args(kind)
    if get_origin(kind) is dict:
        return {name: build(inside[1], one) for name, one in value.items()}
    if get_origin(kind) is list:
        return [build(inside[0], one) for one in value]
    if get_origin(kind) is tuple and inside[-1] is Ellipsis:
        return tuple(build(inside[0], one) for one in value)
    if get_origin(kind) is tuple:
        return tuple(build(each, one) for each, one in zip(inside, value, strict=True))
    return kind(value)


def check(kind: type, values: Any, where: str) -> None:
    """Checks that JSON is an object of exactly a dataclass's fields, each of its type.

    Raises:
        ConfigError: It is not; says where, what was got and what is wanted.
    """
    hints = get_type_hints(kind)
    if not isinstance(values, dict) or values.keys() != hints.keys():
        raise ConfigError(f"{where}: got {keys_of(values)}, wanted an object of {sorted(hints)}")
    for name, hint in hints.items():
        value, choices = values[name], get_args(hint) if get_origin(hint) is Literal else ()
        types: list[type] = [str] if choices else list(get_args(hint)) or [hint]
        if type(value) not in types and not (float in types and type(value) is int):
            raise ConfigError(f"{where}: {name} is {value!r}, wanted {types[0].__name__}")
        if choices and value not in choices:
            raise ConfigError(f"{where}: {name} is {value!r}, wanted one of {choices}")


def keys_of(values: Any) -> list[str] | str:
    """Returns the keys of a JSON object, or the type of another value, for an error."""
    return sorted(map(str, values)) if isinstance(values, dict) else type(values).__name__


def _is_made(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or get_origin(hint) in (dict, list, tuple)


def _text(content: Any) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"
