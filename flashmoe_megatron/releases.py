"""The releases of torch and of frameworks that this package is tried with; no torch is needed."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flashmoe_megatron.errors import MissingError

Release = tuple[int, ...]


class Project(NamedTuple):
    """A project that this package runs in, and the range of its releases.

    Attributes:
        name: How its users call it.
        distribution: Its name on a package index.
        oldest: The first release that works.
        newest: The last release that is tried, with all that begin like it; ``None`` where no
            release is too new.
        extra: The extra of this package that brings it, empty if all installations have it.
        package: The package that its users import, if its name does not follow from the index's.
    """

    name: str
    distribution: str
    oldest: Release
    newest: Release | None
    extra: str = ""
    package: str = ""

    @property
    def wanted(self) -> str:
        """The range of releases."""
        if self.newest is None:
            return f"{text_of(self.oldest)} and newer"
        if self.newest == self.oldest:
            return text_of(self.oldest)
        return f"{text_of(self.oldest)} to {text_of(self.newest)}"

    @property
    def install(self) -> str:
        """The command that installs a release of the range."""
        return f'pip install "flashmoe-megatron[{self.extra}]"'

    @property
    def module(self) -> str:
        """The module that its users import."""
        return self.package or self.distribution.replace("-", ".")

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Guards imports of the project: where it is missing, the error says what installs it.

        Raises:
            MissingError: It is not installed.
        """
        try:
            yield
        except ModuleNotFoundError as error:
            if error.name not in (self.module, self.module.partition(".")[0]):
                raise
            raise MissingError(
                f"{self.name} is not installed: {self.install}", name=error.name
            ) from error

    def problem(self, version: str) -> str | None:
        """Says what is wrong with a release.

        Args:
            version: A release's, as the project's ``__version__`` says it.

        Returns:
            A sentence that names the range, ``None`` for a release within it.
        """
        match = re.match(r"\d+(\.\d+)+", version)
        numbers = tuple(int(part) for part in match.group().split(".")) if match else ()
        is_old = bool(numbers) and numbers < self.oldest
        is_new = not numbers or (
            self.newest is not None and numbers[: len(self.newest)] > self.newest
        )
        if not is_old and not is_new:
            return None
        age = "older" if is_old else "newer"
        return (
            f"{self.name} {version} is {age} than the tested releases {self.wanted}; "
            "install one of these"
        )

    def problem_of_ranks(self, versions: Sequence[str]) -> str | None:
        """Says what is wrong with the releases that ranks have.

        Args:
            versions: Each rank's, in order.

        Returns:
            As :meth:`problem`, of the first rank whose release is not within the range.
        """
        for rank, version in enumerate(versions):
            problem = self.problem(version)
            if problem is not None:
                return problem if len(set(versions)) == 1 else f"{problem} (on rank {rank})"
        return None


def text_of(release: Release) -> str:
    """Writes a release as its project does."""
    return ".".join(map(str, release))


TORCH = Project("torch", "torch", (2, 11), None)
MEGATRON = Project("Megatron-Core", "megatron-core", (0, 16, 1), (0, 20), "megatron")
"""Releases up to 0.19.2; main calls itself 0.20."""
BRIDGE = Project("Megatron-Bridge", "megatron-bridge", (0, 6, 2), (0, 6, 2))
"""It brings a Megatron-Core of its own."""
DEEPSPEED = Project("DeepSpeed", "deepspeed", (0, 19, 5), (0, 19, 8), "deepspeed")
"""From the first release on whose gate names the route of each token instead of masks."""
TRANSFORMERS = Project("transformers", "transformers", (5, 17), (5, 24), "transformers")
TORCHTITAN = Project("torchtitan", "torchtitan", (0, 3), (0, 3), "torchtitan")
AUTOMODEL = Project(
    "NeMo Automodel", "nemo-automodel", (0, 7), (0, 7), "automodel", package="nemo_automodel"
)

FRAMEWORKS = (MEGATRON, DEEPSPEED, TRANSFORMERS, TORCHTITAN, AUTOMODEL)
