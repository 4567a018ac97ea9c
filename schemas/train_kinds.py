"""The kinds of trainings: that of the core, and those that plugins add to the point `train_kinds`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import plugin
from engine.schemas.base import Struct


class TrainKind(Struct, frozen=True, kw_only=True):
    """What holds for one value of `train.kind`."""

    use: str
    """Entry point of its `engine.train.step_source:StepSource`."""
    samples: bool = True
    """Whether the model is trained on episodes that it samples, and so needs a backend that takes new weights."""
    keys: frozenset[str] | None = None
    """The keys of `train` of the core that it reads; None: all. `weight_sync` is read only where the backend gets weights."""
    settings: Mapping[str, Any] = {}
    """The values of keys that it does not read, where they are not the defaults."""


CORE_KINDS: dict[str, TrainKind] = {
    "rl": TrainKind(use="engine.train.episode_steps:EpisodeSteps"),
}
"""The kinds of the core, by the name in `train.kind`."""


def train_kind(name: str) -> TrainKind:
    """What holds for a kind. Raises: ValueError: its plugin cannot be used."""
    kinds: dict[str, TrainKind] = (
        CORE_KINDS if name in CORE_KINDS else plugin.loaded("train_kinds", CORE_KINDS, of=TrainKind)
    )
    if name not in kinds:
        raise ValueError(f"`train.kind: {name}` cannot be used; {plugin.missing('train_kinds', name)}")
    return kinds[name]
