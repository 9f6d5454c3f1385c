"""Put this folder on PYTHONPATH and Megatron's training loop runs on a machine without a GPU (gloo).

For the CPU example and the tests only. A sitecustomize, because checkpoint writers start fresh interpreters. It waits
for torch, because most of these need none, and importing it takes seconds.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Megatron takes Transformer Engine's optimizers and norms wherever it finds them; their kernels want a GPU.
sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]


class WithTorch:
    """Finder of torch alone, after whose import comes that of cpu_cuda."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "torch" else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            import cpu_cuda  # type: ignore[import-not-found]  # noqa: F401

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, WithTorch)
