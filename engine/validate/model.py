"""Rules about the model and its chat template, from its config and tokenizer files if they are on this computer.

Neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.errors import EngineError, RenderError, SpecError
from engine.plugin import missing
from engine.processes.forked import ChildError
from engine.schemas.backend import backend_classes
from engine.schemas.limits import UNBOUNDED
from engine.schemas.model import ModelSpec
from engine.schemas.role import RoleSpec
from engine.spec.tasks import rows_of, task_of
from engine.spec.template import fill
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import nearest_name
from engine.tokens.patches import patched, patches_of
from engine.tokens.toolcalls import FORMATS
from engine.validate.context import CheckContext, each_source
from engine.validate.model_files import ModelFiles, may_exist, model_files, read_bytes
from engine.validate.prompts import texts_shown
from engine.validate.registry import Finding, rule
from engine.validate.templates import Shown, rendered, shown
from engine.validate.tools import tools_at
from engine.validate.worst_case import context_bound, count_bound, key_of

CHARACTER = 0.5
"""Work units for counting the tokens of one character."""

View = dict[str, Any]


def _files(ctx: CheckContext) -> ModelFiles | None:
    return None if ctx.spec.backend.takes_messages else model_files(ctx.loaded)


@rule("model.unknown", "error", "the model is neither a folder, nor a name in the catalogue, nor a hub id")
def unknown(ctx: CheckContext) -> Iterator[Finding]:
    """Nothing is asked of the network: `owner/name` may be on the hub."""
    name = ctx.spec.model.path
    if ctx.spec.backend.takes_messages or may_exist(ctx.loaded):
        return
    from engine.tokens.catalogue import named_models

    near = nearest_name(name.rpartition("/")[2], list(named_models()))
    listed = f"name a folder, a hub id `owner/name`, or one of the catalogue: {', '.join(named_models())}"
    yield Finding(
        f"there is no model `{name}`: no folder of this name, and none in the catalogue",
        ("model", "path"),
        missing("models", name) or (f"did you mean `{near}`?" if near else listed),
    )


@rule("model.not-at-hand", "info", "the model's files are not on this computer, so some checks are skipped")
def not_at_hand(ctx: CheckContext) -> Iterator[Finding]:
    """Its context, its chat template, its special tokens and whether it takes images."""
    if not ctx.spec.backend.takes_messages and _files(ctx) is None and may_exist(ctx.loaded):
        yield Finding(
            f"the files of `{ctx.spec.model.path}` are not on this computer: template, context and images "
            "are not checked",
            ("model", "path"),
            "download it once (`engine models` lists the models), or give a folder",
        )


_STABLE = ("keep-thinking", "orphan-think")
"""Patches after which the template shows earlier reasoning as it was sampled."""


def _template(ctx: CheckContext, files: ModelFiles) -> str | None:
    """The chat template with the spec's patches; without those that `model.template-patch` reports."""
    source = files.template
    if source is None:
        return None
    try:
        return patched(source, ctx.spec.model.template_patches)[0]
    except RenderError:
        return source


def _render(ctx: CheckContext) -> Shown | None:
    """What the chat template does, with the spec's patches; None without files or without a template."""
    files = _files(ctx)
    source = None if files is None else _template(ctx, files)
    if files is None or source is None:
        return None
    return shown(source, _variables(ctx, files), trusted=files.trusted)


def _shown(ctx: CheckContext) -> Shown | None:
    """The same; None also where it cannot be rendered, which `model.template` reports."""
    shown = _render(ctx)
    return None if shown is None or shown.problem is not None else shown


def _variables(ctx: CheckContext, files: ModelFiles) -> dict[str, Any]:
    """The variables of a template other than messages and tools."""
    return {
        **files.special,
        **{key: value for key, value in ctx.spec.model.template_kwargs.items() if isinstance(key, str)},
    }


@rule("model.template", "error", "the chat template cannot be rendered")
def template_renders(ctx: CheckContext) -> Iterator[Finding]:
    """There is none, it is not valid Jinja, or it rejects every conversation."""
    files = _files(ctx)
    if files is None or not files.access.is_file(files.source / "tokenizer_config.json"):
        return
    is_replaced = ctx.spec.model.chat_template is not None
    path: DataPath = ("model", "chat_template" if is_replaced else "path")
    shown = _render(ctx)
    if files.template is None:
        if not is_replaced and ctx.spec.model.renderer in ("auto", "template"):
            yield Finding(
                "this model's tokenizer has no chat template", path, "give one: `model.chat_template: chat.jinja`"
            )
    elif shown is not None and shown.problem is not None:
        yield Finding(f"the chat template cannot be used: {shown.problem}", path, "give another: `model.chat_template`")


@rule("model.template-patch", "error", "a patch of the chat template that is unknown, or is none of this template")
def template_patch(ctx: CheckContext) -> Iterator[Finding]:
    """`model.template_patches` asks for patches that cannot be applied."""
    wanted = ctx.spec.model.template_patches
    if not wanted:
        return
    path: DataPath = ("model", "template_patches")
    if ctx.spec.model.renderer not in ("auto", "template"):
        yield Finding(
            f"`renderer: {ctx.spec.model.renderer}` renders without the chat template", path, "leave one of them out"
        )
        return
    files = _files(ctx)
    if files is None or files.template is None:
        return
    try:
        names = patched(files.template, wanted)[1]
    except RenderError as error:
        yield Finding(
            str(error).removeprefix("model.template_patches: "), path, "`engine template MODEL` lists its patches"
        )
        return
    if not names:
        yield Finding(
            "no patch is known for this chat template", path, "leave it out; `engine template MODEL` lists the patches"
        )


@rule("model.no-tools", "warning", "the chat template does not show tools, and the spec has some")
def no_tools(ctx: CheckContext) -> Iterator[Finding]:
    """The model does not see their schemas, so it does not know them unless the prompt describes them."""
    shown, at = _shown(ctx), tools_at(ctx)
    described = ctx.spec.model.tool_calls != "auto"  # another way of writing calls is described in the prompt
    if shown is not None and at is not None and not shown.tools and not described:
        yield Finding(
            f"the chat template of `{ctx.spec.model.path}` does not show tools: the model never sees their schemas",
            at,
            "describe them in `prompt` and set `model.tool_calls`, or give a `chat_template`",
            key=at == ("tools",),
        )


@rule("model.no-tool-role", "error", "the chat template does not show tools' results")
def no_tool_role(ctx: CheckContext) -> Iterator[Finding]:
    """It drops or rejects messages of role `tool`."""
    shown = _shown(ctx)
    hidden = shown is not None and not shown.results and ctx.spec.model.tool_role != "user"
    if hidden and ctx.calling and (ctx.spec.tools or ctx.spec.environment):
        yield Finding(
            f"the chat template of `{ctx.spec.model.path}` does not show messages of role `tool`",
            ("model", "tool_role"),
            "set `model.tool_role: user`: results are shown as a user's words",
        )


@rule("model.hidden-roles", "warning", "`model.hidden_roles` names a role that the chat template always shows")
def hidden_roles(ctx: CheckContext) -> Iterator[Finding]:
    """The key has no effect: it permits that messages are left out, and none is."""
    model = ctx.spec.model
    if not model.hidden_roles or model.renderer not in ("auto", "template"):
        return
    shown = _shown(ctx)
    for index, role in enumerate(model.hidden_roles):
        path: DataPath = ("model", "hidden_roles", index)
        path = path if ctx.written(*path) else ("model", "hidden_roles")
        if role == "tool" and model.tool_role == "user":
            yield Finding(
                "`tool_role: user` shows tools' results as a user's words: there are no messages of role `tool`",
                path,
                "leave `tool` out",
            )
        elif shown is not None and role not in shown.hides:
            yield Finding(
                f"the chat template of `{model.path}` shows every message of role `{role}`",
                path,
                "leave it out: a message that this template would lose is then an error",
            )


@rule("model.calls-not-read", "error", "nothing reads the tool calls that the chat template writes")
def calls_not_read(ctx: CheckContext) -> Iterator[Finding]:
    """Every call would be treated as an answer. The parser is tested on the template, and the result is cached."""
    files, shown, model = _files(ctx), _shown(ctx), ctx.spec.model
    proved = model.tool_calls == "auto" and model.renderer in ("auto", "template")
    if files is None or shown is None or not proved or not shown.tools or tools_at(ctx) is None:
        return
    if not files.trusted or not (files.source / "tokenizer.json").is_file():
        return  # an untrusted template is rendered only in a process of its own
    unread = _unread(model.model_dump_json(), str(ctx.loaded.base))
    if unread:
        named = ", ".join(f"`{name}`" for name in FORMATS)
        yield Finding(
            unread,
            ("model", "tool_calls"),
            f"set `model.tool_calls` to {named} or your own `package.module:Class`, and describe in `prompt` "
            "how calls are written",
        )


@lru_cache(maxsize=16)
def _unread(model: str, base: str) -> str:
    """Why no parser reads this model's calls; empty if one does, or if the model cannot be loaded."""
    from engine.tokens.loading import load_format

    try:
        return load_format(ModelSpec.model_validate_json(model), Path(base)).unread_calls
    except EngineError:
        return ""  # other rules report it


@rule("model.rewrites-history", "info", "the chat template rewrites earlier messages, which starts new branches")
def rewrites_history(ctx: CheckContext) -> Iterator[Finding]:
    """The maximum number of branches of one episode."""
    shown = _shown(ctx)
    if shown is None or shown.rewrites is None or ctx.spec.model.history == "keep":
        return
    turns = count_bound(ctx, "user_turns").most
    if turns == 0:
        return
    many = "as many branches as it has user turns, and one more" if turns is None else f"up to {turns + 1:.0f} branches"
    message = f"the chat template drops {shown.rewrites} when a user speaks again: an episode comes to {many}"
    fix = "that is exact, and costs their tokens; `model.history: keep` keeps what was sampled in one"
    files = _files(ctx)
    if files is not None and files.template is not None and any(p.name in _STABLE for p in patches_of(files.template)):
        fix += ", `model.template_patches: true` keeps it in the template as well"
    yield Finding(message, ("model", "history"), fix)


@rule("model.special-text", "warning", "text from tasks, tools or users may become special tokens")
def special_text(ctx: CheckContext) -> Iterator[Finding]:
    """`model.allow_special: true`: a text that contains `<|im_end|>` ends a message."""
    parts: list[tuple[DataPath, RoleSpec | None]] = [*ctx.users, (("rewards", "scorer"), ctx.spec.rewards.scorer)]
    paths: list[DataPath] = [("model",)] if ctx.spec.model.allow_special else []
    paths += [(*path, "model") for path, part in parts if part and part.model and part.model.allow_special]
    for path in paths:
        yield Finding(
            "text from users, tools, environments, task fields and replies that spells a special token "
            "becomes that token",
            (*path, "allow_special"),
            "leave `allow_special` out, unless your own code writes such text on purpose",
        )


@rule("model.stop-in-token", "warning", "a stop string is part of a template token or of a tool-call marker")
def stop_in_token(ctx: CheckContext) -> Iterator[Finding]:
    """It would end every reply that contains the token or the marker."""
    files = _files(ctx)
    if files is None:
        return
    call_format = FORMATS.get(ctx.spec.model.tool_calls) if ctx.spec.tools else None
    tokens = sorted({*files.added, *files.special.values(), *(call_format.marks if call_format else ())})
    for index, stop in enumerate(ctx.spec.sampling.stop):
        inside = [token for token in tokens if stop in token and stop != token]
        if inside:
            path: DataPath = ("sampling", "stop", index)
            path = path if ctx.written(*path) else ("sampling", "stop")
            yield Finding(
                f"the stop string `{stop}` is part of `{inside[0]}`: a reply that writes it ends there",
                path,
                "use a longer stop string, or `stop_token_ids`",
            )


@rule("model.images", "error", "images are shown to a model that takes none")
def images(ctx: CheckContext) -> Iterator[Finding]:
    """Image parts of `prompt` and `recover`, for a text model or one whose image format the engine does not support."""
    shown = [path for path, _ in texts_shown(ctx) if path[-1] == "image"]
    if not shown:
        return
    from engine.tokens.vision_families import FAMILIES

    backend, files = ctx.spec.backend, _files(ctx)
    kind = None if files is None else files.config.get("model_type")
    if not backend.takes_images:
        to = f" to the `{backend.kind_name()}` backend, which takes none"
        kinds = [
            each.kind_name() for each in backend_classes() if each.takes_images and each.exact_ids and not each.scripted
        ]
        fix = f"use {' or '.join(f'`kind: {kind}`' for kind in kinds)}, or leave the image out"
    elif files is None or files.sees is None or (files.sees and kind in (None, *FAMILIES)):
        return
    else:
        why = f"is a `{kind}`, whose images are not supported" if files.sees else "takes only text"
        to = f", and `{ctx.spec.model.path}` {why}"
        fix = (
            f"take one of {', '.join(FAMILIES)}"
            if files.sees
            else "take a vision-language model, or leave the image out"
        )
    for path in shown:
        yield Finding(f"an image is shown{to}", path, fix)


@rule("model.context", "warning", "the spec's context is larger than the model's")
def context(ctx: CheckContext) -> Iterator[Finding]:
    """The model was not trained for such positions."""
    files = _files(ctx)
    own = ctx.spec.model.context
    if files is not None and own is not None and files.context is not None and own > files.context:
        yield Finding(
            f"`model.context: {own}`, and the model was made for {files.context} tokens",
            ("model", "context"),
            f"set it to {files.context} or less, or leave it out",
        )


@rule("limits.prompt-too-long", "error", "a prompt and one turn do not fit the episode's tokens")
def prompt_too_long(ctx: CheckContext) -> Iterator[Finding]:
    """The prompts of the first rows, in the model's tokens, compared with `episode_tokens` and the context."""
    files = _files(ctx)
    bound = context_bound(ctx)
    if files is None or bound.most is None or ctx.spec.tasks.overlong == "drop":
        return
    sampled = min(ctx.spec.sampling.max_new_tokens or ctx.spec.limits.turn_tokens, UNBOUNDED)
    room = bound.most - min(sampled, ctx.spec.limits.turn_tokens)
    if room <= 0:
        return  # `limits.contradiction` reports it
    for number, messages in _openings(ctx):
        if sum(len(message["content"].encode()) + 16 for message in messages) <= room:
            continue  # a token is at least one byte
        try:
            tokens = _tokens_of(ctx, files, messages)
        except ChildError as error:
            yield Finding(
                f"the prompt of row {number} cannot be rendered: {error}",
                ("prompt",),
                "give another `model.chat_template`",
            )
            return
        if tokens is not None and tokens > room:
            turn = f"with a turn of {min(sampled, ctx.spec.limits.turn_tokens)}"
            yield Finding(
                f"the prompt of row {number} has {tokens} tokens: {turn} more than {bound.most:.0f} ({bound.by})",
                key_of(bound.by, ("prompt",)),
                "shorten the prompt or the turn, or allow more tokens",
            )
            return


def _openings(ctx: CheckContext) -> Iterator[tuple[int, list[View]]]:
    """The spec's part of the prompt, for the first rows."""
    if not ctx.spec.messages or not all(isinstance(message.content, str) for message in ctx.spec.messages):
        return
    for _, source in each_source(ctx):
        tasks = source.spec.tasks
        if tasks.source not in ("inline", "jsonl"):
            continue
        try:
            for index, row in enumerate(rows_of(source.loaded, 8)):
                task = task_of(row, index, tasks, source.loaded)
                yield (
                    row.number,
                    [
                        {"role": message.role, "content": fill(str(message.content), task.fields)}
                        for message in ctx.spec.messages
                    ],
                )
        except (SpecError, EngineError):
            continue  # the rules about tasks and prompts report it


def _tokens_of(ctx: CheckContext, files: ModelFiles, messages: list[View]) -> int | None:
    """The number of tokens of a conversation; None if its template or tokenizer fails."""
    views = [
        {**view, "role": "user"} if view["role"] == "tool" and ctx.spec.model.tool_role == "user" else view
        for view in messages
    ]
    template = _template(ctx, files)
    text = template and rendered(template, _variables(ctx, files), views, trusted=files.trusted)
    tokenizer = None if text is None else _tokenizer(files, files.source / "tokenizer.json")
    if text is None or tokenizer is None:
        return None
    ctx.work.spend(len(text) * CHARACTER)
    try:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by Rust code; not a subclass of Exception
            raise
        raise ChildError(f"its tokenizer fails: {error}") from None


@lru_cache(maxsize=4)
def _tokenizer(files: ModelFiles, file: Path) -> Any:
    from tokenizers import Tokenizer

    data = read_bytes(file, files.access)
    try:
        return None if data is None else Tokenizer.from_buffer(data)
    except Exception:  # noqa: BLE001  (the library raises bare exceptions; without it nothing is counted)
        return None
