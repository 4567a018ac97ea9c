"""The key `train.lora`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from engine.schemas.train import AdapterSection
from engine.spec.added import SpecFacts

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec


class LoraSpec(AdapterSection):
    """LoRA: the base model is frozen and low-rank matrices are trained. Needs the package `peft`."""

    adapter: ClassVar[str] = "engine.plugins.lora.adapter:LoraAdapter"
    RENAMED: ClassVar[dict[str, str]] = {"targets": "target_modules"}

    rank: int = Field(default=16, ge=1)
    """Rank of the matrices."""
    alpha: float = Field(default=32.0, gt=0.0)
    """The product of the matrices is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability of the adapter's inputs during training."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter."""


def facts(spec: EpisodeSpec) -> SpecFacts:
    """The hook `spec_facts`: the first matrices are drawn."""
    return SpecFacts(reads_seed=spec.train is not None and LoraSpec.section_of(spec.train) is not None)
