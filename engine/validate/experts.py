"""Rules about the experts of mixture-of-experts models. They find something only in a model whose files are on this computer."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schemas.backend import backend_classes
from engine.tokens.experts import ExpertLayout, expert_layout
from engine.validate.context import CheckContext
from engine.validate.model_files import model_files
from engine.validate.registry import Finding, rule

REPLAYED = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Values of `model_type` whose routers the trainer is tested with. Others are checked when a training starts."""


def _experts(ctx: CheckContext) -> tuple[str, ExpertLayout | None] | None:
    """The model's `model_type` and its experts; None if its configuration is not on this computer."""
    files = model_files(ctx.loaded)
    if files is None or not files.config:
        return None
    return str(files.config.get("model_type")), expert_layout(files.config)


@rule("backend.no-experts", "error", "routed experts of a model without experts")
def no_experts(ctx: CheckContext) -> Iterator[Finding]:
    """`backend.routed_experts` with a model that has none."""
    if not ctx.spec.backend.asks_experts:
        return
    found = _experts(ctx)
    if found is not None and found[1] is None:
        message = f"the model (`{found[0]}`) has no experts, so there is no routing to report"
        yield Finding(message, ("backend", "routed_experts"), "remove it", key=True)


@rule("train.expert-routing", "warning", "sampler and trainer may choose different experts")
def expert_routing(ctx: CheckContext) -> Iterator[Finding]:
    """A training of a mixture-of-experts model without the sampler's routing, or of a class that may not be able to replay it."""
    spec = ctx.spec
    if spec.train is None or not spec.train.samples_episodes:
        return
    found = _experts(ctx)
    kind, layout = found or ("", None)
    if layout is None:
        return
    backend = spec.backend
    if backend.asks_experts:
        if kind not in REPLAYED:
            message = f"`engine train` has not been tested with the routers of `{kind}`; it checks them when it starts"
            yield Finding(message, ("backend", "routed_experts"), "keep it if `engine train` starts; else remove it")
        return
    message = (
        f"the model chooses {layout.top_k} of {layout.experts} experts for each token, and near a tie sampler and trainer may choose "
        "different ones, so that their log-probs differ"
    )
    kinds = " or ".join(f"`{each.kind_name()}`" for each in backend_classes() if each.reports_experts)
    fix = (
        "set `backend.routed_experts: true`" if backend.reports_experts else f"use {kinds} with `routed_experts: true`"
    )
    path = ("backend",) if ctx.written("backend") else ("train",)
    yield Finding(message, path, fix, key=True)
