"""Keys of specs and scenarios that were renamed. A message about an unknown key names the new key; an old key is never accepted.

    new_key(TrainSpec, "passes")        # "update_epochs"

The table says which class held the key, so that a key of the same name in another section is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from engine.schemas.backend import SGLangBackendSpec
from engine.schemas.sections import sections_of
from engine.schemas.train import LoraSpec, MemorySpec, TrainSpec, WeightSyncSpec
from engine.spec.text.diagnostic import show_path
from engine.spec.text.places import locate

RENAMED: Mapping[type[BaseModel], Mapping[str, str]] = {
    SGLangBackendSpec: {"patience": "health_timeout"},
    TrainSpec: {
        "passes": "update_epochs",
        "normalise": "advantage_norm",
        "filter_equal": "dynamic_sampling",
        "refill": "max_sampling_rounds",
        "correction": "rollout_correction",
        "proximal": "proximal_logprobs",
        "entropy": "entropy_coefficient",
        "bonuses": "advantage_bonuses",
        "weights": "weight_sync",
    },
    MemorySpec: {
        "micro_tokens": "max_tokens_per_microbatch",
        "logit_cells": "logits_chunk_elements",
        "checkpointing": "gradient_checkpointing",
    },
    LoraSpec: {"targets": "target_modules"},
    WeightSyncSpec: {"via": "method", "pause": "pause_generation"},
}
"""Class of a section -> old key -> new key; it also holds for the classes that inherit from it. A plugin's class has them as `RENAMED`."""

MOVED: Mapping[type[BaseModel], Mapping[str, str]] = {TrainSpec: {"notify": "notify"}}
"""Class of a section -> key -> path from the top level of the spec at which the key is now."""


def new_place(owner: type[BaseModel] | None, key: str) -> str | None:
    """The path to which `key` was moved out of a section of the class `owner`; None if it was not moved."""
    return MOVED.get(owner, {}).get(key) if owner is not None else None


def new_key(owner: type[BaseModel] | None, key: str) -> str | None:
    """The key that replaced `key` in a section of the class `owner`; None if `key` was not renamed."""
    if owner is None:
        return None
    inherited: tuple[Any, ...] = (*owner.__mro__, *(model for section, model in sections_of(owner) if section.inline))
    renamed = ({**RENAMED.get(each, {}), **vars(each).get("RENAMED", {})} for each in inherited)
    return next((keys[key] for keys in renamed if key in keys), None)


def renamed_keys(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """The renamed keys among the unknown keys of a failed validation, each as `` `train.passes` is now `update_epochs` ``."""
    found = []
    for item in error.errors(include_url=False):
        if item["type"] == "extra_forbidden":
            spot = locate(model, item["loc"])
            key = str(spot.path[-1])
            if new := new_key(spot.owner, key):
                found.append(f"`{show_path(spot.path)}` is now `{new}`")
            elif place := new_place(spot.owner, key):
                found.append(f"`{show_path(spot.path)}` is now `{place}` at the top level")
    return found
