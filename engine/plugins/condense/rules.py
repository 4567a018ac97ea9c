"""Rules about `condense` and `limits.on_overflow`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from engine.plugins.condense.spec import BY_TEXT, ByTokens, CondenseSpec, KeywordsSpec, PolicySummarySpec, WindowSpec
from engine.validate.context import CheckContext
from engine.validate.model_files import model_files
from engine.validate.registry import Finding, rule
from engine.validate.worst_case import context_bound, count_bound


def _states_of(ctx: CheckContext, action: str) -> list[str]:
    return [name for name, state in ctx.states.items() if state.action == action]


@rule("condense.no-effect", "warning", "a setting of condensing has no effect")
def no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """`condense` without a state that condenses; `on_overflow: condense` without a limit on the prompt; a target above
    that limit."""
    spec = ctx.spec
    overflows = spec.limits.value_of("on_overflow") == "condense"
    written = CondenseSpec.section_of(spec)
    if written is not None and not _states_of(ctx, "condense"):
        yield Finding(
            "`condense` has no effect: no state condenses",
            ("condense",),
            "write `limits: {on_overflow: condense}`, or a state with `action: condense`",
            key=True,
        )
        return
    keep = written.keep if written is not None else None
    if keep is not None:
        yield from _no_effect_on_images(ctx, keep)
    bound = context_bound(ctx)
    if overflows and bound.most is None and keep is None:
        yield Finding(
            f"`on_overflow: condense` has no effect that is known here: {bound.by}",
            ("limits", "on_overflow"),
            "set `limits.episode_tokens`",
        )
    condense = written or CondenseSpec()
    if bound.most is None:
        return
    for key, value in (("target_tokens", condense.target_tokens), ("reserve_tokens", condense.reserve_tokens)):
        if value is not None and value >= bound.most:
            yield Finding(
                f"`{key}: {value}` is not below the limit on the prompt: {bound.by} is {bound.most:.0f}",
                ("condense", key),
                "set it below that",
            )
    if condense.reserve_tokens is not None and not overflows and not _handles_overflow(ctx):
        yield Finding(
            "`reserve_tokens` has no effect: no state handles the event `overflow`",
            ("condense", "reserve_tokens"),
            "write `limits: {on_overflow: condense}`, or remove it",
        )


def _no_effect_on_images(ctx: CheckContext, keep: WindowSpec) -> Iterator[Finding]:
    """What a window of images leaves without effect, and what leaves the window without effect."""
    spec, files, path = ctx.spec, model_files(ctx.loaded), ("condense", "keep")
    if files is not None and files.sees is False:
        yield Finding("`keep` has no effect: the model takes only text", path, "remove it", key=True)
    stray: list[tuple[tuple[str, ...], str]] = [(("condense", key), "with `keep`") for key in BY_TEXT]
    uses = {"text": "text", "thumbnail": "pixels"}
    stray += [((*path, key), f"with `older: {keep.older}`") for key in uses.values() if uses.get(keep.older) != key]
    if not _handles_overflow(ctx):
        stray.append(((*path, "step"), "where no state handles the event `overflow`"))
    if keep.pixels >= spec.model.max_image_pixels and keep.older == "thumbnail":
        stray.append(((*path, "pixels"), "above `model.max_image_pixels`: no image becomes a thumbnail"))
    for key, why in stray:
        if ctx.written(*key):
            yield Finding(f"`{key[-1]}` has no effect {why}", key, "remove it", key=True)
    for name, most in (("limits.images", spec.limits.images), ("model.max_images", spec.model.max_images)):
        if most is not None and most < (shown := keep.newest + keep.further - 1):
            yield Finding(
                f"the window shows {shown} images before it slides, and `{name}` is {most}",
                path,
                "raise that, or use a smaller `step`",
                key=True,
            )


@rule("condense.window", "warning", "the limit on condensations ends an episode before its turns do")
def window(ctx: CheckContext) -> Iterator[Finding]:
    """A window of images slides once for each `step` images. It is assumed that each turn but the last shows one."""
    condense, most = CondenseSpec.or_default(ctx.spec), ctx.spec.limits.value_of("condensations")
    keep = condense.keep
    if keep is None or most is None or (turns := count_bound(ctx, "assistant_turns").most) is None:
        return
    needed = (int(turns) - (not condense.opening) - keep.newest) // keep.further
    if needed > most and _handles_overflow(ctx):
        yield Finding(
            f"with an image in each of {turns:.0f} turns the window slides {needed} times, `limits.condensations` is "
            f"{most}",
            ("condense", "keep"),
            f"set `limits.condensations: {needed}`, or a larger `step`",
            key=True,
        )


def _handles_overflow(ctx: CheckContext) -> bool:
    return any(edge.trigger == "overflow" for edge in ctx.machine.transitions)


@rule("condense.action", "error", "the machine cannot condense in the way that `condense` says")
def action(ctx: CheckContext) -> Iterator[Finding]:
    """`ask_summary` belongs to `condenser: policy`, and the tool `expand` to a state that calls tools."""
    condense = CondenseSpec.or_default(ctx.spec)
    by_policy = isinstance(condense.condenser, PolicySummarySpec)
    asking = _states_of(ctx, "ask_summary")
    if asking and not by_policy:
        yield Finding(
            "`ask_summary` asks the policy for a summary, and `condense.condenser` is not `policy`",
            (*ctx.state_path(asking[0]), "action"),
            "write `condense: {chunks: history, condenser: policy}`, or remove the state",
        )
    if by_policy and not asking and (states := _states_of(ctx, "condense")):
        yield Finding(
            "`condenser: policy` puts the newest reply in the place of the history, and no state asks for a summary",
            (*ctx.state_path(states[0]), "action"),
            "add a state with `action: ask_summary` and one that generates before it",
        )
    if condense.expand and not _states_of(ctx, "call_tools"):
        yield Finding(
            "the model gets the tool `expand`, and no state calls tools",
            ("condense", "expand"),
            "add a state with `action: call_tools`, or remove `expand`",
        )


@rule("condense.no-package", "info", "a package that condensing needs is not installed")
def package(ctx: CheckContext) -> Iterator[Finding]:
    """`semantic_text_splitter` for chunks by tokens, `yake` and `budoux` for keywords."""
    condense = CondenseSpec.section_of(ctx.spec)
    if condense is None:
        return
    needed = [("chunks", "semantic_text_splitter")] if isinstance(condense.chunks, ByTokens) else []
    if isinstance(condense.condenser, KeywordsSpec):
        needed += [("condenser", "yake"), ("condenser", "budoux")]
    for key, name in needed:
        if find_spec(name) is None:
            yield Finding(
                f"`{name}` is not installed, and a run needs it",
                ("condense", key),
                "pip install 'episode-engine[condense]'",
            )
