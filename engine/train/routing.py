"""Expert choices of the sampler in the trainer's forward pass (rollout routing replay, arXiv 2510.11370).

A router chooses the experts of a token by its largest logits. Sampler and trainer compute these logits with other
kernels, so near a tie they choose differently, and then the log-probs of one token differ by much more than by
rounding. With the sampler's choices in the rows, the routers of the trainer use the same experts; the weights of the
experts are computed from the trainer's own logits, so gradients reach the router.

Invariants:
- A model is accepted only if each router's output is (logits, weights, choices), the weights follow from logits and
  choices by a known formula, and the model's log-probs depend on the choices. All three are checked on the loaded
  model.
- A token without known choices uses the router's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.errors import TrainError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def routers_of(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """The routers by the number of their layer; empty for a model without any that transformers declares
    (`router_logits`)."""
    declared: dict[type[torch.nn.Module], None] = {}
    for module in model.modules():
        entries = (getattr(type(module), "_can_record_outputs", None) or {}).get("router_logits", ())
        for entry in entries if isinstance(entries, list | tuple) else (entries,):
            target = getattr(entry, "target_class", entry)
            if isinstance(target, type):
                declared[target] = None
    classes = tuple(declared)
    routers: dict[int, torch.nn.Module] = {}
    for name, module in model.named_modules():
        match = _LAYER.search(f"{name}.")
        if isinstance(module, classes) and match is not None:
            routers[int(match[1])] = module
    return routers


def is_routing(output: Any) -> bool:
    """Whether a router's output is (logits [T, experts], weights [T, top_k], choices [T, top_k])."""
    if not isinstance(output, tuple) or len(output) != 3:
        return False
    if not all(isinstance(part, torch.Tensor) and part.dim() == 2 for part in output):
        return False
    logits, weights, choices = output
    return weights.shape == choices.shape and len(logits) == len(choices) and not choices.is_floating_point()


Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [T, experts], choices [T, top_k]) -> weights [T, top_k], float32."""


def _softmax(logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    return logits.float().softmax(-1).gather(-1, choices)


def _normalized_softmax(logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    chances = _softmax(logits, choices)
    return chances / chances.sum(-1, keepdim=True)


_FORMULAS: tuple[Formula, ...] = (_normalized_softmax, _softmax)
"""Of Mixtral, and of Qwen with `norm_topk_prob`; of Qwen without it."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Maximum absolute difference of weights from those of a formula, by the type of the weights."""


class RouterReplay:
    """Makes the routers of a model use given choices.

        replay = RouterReplay(model)
        replay.observes = True
        model(...)                  # the routers' own choices; this pass also finds each router's formula
        replay.used = experts       # int [T, layers, top_k] on the model's device, -1 where not known
        model(...)                  # the given choices
        replay.used = None

    The choices stay in use until `used` is set again: gradient checkpointing runs a layer again in the backward pass.

    Args:
        model: A model of transformers, with or without routers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._name = type(model).__name__
        self._formulas: dict[int, Formula | None] = {}
        """The formula of each layer with a router; None until it is found."""
        self._seen: dict[int, torch.Tensor] = {}
        """The routers' own choices in the newest pass that was observed."""
        self.used: torch.Tensor | None = None
        """The choices of the next passes, int [T, layers, top_k] with -1 where not known; None: the routers' own."""
        self.observes = False
        """Whether passes with the routers' own choices are observed, for `problem` and `seen`."""
        for layer, router in routers_of(model).items():
            self._formulas[layer] = None
            router.register_forward_hook(partial(self._replay, layer))

    @property
    def layers(self) -> list[int]:
        """The layers with a router, ascending."""
        return sorted(self._formulas)

    def problem(self) -> str | None:
        """Why given choices cannot be used; None: they can. Call it after a pass that was observed."""
        if not self._formulas:
            return "it has no routers that transformers declares (`router_logits`)"
        missing = next((layer for layer in self.layers if self._formulas[layer] is None), None)
        if missing is None:
            return None
        return (
            f"the output of its router in layer {missing} is not (logits, weights, choices) with a known formula of "
            "weights"
        )

    def seen(self) -> torch.Tensor:
        """The routers' own choices in the newest pass that was observed, int32 [T, layers, top_k]; -1 in layers without
        a router."""
        first = self._seen[self.layers[0]]
        choices_by_layer = torch.full((len(first), self.layers[-1] + 1, first.shape[-1]), -1, dtype=torch.int32)
        for layer, choices in self._seen.items():
            choices_by_layer[:, layer] = choices.cpu()
        return choices_by_layer

    def _replay(self, layer: int, _router: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        """The hook of a router: its output with the choices in use."""
        used, formula = self.used, self._formulas[layer]
        if used is None:
            if self.observes:
                if formula is None and is_routing(output):
                    formula = self._formulas[layer] = _formula_of(*output)
                if formula is not None:
                    self._seen[layer] = output[2]
            return None
        assert formula is not None, "`used` was set in spite of a `problem`"
        logits, weights, chosen = output
        if layer >= used.shape[1] or used.shape[2] != chosen.shape[-1] or len(used) != len(chosen):
            raise TrainError(
                f"the rows have experts of {tuple(used.shape)} [tokens, layers, top_k]; layer {layer} of "
                f"{self._name} chooses {chosen.shape[-1]} for each of {len(chosen)} tokens: were they sampled with "
                "another model?",
                kind="train_setup",
            )
        given = used[:, layer].to(chosen.dtype)
        choices = torch.where(given < 0, chosen, given)
        return logits, formula(logits, choices).to(weights.dtype), choices


def _formula_of(logits: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> Formula | None:
    """The formula that gives these weights; None if none does."""
    most = _TOLERANCE.get(weights.dtype, 1e-5) if logits.dtype == weights.dtype else 1e-2
    fits = (formula for formula in _FORMULAS if (formula(logits, choices) - weights.float()).abs().max() <= most)
    return next(fits, None)
