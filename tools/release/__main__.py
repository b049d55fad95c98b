"""Makes a release up to the upload; see the package."""

import argparse
import subprocess
import sys
from pathlib import Path

from flashmoe_megatron._version import __version__
from tools import release
from tools.release.environments import PYTHONS, try_all
from tools.release.notes import notes_of
from tools.release.wheel import ROOT, ReleaseError, make_sources, make_wheel, run


def git(*arguments: str) -> str:
    """Returns what git prints about the checkout."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def check_tree(tag: str) -> None:
    """Checks that the checkout is what its commit says, and the tag new or of this commit.

    Raises:
        ReleaseError: It is not.
    """
    changed = git("status", "--porcelain")
    if changed:
        raise ReleaseError(f"the checkout has changes, wanted none: {changed.splitlines()[0]}")
    if tag in git("tag", "--list", tag).split() and git("rev-list", "-n1", tag) != git(
        "rev-parse", "HEAD"
    ):
        raise ReleaseError(f"the tag {tag} is of another commit")


def make(options: argparse.Namespace) -> None:
    """Takes the steps of a release."""
    tag = f"v{__version__}"
    notes = notes_of(__version__)
    check_tree(tag)
    if not options.skip_tests:
        run(["bash", str(ROOT / "tests" / "run.sh")])
    made = [make_sources(options.out), make_wheel(options.out)]
    failed = try_all(made[-1], options.pythons, [])
    if failed:
        raise ReleaseError(f"{failed} of {len(options.pythons)} environments failed")
    (options.out / f"{tag}.md").write_text(notes + "\n")
    if tag not in git("tag", "--list", tag).split():
        git("tag", "--annotate", tag, "--message", f"Release {__version__}")
    print(f"{tag} is tagged; its notes are in {options.out / tag}.md. To publish both files:")
    print("  git push origin", tag, "&& python -m twine upload", *made)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=release.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--pythons", nargs="+", default=list(PYTHONS))
    parser.add_argument("--skip-tests", action="store_true", help="tests/run.sh has passed already")
    try:
        make(parser.parse_args(arguments))
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
