"""Compiles csrc/ into flashmoe_megatron/libflashmoe.so.

Metadata lie in pyproject.toml, except those that depend on how the package is built: the version,
build requirements and the text for an index.
"""

import os
import re
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036 - pip runs this file before it reads the metadata
    sys.exit(f"flashmoe-megatron needs Python 3.10 or newer, got {sys.version.split()[0]}")

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import nvcc_build

HAS_KERNEL = os.environ.get("FLASHMOE_SKIP_CUDA_BUILD") != "1"


class BuildWithNvcc(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # no Python ABI in it, so none in its name

    def build_extension(self, ext: Extension) -> None:
        nvcc_build.build_library(Path(self.get_ext_fullpath(ext.name)))


class PlatformWheel(bdist_wheel):
    """The library has a C ABI: one wheel for every CPython and every torch of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def version() -> str:
    """Returns the version; that of a build without the kernel says so."""
    text = (ROOT / "flashmoe_megatron" / "_version.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    has_all = HAS_KERNEL or "sdist" in sys.argv
    return found if has_all else f"{found}+nokernel"


def description() -> str:
    """Returns README.md without links into the checkout, which an index does not have."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


library = Extension("flashmoe_megatron.libflashmoe", sources=[])
# Frontends ask for build requirements by this command. In every other one setuptools would fetch
# what is missing by itself, past the user's choice of --no-build-isolation.
is_asked = sys.argv[1:2] == ["egg_info"]
setup(
    version=version(),
    long_description=description(),
    long_description_content_type="text/markdown",
    setup_requires=nvcc_build.missing_packages() if HAS_KERNEL and is_asked else [],
    ext_modules=[library] if HAS_KERNEL else [],
    cmdclass={"build_ext": BuildWithNvcc, "bdist_wheel": PlatformWheel},
)
