"""The rule about `train.lora`: its package is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from engine.plugins.lora.spec import LoraSpec
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule


@rule("train.no-package", "info", "a package that training needs is not installed")
def no_package(ctx: CheckContext) -> Iterator[Finding]:
    """`peft` for `train.lora`."""
    train = ctx.spec.train
    if train is not None and LoraSpec.section_of(train) is not None and find_spec("peft") is None:
        yield Finding(
            "`peft` is not installed, and `engine train` needs it for this",
            ("train", "lora"),
            "pip install 'episode-engine[train]'",
        )
