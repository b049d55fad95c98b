"""Repairs of Megatron that a run without Transformer Engine or from a wheel needs.

They concern stock code that fails with an error; nothing that works today is changed.
"""

import importlib
from types import ModuleType

from flashmoe_megatron.adapters.patch import Function, patch


def define_te_general_gemm(moe_utils: ModuleType) -> None:
    """Lets the router of Megatron-Core 0.16.1 run without Transformer Engine.

    Its gating asks whether ``te_general_gemm`` is None, but the name is missing if Transformer
    Engine is; later versions set it.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def keep_built_helpers(dataset_utils: ModuleType) -> None:
    """Skips compiling the dataset helpers if they can be imported already.

    A wheel carries them built and without a Makefile; compiling would end the process.
    """

    def make(original: Function) -> Function:
        def compile_helpers() -> None:
            try:
                importlib.import_module("megatron.core.datasets.helpers_cpp")
            except ImportError:
                original()

        return compile_helpers

    patch(dataset_utils, "compile_helpers", make)
