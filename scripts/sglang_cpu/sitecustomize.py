"""What SGLang needs on a machine without a GPU; Python loads this before anything else.

- torchvision registers shapes for `nms` and `qnms` when it is imported, and fails where its compiled
  half is absent. SGLang imports torchvision and calls neither, so a declaration is enough.
- `--enable-deterministic-inference` swaps matrix products for Triton kernels whose result does not
  depend on the batch. There are none for a CPU, and SGLang refuses to start; here the swap is left out.
  What remains of the flag is what tests need: each request is sampled with its own seed.

Invariant: nothing here changes what a model computes; it only lets imports and the start succeed.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

BATCH_INVARIANT = "sglang.srt.batch_invariant_ops.batch_invariant_ops"


def _declare_torchvision_operators() -> object:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class _WithoutSwap(Loader):
    """Loads SGLang's module and then makes its switch a no-op where no GPU is there."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        import torch

        self.real.exec_module(module)
        if not torch.cuda.is_available():
            module.enable_batch_invariant_mode = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]


class _CpuFinder(MetaPathFinder):
    """Steps in at two imports and leaves every other one alone."""

    library: object = None
    """Kept: a library that is collected takes its operators along."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "torchvision" and self.library is None:
            self.library = _declare_torchvision_operators()
        elif name == BATCH_INVARIANT:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _WithoutSwap(spec.loader)
            return spec
        return None


sys.meta_path.insert(0, _CpuFinder())
