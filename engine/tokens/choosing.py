"""Chooses the reader of a model's replies by testing readers on what the chat template writes.

Invariant: `auto` takes a reader only if, for generated test replies (contents with white space at their edges,
reasoning, calls with every type of JSON, calls in parallel), it reads back from the template's text what the template
was given. Where no reader does, tools are refused with this model: a call is never taken for an answer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.errors import RenderError
from engine.schemas.message import MalformedCall, ToolCall
from engine.schemas.model import ModelSpec
from engine.tokens.bridge.kinds import View
from engine.tokens.catalogue import cache_root
from engine.tokens.families import FAMILIES, make_renderer
from engine.tokens.jinja_template import JinjaTemplate
from engine.tokens.reply_parser import ParsedReply
from engine.tokens.reply_readers import FamilyReader, Harmony
from engine.tokens.template import ChatTemplate, reads_template
from engine.tokens.toolcalls import FORMATS, PythonicFormat, tool_call_format

_NAME = "probe_tool"
_RESULT = "Qz9Result"
_KINDS: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "nothing": {"type": "null"},
    "items": {"type": "array", "items": {}},
    "options": {"type": "object"},
}
TOOL: View = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": _KINDS},
    },
}
"""A tool with a parameter of each type of JSON."""
ASKED: View = {"role": "user", "content": "Q"}
"""The question of a test reply."""

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "Paris"}],
    "no arguments": [{}],
    "every type": [
        {
            "text": "é (d), [e]: {f}",
            "count": 3,
            "ratio": 2.5,
            "flag": True,
            "nothing": None,
            "items": [1, "a", False, {"k": 2}],
            "options": {"k": "v", "n": [0]},
        }
    ],
    "awkward text": [{"text": "a \"b\"\n'c' <d> \\", "items": [None]}],
    "white space at the edges of text": [{"text": "  a \n"}],
    "nested values": [{"items": [None, [True, {"k": None}]], "options": {"k": None, "n": {"f": False}}}],
    "text that looks like another type": [{"text": "12"}, {"text": "true"}],
    "parallel": [{"text": "a"}, {"count": 2, "flag": False}],
}
"""Test replies with calls, by name: the arguments of each call of the reply."""
AWKWARD = ("awkward text", "white space at the edges of text")
"""Cases that a reader may find malformed, but may not read as something else: some templates do not escape text."""
_CALLS, _MALFORMED = "calls: ", "malformed: "
CONTENTS = ("Yes.", "So:\n\n1.", "\n\nIt is.", "It is. \n", "It is:\n\n")
"""Contents with white space at their edges."""


def _calls(arguments: list[dict[str, Any]]) -> list[View]:
    return [
        {"type": "function", "id": f"call_0_{number}", "function": {"name": _NAME, "arguments": values}}
        for number, values in enumerate(arguments)
    ]


def _cases(template: ChatTemplate) -> Iterator[tuple[str, View]]:
    """Test replies, with what each tests."""
    thoughts = ["Hm.", "Hm.\n\nSo it is."] if template.knows_reasoning else []
    for content in CONTENTS:
        yield "content", {"role": "assistant", "content": content}
    if not thoughts:
        marked = "<think>\nHm.\n</think>\n\nYes."
        yield "thoughts as content", {"role": "assistant", "content": marked}
        if template.calls_shown:
            yield "thoughts as content", {"role": "assistant", "content": marked, "tool_calls": _calls([{"text": "a"}])}
    for why in thoughts:
        yield "reasoning", {"role": "assistant", "content": "Yes.", "reasoning_content": why}
    for name, arguments in ARGUMENTS.items():
        if len(arguments) > 1 and template.calls_shown < 2:
            continue
        for content in ("", "I look it up.\n\n"):
            view = {"role": "assistant", "content": content, "tool_calls": _calls(arguments)}
            yield f"{_CALLS}{name}", view
            if thoughts and not content:
                yield f"{_CALLS}{name}", {**view, "reasoning_content": thoughts[0]}


def written(template: ChatTemplate, reply: View) -> tuple[str, str] | None:
    """What the template writes before a reply, and for the reply up to its end; None where it shows no such reply."""
    results = [
        {"role": "tool", "content": _RESULT, "name": _NAME, "tool_call_id": call["id"]}
        for call in reply.get("tool_calls", ())
    ]
    for following in [results, []] if results else [[]]:
        try:
            before = template.text([ASKED], [TOOL])
            after = template.unchecked_bridge(reply, following, None)
            conversation = template.text([ASKED, reply, *following], [TOOL])
        except RenderError:
            continue
        if not conversation.startswith(before):  # the prompt opens reasoning, and the template shows none here
            before, opening, _ = before.rpartition("<think>")
            if not opening or not conversation.startswith(before):
                continue
        if after is None:
            continue
        tail = template.decode([*after.closing, *after.bridge])
        text = conversation[len(before) : -len(tail)]
        if conversation.endswith(tail) and _RESULT not in text:
            return before, text
    return None


def failures(template: ChatTemplate) -> dict[str, str]:
    """What a format does not read back as its template was given it: case -> an example. Empty: it reads everything
    back."""
    problems: dict[str, str] = {}
    called = False
    close = template.stop_token_ids[:1]
    for name, reply in _cases(template):
        shown = written(template, reply)
        if shown is None:
            continue
        before, text = shown
        if reply["content"] and reply["content"].strip() not in text and "tool_calls" not in reply:
            continue  # the template reads this content in a way of its own
        called = called or "tool_calls" in reply
        ids = np.array([*template.encode(text), *close], np.int32)
        try:
            parsed = template.replies.parse(
                ids, before=np.array(template.encode(before), np.int32), turn=0, tools=[TOOL]
            )
        except RenderError as error:
            problems.setdefault(name, str(error))
            continue
        if problem := _differs(template, parsed, reply, text):
            malformed = any(isinstance(attempt, MalformedCall) for attempt in parsed.attempts)
            awkward = malformed and name.removeprefix(_CALLS) in AWKWARD
            problems.setdefault(f"{_MALFORMED}{name}" if awkward else name, problem)
    if not called:
        problems["calls"] = "the template shows no calls, so nothing tells how this model writes them"
    return problems


def _differs(template: ChatTemplate, parsed: ParsedReply, reply: View, text: str) -> str:
    """How the reply that was read differs from the one that was written; empty where it does not."""
    calls = [(a.name, a.arguments) if isinstance(a, ToolCall) else a.problem for a in parsed.attempts]
    wanted = [(call["function"]["name"], call["function"]["arguments"]) for call in reply.get("tool_calls", ())]
    if json.dumps(calls, sort_keys=True) != json.dumps(wanted, sort_keys=True):  # 1, 1.0 and True differ
        return f"{text!r} is read as the calls {calls}"
    content = reply["content"].strip()
    if content not in text:  # the prompt opened its reasoning
        content = content.removeprefix("<think>\n")
    if wanted and content not in text:  # the template shows no content beside calls
        content = ""
    if wanted and content and (parsed.content, parsed.reasoning) == ("", content):
        return ""  # the template writes content beside calls as reasoning
    if parsed.content.strip() != content:
        return f"{text!r} is read as the content {parsed.content!r}"
    why = reply.get("reasoning_content", "")
    if why not in text:  # the template shows no reasoning here
        why = ""
    if (parsed.reasoning or "").strip() != why:
        return f"{text!r} is read as the reasoning {parsed.reasoning!r}"
    return ""


class ChosenReader(msgspec.Struct, frozen=True):
    """The reader of one chat template's replies."""

    reader: str | None
    """A family of the library `renderers`, or a built-in tool-call format; None where nothing reads what the template
    writes."""
    tried: dict[str, str]
    """Readers that were tried before it, and what each does not read back."""
    unread: list[str]
    """Cases that the reader does not read back: the template writes these texts so that no reader can."""


_version_of = cache(version)
_VERSION = 4
"""Version of the test replies and of the readers. A result of another version is not used."""


def chosen_reader(template: JinjaTemplate, spec: ModelSpec) -> ChosenReader:
    """The reader of this template's replies. The result is kept in the cache, `readers/`, by the hash of the
    template."""
    fast = template.fast
    inputs = [_VERSION, _version_of("renderers"), template.source.sources, sorted(fast.added), spec.template_kwargs]
    inputs += [template.stops, type(fast.full).__name__, fast.size]
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()
    file = cache_root() / "readers" / f"{digest}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=ChosenReader)
    except (OSError, msgspec.DecodeError):
        chosen = _choose(template, spec)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f"{file.name}.{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(chosen))
        beside.replace(file)
    except OSError:  # a cache that cannot be written only costs time
        pass
    return chosen


def _choose(template: JinjaTemplate, spec: ModelSpec) -> ChosenReader:
    tried: dict[str, str] = {}
    families = [name for name, mark in FAMILIES.items() if mark in template.fast.added]
    for name in [*families, *(name for name, kind in FORMATS.items() if kind.auto)]:
        problem = _set_reader(template, name, spec)
        problems = {"it": problem} if problem else failures(template)
        wanting = next((text for case, text in problems.items() if not case.startswith(_MALFORMED)), "")
        if not wanting:
            return ChosenReader(name, tried, list(problems))
        tried[name] = wanting
    return ChosenReader(None, tried, [])


def choose_reader(template: JinjaTemplate, spec: ModelSpec, base: Path) -> None:
    """Give a format the reader that `model.tool_calls` asks for: for `auto`, one that reads what this template writes.

    Args:
        template: The format; its `call_format`, `reader`, `reads_calls` and `unread_calls` are set.
        spec: The spec's `model`.
        base: The spec's folder.

    Raises:
        RenderError: `model.tool_calls` names no tool-call format.
        EntryError: It names a class that cannot be imported.
    """
    if spec.tool_calls != "auto":
        template.call_format = tool_call_format(spec.tool_calls, base)
        template.reads_calls = reads_template(template, template.call_format)
        return
    if not template.knows_tools and not template.calls_shown:
        template.call_format = tool_call_format("plain")
        return
    template.reads_calls = True
    chosen = chosen_reader(template, spec)
    if chosen.reader is not None:
        _set_reader(template, chosen.reader, spec)
        awkward = f"{_MALFORMED}{_CALLS}{AWKWARD[0]}" in chosen.unread
        if awkward and isinstance(template.call_format, PythonicFormat):
            template.call_format = PythonicFormat(escapes=False)
        return
    template.call_format, template.reader, template.reads_calls = None, None, False
    why = "; ".join(f"{name}: {problem[:_SHORT]}" for name, problem in chosen.tried.items() if _NO_FIT not in problem)
    template.unread_calls = f"no reader reads the calls that this chat template writes ({why})"


_NO_FIT = "does not fit the tokenizer"
_SHORT = 160
"""Characters of one reader's failure in a message."""


def _set_reader(template: JinjaTemplate, name: str, spec: ModelSpec) -> str:
    """Give a format this reader; why it cannot be made, empty where it can."""
    template.call_format = template.reader = None
    template.knows_reasoning = template.shows_reasoning
    if name in FORMATS:
        template.call_format = FORMATS[name]()
        return ""
    try:
        library: Any = Harmony(template.fast) if name == "gpt-oss" else make_renderer(name, template.fast, spec)
        template.reader = FamilyReader(name, library, template.fast, template.stop_set)
    except Exception as error:  # noqa: BLE001 - each family refuses foreign tokenizers in its own way
        return f"{_NO_FIT}: {error}"
    template.knows_reasoning = template.shows_reasoning or template.reader.has_reasoning_channel
    return ""
