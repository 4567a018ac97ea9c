"""What a chat template does with the usual turns: which continue the tape, where two renderings part, and which tokens
are trained.

`engine template` prints it. Everything is found by rendering; no weights are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import RenderError
from engine.schemas.base import Struct
from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.message import Message
from engine.tokens.bridge.check import check_bridge
from engine.tokens.bridge.kinds import ASSISTANT, BLANK, CALLS, REASONS, TOOL, USER, View, probe
from engine.tokens.bridge.wrapper import common_length
from engine.tokens.choosing import TOOL as TOOL_SCHEMA
from engine.tokens.choosing import written
from engine.tokens.conversation import Conversation
from engine.tokens.jinja_template import JinjaTemplate

if TYPE_CHECKING:
    from engine.tokens.template import ChatTemplate

CASES: dict[str, tuple[list[int], int]] = {
    "user after an answer": ([USER, ASSISTANT], USER),
    "user after reasoning": ([USER, ASSISTANT + REASONS], USER),
    "tool after a call": ([USER, ASSISTANT + CALLS + BLANK], TOOL),
    "tool after reasoning and a call": ([USER, ASSISTANT + REASONS + CALLS], TOOL),
    "user after calls and an answer": ([USER, ASSISTANT + CALLS, TOOL, ASSISTANT], USER),
}
"""The usual turns: the kinds of the messages so far, and of the new one."""
_MOST_REASONS = 3
_BEFORE, _AFTER = 24, 56
"""Characters that are shown before and after the place where two renderings part."""


class TurnRendering(Struct, frozen=True, kw_only=True):
    """One of the usual turns."""

    goes_on: bool
    """Whether the tape continues; otherwise a branch begins."""
    why: str
    """Why a branch begins."""
    was: str
    """What the template wrote before the new message, at the place where the renderings part; empty if they do not."""
    now: str
    """What it writes at this place with the new message."""


def usual_turns(template: ChatTemplate) -> dict[str, TurnRendering]:
    """The usual turns that this format can show, by name."""
    renderings = {}
    for name, (kinds, new) in CASES.items():
        replies = [kind for kind in kinds if kind >= ASSISTANT]
        if any(kind >= ASSISTANT + CALLS for kind in replies) and not template.calls_shown:
            continue
        if any((kind - ASSISTANT) % CALLS == REASONS for kind in replies) and not template.knows_reasoning:
            continue
        verdict = check_bridge(template, bytes(kinds), bytes([new]), None)
        goes_on = verdict.bridged and not verdict.rewrites
        was, now = ("", "") if goes_on else parting(template, [*kinds, new])
        renderings[name] = TurnRendering(goes_on=goes_on, why="" if goes_on else verdict.why, was=was, now=now)
    return renderings


def parting(template: ChatTemplate, kinds: Sequence[int]) -> tuple[str, str]:
    """Where the template shows earlier text differently once the last of these messages has come.

    Returns:
        What it wrote before and what it writes now, from some characters before the first difference on; empty texts if
        the earlier text is a prefix of the later one, or if the template refuses a conversation.
    """
    views = [probe(kind, index, str) for index, kind in enumerate(kinds)]
    try:
        asked = template.text(views[:-2], None)
        newest = template.text(views[:-1], None)
        newer = template.text(views, None)
    except RenderError:
        return "", ""
    # up to the end of the newest reply, without the template's end of the message, which may differ
    marks = [call["function"]["arguments"]["x"] for call in views[-2].get("tool_calls", ())] or [views[-2]["content"]]
    said = newest[: newest.rfind(marks[-1]) + len(marks[-1])]
    for earlier in (asked, said):
        if not newer.startswith(earlier):
            at = common_length(earlier, newer)
            start = max(at - _BEFORE, 0)
            return earlier[start : at + _AFTER], newer[start : at + _AFTER]
    return "", ""


def how_prompts_are_made(template: ChatTemplate) -> tuple[str, str]:
    """How a format's prompts are made after the first: `copied`, `keyed`, `rendered` or `library`, and what that means
    here."""
    if not isinstance(template, JinjaTemplate):
        return "library", "the library `renderers` writes them; bridges are checked on probes"
    keys = template.source.keys
    dated = "; it shows the date: a conversation that goes on after midnight is rendered whole" if keys.dated else ""
    if keys.whole_because:
        more = (
            f" (and {len(keys.whole_because) - _MOST_REASONS} more)" if len(keys.whole_because) > _MOST_REASONS else ""
        )
        return (
            "rendered",
            f"every conversation is rendered whole at each turn: {'; '.join(keys.whole_because[:_MOST_REASONS])}{more}",
        )
    texts = ", ".join(repr(text) for text in (*keys.literals, *keys.equals))
    if texts:
        return (
            "keyed",
            f"bridges; rendered whole from the message on that has a text which the template looks for: {texts}{dated}",
        )
    return "copied", f"bridges; the template looks for nothing in contents{dated}"


def branch_rule(turns: dict[str, TurnRendering], history: str) -> str:
    """What follows from the usual turns for the rows of an episode."""
    broken = [name for name, turn in turns.items() if not turn.goes_on]
    if not broken:
        return "every usual turn continues the tape: an episode is one row"
    if history == "keep":
        return (
            "`history: keep` continues with the sampled tokens where the template shows them differently, or fails if "
            "there is no continuation"
        )
    return f"a new branch, and so another row, begins at: {', '.join(broken)}"


class Piece(Struct, frozen=True, kw_only=True):
    """A part of a row."""

    trained: bool
    """Whether its tokens have loss mask 1."""
    text: str


def masks(template: ChatTemplate) -> list[list[Piece]]:
    """The rows of a short episode, with what is trained: a question, a call with its result, an answer, another
    question, an answer.

    Reasoning and the call are left out if the format does not show or read them.

    Raises:
        EngineError: The format refuses the conversation.
    """
    calls = bool(template.calls_shown and template.reads_calls and template.knows_tool_results)
    tools = [TOOL_SCHEMA] if calls and template.knows_tools else []
    why = {"reasoning_content": "I add."} if template.knows_reasoning else {}
    call = {"type": "function", "id": "call_0_0", "function": {"name": "probe_tool", "arguments": {"count": 2}}}
    conversation = Conversation.begun(template, [Message(role="user", content="1 + 1?")], tools)
    turn = 0
    if calls and tools:
        _say(conversation, {"role": "assistant", "content": "", "tool_calls": [call], **why}, turn)
        conversation.add([Message(role="tool", content="2", name="probe_tool", tool_call_id="call_0_0")])
        turn += 1
    _say(conversation, {"role": "assistant", "content": "It is 2.", **why}, turn)
    conversation.add([Message(role="user", content="Sure?")])
    _say(conversation, {"role": "assistant", "content": "Yes.", **why}, turn + 1)
    rows = []
    for branch in conversation.branches():
        cuts = np.flatnonzero(np.diff(branch.loss_mask)) + 1
        runs = zip(np.split(branch.loss_mask, cuts), np.split(branch.input_ids, cuts), strict=True)
        rows.append([Piece(trained=bool(mask[0]), text=template.decode(ids)) for mask, ids in runs])
    return rows


def _say(conversation: Conversation, reply: View, turn: int) -> None:
    """Sample what the template writes for a reply."""
    template = conversation.template
    shown = written(template, reply)
    if shown is None:
        raise RenderError("the template does not show this reply")
    text = shown[1]
    prompt = template.decode(conversation.prompt())
    opened = "<think>\n"
    if prompt.endswith(opened) and text.startswith(opened):
        text = text[len(opened) :]
    ids = np.array([*template.encode(text), *template.stop_token_ids[:1]], np.int32)
    conversation.reply(
        Generation(
            output_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            finish=FinishReason(type="stop"),
            versions=[VersionSpan(version=0, start=0, end=len(ids))],
        ),
        turn,
    )


def plain(value: TurnRendering | Piece) -> dict[str, Any]:
    """One of the report's values as JSON has it."""
    return {"goes_on": True} if isinstance(value, TurnRendering) and value.goes_on else value.plain()
