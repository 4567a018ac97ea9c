"""The rule about prompts: is what the model was shown what the chat template renders, at the beginning and between two
replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from engine.errors import EngineError
from engine.plugins.audit.examine import Evidence, ExaminedRow, ForeignReply, first_difference
from engine.plugins.audit.findings import RowFinding, Severity
from engine.schemas.generation import FinishReason, Generation
from engine.tokens.conversation import Conversation


def prompt_not_template(rows: Sequence[ExaminedRow], known: Evidence) -> Iterator[RowFinding]:
    """Prompts that are not what the chat template renders: the first one, and what stands between two replies."""
    for row in rows:
        assert row.foreign.prompt_ids is not None
        if not row.prompt_is_rendered:
            at, what = _prompt_difference(row)
            yield row.finding("prompt_not_template", "warning", what, at, response=False)
        if len(row.replies) > 1 and (finding := _bridge_finding(row)) is not None:
            yield finding


def _prompt_difference(row: ExaminedRow) -> tuple[int | None, str]:
    """The first token at which a prompt differs from what the template renders, and the words."""
    assert row.foreign.prompt_ids is not None
    messages = row.messages or row.marks.likely(row.foreign.prompt_ids)
    if messages is None:
        return 0, "the prompt has no form that the chat template writes for any messages"
    try:
        rendered = row.marks.template.render(messages)
    except EngineError as error:
        return None, f"the chat template refuses the prompt's messages: {error}"
    ids = row.foreign.prompt_ids.tolist()
    at = first_difference(ids, rendered)
    decode = row.marks.template.decode
    here, there = decode(ids[at : at + 8]), decode(rendered[at : at + 8])
    whose = "the row's messages" if row.messages else "the messages that it spells"
    return (
        at,
        f"for {whose} the template renders {there!r} ({len(rendered)} tokens), and the prompt has {here!r} ({len(ids)} "
        "tokens)",
    )


def _bridge_finding(row: ExaminedRow) -> RowFinding | None:
    """The first difference between what stands between two replies and what the template writes there, by the engine's
    own conversation."""
    try:
        conversation = Conversation.begun(row.marks.template, row.shown_messages)
        for turn, (reply, following) in enumerate(pairwise(row.replies)):
            difference = _between(conversation, row, turn, reply, following)
            if difference is not None:
                severity, message, at = difference
                return row.finding("prompt_not_template", severity, message, reply.end + at)
    except (EngineError, ValueError) as error:  # a row can hold what no conversation can
        message = f"the chat template refuses this conversation: {error}"
        return row.finding("prompt_not_template", "warning", message, row.replies[0].end)
    return None


def _between(
    conversation: Conversation, row: ExaminedRow, turn: int, reply: ForeignReply, following: ForeignReply
) -> tuple[Severity, str, int] | None:
    """Severity, message and place, counted from the end of the reply; None where there is no difference."""
    asked = conversation.prompt()
    ids = row.response[reply.start : reply.end]
    finish = FinishReason(type="stop" if reply.stopped else "length")
    conversation.reply(Generation(output_ids=ids, logprobs=np.zeros(len(ids), np.float32), finish=finish), turn=turn)
    tape = np.concatenate([asked, ids])
    here = row.response[reply.end : following.start]
    messages = row.observations(reply.end, following.start, stopped=reply.stopped)
    decode = row.marks.template.decode
    if messages is None:
        shown = _short(decode(here))
        if not reply.stopped and not row.marks.has_mark(here):
            return "info", f"text was put inside a reply, without a message of its own: {shown}", 0
        return (
            "warning",
            f"what stands between two replies is not what the template writes for any messages: {shown}",
            0,
        )
    conversation.add(messages)
    prompt = conversation.prompt()
    if not np.array_equal(prompt[: len(tape)], tape):
        message = (
            "the template renders this history otherwise than it was sampled; the row goes on with the sampled tokens"
        )
        return "info", message, 0
    there = prompt[len(tape) :]
    if np.array_equal(here, there):
        return None
    message = f"between two replies the template writes {_short(decode(there))}, and the row has {_short(decode(here))}"
    return "warning", message, first_difference(here, there)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:50]}…{text[-29:]}")
