"""Rules over roles (model-played users and judges), and over the marks of users."""

from __future__ import annotations

from collections.abc import Iterator

from engine.plugins.roles.players import frozen_refusal, role_section, role_weights
from engine.spec.access import OUTSIDE_FIX
from engine.spec.added import played_roles
from engine.spec.template import fields_of
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import short
from engine.validate.context import CheckContext, nearest
from engine.validate.prompts import known_rows, no_field, offset_of
from engine.validate.registry import Finding, rule


@rule("role.unknown-field", "error", "the prompt of a user or judge names a field that does not exist")
def role_field(ctx: CheckContext) -> Iterator[Finding]:
    """`{{reply}}`, `{{dialogue}}`, … and `{{task.<field>}}` in the prompts of model-played users and judges."""
    roles = played_roles(ctx.spec)
    rows = known_rows(ctx) if roles else []
    for path, role in roles.items():
        for index, message in enumerate(role.spec.prompt):
            at = (*path, "prompt", index, "content")
            for name in fields_of(message.content):
                ctx.work.spend(10)
                offset = offset_of(message.content, name)
                root, _, below = name.partition(".")
                if root == "task" and below:
                    yield from no_field(ctx, rows, below, at, offset)
                elif root != "task" and name not in role.fields:
                    yield Finding(
                        f"there is no field `{name}` here",
                        at,
                        nearest(name, [*(item for item in role.fields if item != "task"), "task.<field>"]),
                        offset=offset,
                    )


@rule("role.no-file", "error", "a file that the model of a user or judge needs does not exist")
def role_file(ctx: CheckContext) -> Iterator[Finding]:
    """The chat template of its model, and the replies of its scripted backend."""
    for path, role in played_roles(ctx.spec).items():
        part = role.spec
        named: list[tuple[DataPath, str]] = []
        if part.model is not None and part.model.chat_template is not None:
            named.append((("model", "chat_template"), part.model.chat_template))
        if part.backend is not None:
            named += [(("backend", key), file) for key, file in part.backend.files.items()]
        for below, name in named:
            full = role_section(ctx.loaded, path).resolve(name, below)
            if not ctx.loaded.access.allows(full):
                yield Finding(
                    f"the file `{short(name)}` is outside the folders that may be read", (*path, *below), OUTSIDE_FIX
                )
            elif not ctx.loaded.access.is_file(full):
                yield Finding(f"the file `{name}` does not exist", (*path, *below), f"looked for {full}")


@rule("role.free-verdict", "warning", "only a model-played user decides whether a task is solved")
def free_verdict(ctx: CheckContext) -> Iterator[Finding]:
    """Marks with rewards, without a grader: the policy may persuade the simulated user to emit the reward mark."""
    for path, user in ctx.users:
        if not user.model_played or user.grader is not None:
            continue
        for index, mark in enumerate(user.marks):
            if any((event.value or 0.0) > 0.0 for event in mark.rewards) or mark.reward is not None:
                yield Finding(
                    "the policy may persuade this model to write the mark that earns the reward",
                    (*path, "marks", index),
                    "have a rule decide (`grader: {use: …}`), or a judge at the end (`rewards.scorer`)",
                )


@rule("role.user-never-ends", "warning", "a model-played user has no way to end the conversation")
def never_satisfied(ctx: CheckContext) -> Iterator[Finding]:
    """No mark with `satisfied`, and no grader: every episode continues until a limit."""
    for path, user in ctx.users:
        if user.model_played and user.grader is None and not any(mark.satisfied for mark in user.marks):
            yield Finding(
                "this user is never satisfied: only a limit ends its episodes",
                path,
                'add `marks: [{text: "[DONE]", satisfied: true}]`, and say so in its prompt',
                key=True,
            )


@rule("role.frozen", "error", "the weights of a user or judge cannot be frozen during the training")
def role_frozen(ctx: CheckContext) -> Iterator[Finding]:
    """It runs on the policy's servers, which have only the newest weights."""
    if ctx.spec.train is None:
        return
    for path, role in played_roles(ctx.spec).items():
        if role_weights(ctx.spec, role) == "impossible":
            message, fix = frozen_refusal(role.name, ctx.spec)
            yield Finding(message, path, fix, key=True)


@rule("role.policy-weights", "warning", "a user or judge has the weights that are trained")
def role_policy_weights(ctx: CheckContext) -> Iterator[Finding]:
    """`weights: policy`; also where it has no effect."""
    if ctx.spec.train is None:
        return
    for path, role in played_roles(ctx.spec).items():
        name, part = role.name, role.spec
        if part.weights != "policy":
            continue
        at: DataPath = (*path, "weights")
        if role_weights(ctx.spec, role) == "policy":
            yield Finding(
                f"the model of `{name}` changes with the policy in every step, and so do its answers and rewards",
                at,
                "write `weights: frozen`, unless self-play is intended",
            )
        else:
            yield Finding(
                f"`weights: policy` has no effect: the model of `{name}` is another one, or has a backend of its own",
                at,
                "remove it, or remove its `model` and `backend`",
            )
