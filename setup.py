"""Compiles csrc/ into flashmoe_megatron/libflashmoe.so; all metadata lives in pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import nvcc_build


class BuildWithNvcc(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # no Python ABI in it, so none in its name

    def build_extension(self, ext: Extension) -> None:
        nvcc_build.build_library(Path(self.get_ext_fullpath(ext.name)))


class PlatformWheel(bdist_wheel):
    """The library has a C ABI: one wheel for every CPython and every torch of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


library = Extension("flashmoe_megatron.libflashmoe", sources=[])
setup(
    ext_modules=[] if os.environ.get("FLASHMOE_SKIP_CUDA_BUILD") == "1" else [library],
    cmdclass={"build_ext": BuildWithNvcc, "bdist_wheel": PlatformWheel},
)
