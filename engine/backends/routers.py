"""The routers of mixture-of-experts models of transformers: where they are, and what they return."""

from __future__ import annotations

import re
from typing import Any

import torch

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def routers_of(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """The routers by the number of their layer; empty for a model without any that transformers declares
    (`router_logits`)."""
    classes = _router_classes(model)
    routers: dict[int, torch.nn.Module] = {}
    for name, module in model.named_modules():
        match = _LAYER.search(f"{name}.")
        if isinstance(module, classes) and match is not None:
            routers[int(match[1])] = module
    return routers


def _router_classes(model: torch.nn.Module) -> tuple[type[torch.nn.Module], ...]:
    """The classes of the model's routers, as transformers declares them for `output_router_logits`."""
    routers: dict[type[torch.nn.Module], None] = {}
    for module in model.modules():
        declared = getattr(type(module), "_can_record_outputs", None) or {}
        entries = declared.get("router_logits", ())
        for entry in entries if isinstance(entries, list | tuple) else (entries,):
            target = getattr(entry, "target_class", entry)
            if isinstance(target, type):
                routers[target] = None
    return tuple(routers)


def is_routing(output: Any) -> bool:
    """Whether a router's output is (logits [T, experts], weights [T, top_k], choices [T, top_k])."""
    if not isinstance(output, tuple) or len(output) != 3:
        return False
    if not all(isinstance(part, torch.Tensor) and part.dim() == 2 for part in output):
        return False
    logits, weights, choices = output
    return weights.shape == choices.shape and len(logits) == len(choices) and not choices.is_floating_point()
