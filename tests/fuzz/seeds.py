"""The inputs that fuzzing begins with: one archive for each target, ``TARGET_seed_corpus.zip``.

    python -m tests.fuzz.seeds settings runs/fuzz/settings

writes a target's archive anew, from the inputs that it has and those in the folder. The bytes of an
archive depend on its inputs alone: entries are stored, sorted by name and without a date, and an
input's name is the beginning of its SHA-1, as libFuzzer names what it keeps.
"""

import argparse
import hashlib
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

TARGETS = ("c_interface", "settings")
FOLDER = Path(__file__).resolve().parent
NAME_LENGTH = 10


def archive_of(target: str) -> Path:
    """The path of a target's archive."""
    return FOLDER / f"{target}_seed_corpus.zip"


def read(target: str) -> list[bytes]:
    """A target's inputs, sorted by name."""
    with zipfile.ZipFile(archive_of(target)) as archive:
        return [archive.read(name) for name in sorted(archive.namelist())]


def unpack(target: str, folder: Path) -> None:
    """Writes a target's inputs into a folder, which is made if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive_of(target)) as archive:
        archive.extractall(folder)


def pack(path: Path, inputs: Iterable[bytes]) -> None:
    """Writes an archive of these inputs."""
    named = {hashlib.sha1(data).hexdigest()[:NAME_LENGTH]: data for data in inputs}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(named):
            entry = zipfile.ZipInfo(name)  # dated 1980, so that archives of equal inputs are equal
            entry.create_system = 3  # Unix, wherever it is written
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, named[name])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("folder", type=Path, help="of inputs to add")
    options = parser.parse_args(arguments)
    path = archive_of(options.target)
    known = read(options.target) if path.exists() else []
    pack(path, [*known, *(file.read_bytes() for file in sorted(options.folder.iterdir()))])
    print(f"{path}: {len(read(options.target))} inputs")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
