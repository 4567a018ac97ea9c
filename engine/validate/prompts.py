"""Rules about the model's prompt, and about the files that the spec names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engine.actions.facts import owns_conversation
from engine.errors import SpecError
from engine.schemas.model import Words
from engine.spec.access import OUTSIDE_FIX
from engine.spec.rows.row import find
from engine.spec.template import fields_of, is_reference, texts_of
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import short
from engine.validate.context import CheckContext, each_source, for_each_source, nearest
from engine.validate.registry import Finding, rule

RECOVER_FIELDS = ("problem", "raw")
"""The fields of `recover.malformed`."""


Rows = list[tuple[int, Mapping[str, Any]]]
"""(number, fields) of rows of tasks. Where only the names of `tasks.map` are known, the number is 0."""


def known_rows(ctx: CheckContext) -> Rows:
    """The first rows of the tasks, as far as their fields are known."""
    if ctx.read_tasks is not None:
        return [(task.index + 1, task.fields) for task in ctx.read_tasks]
    rows: Rows = []
    for _, source in each_source(ctx):
        if source.spec.tasks.map:
            rows.append((0, dict.fromkeys(source.spec.tasks.map)))
            continue
        with suppress(SpecError):  # `tasks.unreadable` reports it
            rows += [(row.number, row.fields) for row in source.first_rows() if isinstance(row.fields, Mapping)]
    return rows


def no_field(ctx: CheckContext, rows: Rows, name: str, path: DataPath, offset: int | None = None) -> Iterator[Finding]:
    """Report the first row without the field `name`. Of a name with dots, `tasks.map` tells only the first part."""
    ctx.work.spend(len(rows))
    for number, fields in rows:
        if not find(name, fields)[0] and (number or not find(name.partition(".")[0], fields)[0]):
            where = f"row {number} has" if number else "tasks have"
            yield Finding(f"{where} no field `{name}`", path, nearest(name, fields), offset=offset)
            return


def texts_shown(ctx: CheckContext) -> Iterator[tuple[DataPath, str]]:
    """The texts of `prompt` and `recover`; the path of an image ends with `image`."""
    for index, message in enumerate(ctx.spec.messages):
        yield from ((("prompt", index, "content", *below), text) for below, text in texts_of(message.content))
    for key, words in _recover(ctx):
        yield from ((("recover", key, *below), text) for below, text in texts_of(words))


@rule("code.unknown-field", "warning", "code reads a field of the task that tasks do not have")
def code_field(ctx: CheckContext) -> Iterator[Finding]:
    """`task.fields["name"]`, in the text of an entry point that does not look first whether it is there."""
    rows = known_rows(ctx)
    for item in ctx.spec_code if rows else ():
        text = ctx.code_text(item.entry.use)
        nodes = [] if text is None else list(ast.walk(text.definition.node))
        looks = any(isinstance(node, ast.Try | ast.In | ast.NotIn) for node in nodes)
        for node in nodes if not looks else ():
            if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
                continue
            if ast.unparse(node.value).endswith("task.fields") and isinstance(node.slice.value, str):
                for found in no_field(ctx, rows, node.slice.value, (*item.path, "use")):
                    read = f"`{item.entry.use}` reads `task.fields[{node.slice.value!r}]` in its line {node.lineno}"
                    yield replace(found, message=f"{read}, and {found.message}")


@rule("prompt.unknown-field", "error", "a prompt names a field that tasks do not have")
@for_each_source
def prompt_field(ctx: CheckContext) -> Iterator[Finding]:
    """Every `{{field}}` of `prompt` and `recover.malformed`, compared with `tasks.map` or the rows."""
    rows = known_rows(ctx)
    if (source := ctx.spec.conversation) is not None and ctx.spec.tasks.map:
        yield from no_field(ctx, [row for row in rows if not row[0]], source.field, ("prompt", "field"))
    declared = _user_fields(ctx)
    for path, template in texts_shown(ctx):
        ctx.work.spend(1 + len(template) / 50)
        for name in fields_of(template):
            offset = offset_of(template, name)
            root, _, field = name.partition(".")
            if path[0] == "prompt":
                yield from no_field(ctx, rows, name, path, offset)
            elif root == "task" and field:
                yield from no_field(ctx, rows, field, path, offset)
            elif path[1] == "malformed" or declared is not None:
                known = RECOVER_FIELDS if path[1] == "malformed" else (declared or {}).get(str(path[1]), ())
                if name not in known:
                    yield Finding(
                        f"there is no field `{name}` here", path, nearest(name, [*known, "task.<field>"]), offset=offset
                    )


def _recover(ctx: CheckContext) -> list[tuple[str, Words]]:
    """The texts that the spec has, by key."""
    return [(key, words) for key, words in ctx.spec.recover if words is not None]


def _user_fields(ctx: CheckContext) -> Mapping[str, Sequence[str]] | None:
    """The `recover_fields` of the spec's only user; None: it declares none. A model-played user writes its own
    texts."""
    if len(ctx.users) != 1:
        return None
    use = ctx.users[0][1].use
    if use is None:
        return {}
    thing = ctx.code(use)
    fields = None if thing is None else thing.attribute("recover_fields")
    return fields if isinstance(fields, Mapping) else None


@rule("recover.unused", "warning", "a text under `recover` is never used")
def recover_unused(ctx: CheckContext) -> Iterator[Finding]:
    """`recover.wrong` and `recover.no_answer`, if there is no user or the user declares that it never uses them."""
    fields = _user_fields(ctx)
    for key, _ in _recover(ctx):
        if key == "malformed" or (ctx.users and (fields is None or key in fields)):
            continue
        use = ctx.users[0][1].use if ctx.users else None
        who = f"`{use}` never says it" if use else "a model that plays the user finds its own words"
        if not ctx.users:
            who = "it is said for a user, and the spec has none"
        yield Finding(f"`recover.{key}` has no effect: {who}", ("recover", key), "remove it", key=True)


_JINJA = re.compile(r"\{%.*?%\}|\{#.*?#\}", re.DOTALL)


@rule("prompt.jinja", "warning", "a prompt holds a statement of Jinja, which the model would see as it stands")
def jinja_in_prompt(ctx: CheckContext) -> Iterator[Finding]:
    """`{% … %}` and `{# … #}` in `prompt` and `recover`: texts of a spec have fields, `{{name}}`, and nothing else."""
    for path, template in texts_shown(ctx):
        ctx.work.spend(1 + len(template) / 50)
        if match := _JINJA.search(template):
            yield Finding(
                f"the model would see `{short(match[0])}` as it stands: a prompt has fields, `{{{{name}}}}`, alone",
                path,
                "make the text in the rows of the tasks or in `reset` of the environment, and name its field here",
                offset=match.start(),
            )


def offset_of(template: str, name: str) -> int:
    match = re.search(r"\{\{\s*" + re.escape(name), template)
    return match.start() if match else 0


@rule("prompt.empty", "error", "an episode would begin without any message")
def prompt_empty(ctx: CheckContext) -> Iterator[Finding]:
    """No `prompt`, no environment, whose `reset` may return messages, and no program, whose requests have messages."""
    if (
        not ctx.spec.messages
        and ctx.spec.conversation is None
        and ctx.spec.environment is None
        and not owns_conversation(ctx.machine)
    ):
        yield Finding(
            "the model gets no message: the spec has neither a prompt nor an environment",
            (),
            'add `prompt: [{role: user, content: "{{question}}"}]`, or an `environment` that begins',
        )


@rule("spec.outside", "error", "a file is outside the folders that may be read")
def outside_file(ctx: CheckContext) -> Iterator[Finding]:
    """Every file that the spec names must be below the spec's folder, the current folder or `--allow-path`."""
    for path, name in _named_files(ctx):
        if not ctx.loaded.access.allows(ctx.loaded.resolve(name, path)):
            yield Finding(
                f"`{short(name)}` is outside the folders that may be read, so it is not opened", path, OUTSIDE_FIX
            )


@rule("spec.no-file", "error", "a file that the spec names does not exist")
def missing_file(ctx: CheckContext) -> Iterator[Finding]:
    """`model.chat_template`, a scripted backend's `replies`, and images of `prompt` and `recover`."""
    for path, name in _named_files(ctx):
        full = ctx.loaded.resolve(name, path)
        if ctx.loaded.access.allows(full) and not ctx.loaded.access.is_file(full):
            yield Finding(f"the file `{short(name)}` does not exist", path, f"looked for {full}")


def _named_files(ctx: CheckContext) -> list[tuple[DataPath, str]]:
    named: list[tuple[DataPath, str]] = []
    if ctx.spec.model.chat_template is not None:
        named.append((("model", "chat_template"), ctx.spec.model.chat_template))
    named += [(("backend", key), file) for key, file in ctx.spec.backend.files.items()]
    return named + [
        (path, text)
        for path, text in texts_shown(ctx)
        if path[-1] == "image" and not is_reference(text) and not fields_of(text)
    ]
