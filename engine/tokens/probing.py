"""What a chat template can show, found by rendering probes (see bridge/check.py): asked here, and nowhere else.

The chat format asks it when it is loaded, `engine validate` of the template alone. So both say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from engine.errors import RenderError
from engine.schemas.message import ToolCall
from engine.tokens.bridge.kinds import ASSISTANT, CALLS, REASONS, SYSTEM, TOOL, TOOL_NAME, USER, View, mark, probe
from engine.tokens.toolcalls import ToolCallFormat, parse_calls

if TYPE_CHECKING:
    from engine.tokens.template import ChatTemplate


Writer = Callable[[Sequence[View], list[View] | None], str]
"""(messages, tools) -> what the template writes. Raises RenderError where it refuses."""


class Abilities(msgspec.Struct, frozen=True):
    """What a chat template can show."""

    tools: bool
    """The schemas of tools."""
    tool_results: bool
    """Messages of role `tool`."""
    reasoning: bool
    """Reasoning, at least in the newest reply."""
    calls: int
    """How many calls of one message it shows as calls: 0, 1 or 2 (any number)."""
    alternates: bool
    """It refuses two user messages in a row."""


PROBE_TOOL: View = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
"""The schema of a tool that is shown only to templates."""


def abilities_of(write: Writer) -> Abilities:
    """What a chat template can show.

    Args:
        write: The template.
    """
    calls, reply = [ASSISTANT + CALLS, ASSISTANT + 2 * CALLS], ASSISTANT
    # The newest reply: a template may leave out reasoning once a user speaks again.
    reasons = [{"role": "user", "content": "Q"}, probe(ASSISTANT + REASONS, 1, str)]
    return Abilities(
        tools=_shows(write, [USER], TOOL_NAME, tools=[PROBE_TOOL]),
        tool_results=_shows(write, [USER, calls[0], TOOL], mark(2)) or _shows(write, [USER, reply, TOOL], mark(2)),
        reasoning=_shows_views(write, reasons, f"Why {mark(1)}w"),
        calls=sum(
            _shows(write, [USER, kind, TOOL], TOOL_NAME, f"{mark(1)}n{number}") for number, kind in enumerate(calls)
        ),
        alternates=_shows(write, [USER, reply, USER], mark(2))
        and not _shows(write, [USER, reply, USER, USER], mark(3)),
    )


def reads_template(template: ChatTemplate, call_format: ToolCallFormat) -> bool:
    """Whether a tool-call format reads a call as the template writes it.

    Raises:
        RenderError: The spec's own format failed.
    """
    if not template.calls_shown:
        return False
    views = [probe(USER, 0, str), probe(ASSISTANT + CALLS, 1, str)]
    attempts = parse_calls(call_format, template.text(views, None), [PROBE_TOOL], "call").attempts
    wanted = views[1]["tool_calls"][0]["function"]
    calls = [(attempt.name, attempt.arguments) for attempt in attempts if isinstance(attempt, ToolCall)]
    return calls == [(wanted["name"], wanted["arguments"])]


def rewritten_part(write: Writer) -> str | None:
    """What the template writes differently once a user has spoken again: `reasoning`, `the reply`, or None."""
    question, again = probe(USER, 0, str), probe(USER, 2, str)
    answer, why = mark(1), f"Why {mark(1)}w"
    replies: list[tuple[str, View]] = [
        ("reasoning", {"role": "assistant", "content": answer, "reasoning_content": why}),
        ("reasoning", {"role": "assistant", "content": f"<think>\n{why}\n</think>\n\n{answer}"}),
        ("the reply", {"role": "assistant", "content": answer}),
    ]
    for part, reply in replies:
        try:
            newest, later = write([question, reply], None), write([question, reply, again], None)
        except RenderError:
            continue
        before, shown, _ = newest.rpartition(answer)
        if shown and not later.startswith(before):
            return part
    return None


def refuses_later_system(write: Writer) -> bool:
    """Whether the template refuses a system message after a reply, and takes the conversation without it."""
    before, after = [probe(USER, 0, str), probe(ASSISTANT, 1, str)], [probe(USER, 3, str)]
    return _shows_views(write, [*before, *after], mark(3)) and not _shows_views(
        write, [*before, probe(SYSTEM, 2, str), *after]
    )


def hidden_roles(write: Writer) -> list[str]:
    """Roles whose messages the template leaves out somewhere, and `system` where it refuses a later system message."""
    caller = [ASSISTANT + CALLS, TOOL]
    roles = {"system"} if refuses_later_system(write) else set()
    for kinds in (
        [USER, *caller, *caller, ASSISTANT, USER] * 3,
        [SYSTEM, USER, ASSISTANT, SYSTEM, USER, ASSISTANT, USER],
    ):
        views = [probe(kind, index, str) for index, kind in enumerate(kinds)]
        for end in range(1, len(views) + 1):
            try:
                shown = write(views[:end], None)
            except RenderError:
                continue
            roles |= {view["role"] for index, view in enumerate(views[:end]) if mark(index) not in shown}
    return sorted(roles - {"assistant"})


def _shows(write: Writer, kinds: Iterable[int], *texts: str, tools: list[View] | None = None) -> bool:
    """Whether probes of these kinds are rendered, with each of `texts` in the result."""
    return _shows_views(write, [probe(kind, index, str) for index, kind in enumerate(kinds)], *texts, tools=tools)


def _shows_views(write: Writer, views: list[View], *texts: str, tools: list[View] | None = None) -> bool:
    try:
        shown = write(views, tools)
    except RenderError:
        return False
    return all(text in shown for text in texts)
