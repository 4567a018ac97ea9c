"""Rules about what replies: `backend:` of the policy, of model-played users and of judges, what plays these, and the
experts of mixture-of-experts models, where the model's files are on this computer."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schemas.backend import BackendBase, backend_classes, no_default
from engine.schemas.generation import SamplingParams
from engine.spec.added import no_player, played_parts, played_roles
from engine.spec.text.diagnostic import DataPath
from engine.tokens.experts import ExpertLayout, expert_layout
from engine.validate.context import CheckContext
from engine.validate.model_files import model_files
from engine.validate.registry import Finding, rule


@rule("backend.unsupported-sampling", "error", "a sampling parameter that the backend does not have")
def unsupported_sampling(ctx: CheckContext) -> Iterator[Finding]:
    """`sampling` of the policy and of each model-played role, against the capabilities of its backend."""
    sampled: list[tuple[BackendBase, SamplingParams, DataPath]] = [
        (ctx.spec.backend, ctx.spec.sampling, ("sampling",)),
        *(
            (role.served_by(ctx.spec), role.spec.sampling, (*path, "sampling"))
            for path, role in played_roles(ctx.spec).items()
        ),
    ]
    for backend, sampling, path in sampled:
        for name in backend.unsupported(sampling):
            kinds = [
                kind.kind_name()
                for kind in backend_classes()
                if name not in kind.unsupported_sampling and not isinstance(backend, kind)
            ]
            yield Finding(
                f"the `{backend.kind_name()}` backend does not have `{name}`",
                (*path, name),
                f"remove it, or use {' or '.join(f'`kind: {kind}`' for kind in kinds)}",
            )
        if sampling.temperature > backend.max_temperature and "temperature" not in backend.lacking:
            yield Finding(
                f"`temperature` is {sampling.temperature:g}; the `{backend.kind_name()}` backend takes at most "
                f"{backend.max_temperature:g}",
                (*path, "temperature"),
                f"set it to {backend.max_temperature:g} or less",
            )
        if (conflict := backend.conflict(sampling)) is not None:
            yield Finding(conflict, path, "remove one of them")


@rule("role.no-player", "error", "nothing is installed that lets a model play a user or a judge")
def nobody_plays(ctx: CheckContext) -> Iterator[Finding]:
    """`user`, `users` or `rewards.scorer` without `use`. What one installation corrects is one finding."""
    fixes: set[str] = set()
    for path, part in played_parts(ctx.spec).items():
        fix = no_player(part)
        if fix is not None and fix not in fixes:
            fixes.add(fix)
            yield Finding(f"nothing is installed that lets a model play the {part.player}", path, fix, key=True)
    for path, role in played_roles(ctx.spec).items():
        if (why := no_default(role.served_by(ctx.spec))) is not None:
            yield Finding(why, path, "write where the model runs: `backend: {kind: …}`", key=True)


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
    experts = _experts(ctx) if ctx.spec.backend.asks_experts else None
    if experts is not None and experts[1] is None:
        yield Finding(
            f"the model (`{experts[0]}`) has no experts, so there is no routing to report",
            ("backend", "routed_experts"),
            "remove it",
            key=True,
        )


@rule("train.expert-routing", "warning", "sampler and trainer may choose different experts")
def expert_routing(ctx: CheckContext) -> Iterator[Finding]:
    """A training of a mixture-of-experts model without the sampler's routing, or of a class that may not replay it."""
    spec = ctx.spec
    if spec.train is None or not spec.train.samples_episodes:
        return
    kind, layout = _experts(ctx) or ("", None)
    if layout is None:
        return
    backend = spec.backend
    if backend.asks_experts:
        if kind not in REPLAYED:
            yield Finding(
                f"`engine train` has not been tested with the routers of `{kind}`; it checks them when it starts",
                ("backend", "routed_experts"),
                "keep it if `engine train` starts; else remove it",
            )
        return
    kinds = " or ".join(f"`{each.kind_name()}`" for each in backend_classes() if each.reports_experts)
    yield Finding(
        f"the model chooses {layout.top_k} of {layout.experts} experts for each token, and near a tie sampler "
        "and trainer may choose different ones, so that their log-probs differ",
        ("backend",) if ctx.written("backend") else ("train",),
        "set `backend.routed_experts: true`" if backend.reports_experts else f"use {kinds} with `routed_experts: true`",
        key=True,
    )
