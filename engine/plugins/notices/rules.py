"""Rules about `notify`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from engine.plugins.notices.spec import NotifySpec
from engine.validate.context import CheckContext, without_effect
from engine.validate.registry import Finding, rule


@rule("notify.no-effect", "warning", "an option of `notify` has no effect in this combination")
def notify_no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """Options without a channel, channels without an event, options of events that send nothing, and events that cannot
    occur."""
    notify = NotifySpec.or_default(ctx.spec)
    reasons: dict[str, str] = {}
    if not notify.has_channel:
        why = "no channel is set (`webhook_env`, `services_env`, `command` or `use`)"
        reasons = dict.fromkeys(("on", "stall_timeout", "repeat_after", "budget"), why)
    elif not notify.on:
        reasons = dict.fromkeys(
            ("webhook_env", "services_env", "command", "use", "stall_timeout", "repeat_after", "budget"),
            "`notify.on` is empty, so nothing is sent",
        )
    else:
        events = {"stall_timeout": "stalled", "budget": "budget"}.items()
        reasons = {key: f"`notify.on` does not contain `{event}`" for key, event in events if event not in notify.on}
    if notify.budget is not None and notify.budget.tokens is None and notify.budget.time is None:
        reasons["budget"] = "it has neither `tokens` nor `time`"
    yield from without_effect(ctx, [(True, f"notify.{key}", why) for key, why in reasons.items()])
    for number, kind in enumerate(notify.on if notify.has_channel else ()):
        never = _never_sent(ctx, kind)
        if never is not None and ctx.written("notify", "on"):
            yield Finding(
                f"`notify.on` contains `{kind}`, which has no effect: {never}",
                ("notify", "on", number),
                "remove it, or change what the message names",
            )


def _never_sent(ctx: CheckContext, kind: str) -> str | None:
    """Why no notice of a kind can be sent with this spec; None if one can."""
    spec = ctx.spec
    if kind == "diverged" and spec.train is None:
        return "only a training diverges, and the spec has no `train`"
    if kind == "no_signal" and (spec.train is None or not spec.train.samples_episodes):
        return "only a training on its own episodes can lack a learning signal, and the spec has none"
    budget = NotifySpec.or_default(spec).budget
    amounts = budget is not None and (budget.tokens is not None or budget.time is not None)
    if kind == "budget" and not amounts and not ctx.written("rollout", "max_cost"):
        return "neither `notify.budget` nor `rollout.max_cost` gives an amount"
    return None


@rule("notify.no-package", "info", "the package that sends notices to services is not installed")
def notify_no_package(ctx: CheckContext) -> Iterator[Finding]:
    """apprise, for `notify.services_env`."""
    if NotifySpec.or_default(ctx.spec).services_env and find_spec("apprise") is None:
        yield Finding(
            "`apprise` is not installed, and `notify.services_env` needs it",
            ("notify", "services_env"),
            "pip install 'episode-engine[notify]'",
            key=True,
        )
