"""What SGLang needs on a machine without a GPU; Python loads this before anything else.

- torchvision registers shapes for `nms` and `qnms` when it is imported, and fails where its compiled
  half is absent. SGLang imports torchvision and calls neither, so a declaration is enough.
- `--enable-deterministic-inference` swaps matrix products for Triton kernels whose result does not
  depend on the batch. There are none for a CPU, and SGLang refuses to start; here the swap is left out.
  What remains of the flag is what tests need: each request is sampled with its own seed.
- The memory in which routed experts are kept is registered with CUDA. Without CUDA it is plain memory.
- On a CPU without AMX the choice of experts has no kernel; SGLang's own torch function (`forward_native`) is used.

Invariant: nothing here changes what a model computes; it only lets imports, the start and experts succeed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _declare_torchvision_operators() -> object:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _without_swap(module: Any) -> None:
    module.enable_batch_invariant_mode = lambda *_args, **_kwargs: None


def _without_registering(module: Any) -> None:
    module._cuda_host_register = lambda *_args, **_kwargs: None


def _torch_experts(module: Any) -> None:
    if not module._is_cpu_amx_available:
        module.TopK.forward_cpu = module.TopK.forward_native


CHANGES: dict[str, Callable[[Any], None]] = {
    "sglang.srt.batch_invariant_ops.batch_invariant_ops": _without_swap,
    "sglang.srt.mem_cache.pool_host.common": _without_registering,
    "sglang.srt.layers.moe.topk": _torch_experts,
}
"""Modules of SGLang, and what is changed in each after it is loaded, where no GPU is there."""


class _Changed(Loader):
    """Loads a module of SGLang and then applies its entry of `CHANGES`."""

    def __init__(self, real: Any, change: Callable[[Any], None]) -> None:
        self.real = real
        self.change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        import torch

        self.real.exec_module(module)
        if not torch.cuda.is_available():
            self.change(module)


class _CpuFinder(MetaPathFinder):
    """Changes the imports of torchvision and of `CHANGES`, and no other."""

    library: object = None
    """Kept: a library that is collected takes its operators along."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "torchvision" and self.library is None:
            self.library = _declare_torchvision_operators()
        elif name in CHANGES:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _Changed(spec.loader, CHANGES[name])
            return spec
        return None


sys.meta_path.insert(0, _CpuFinder())
