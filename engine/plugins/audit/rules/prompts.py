"""The rule about prompts: is what the model was shown what the chat template renders, at the beginning and between two replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.errors import EngineError
from engine.plugins.audit.examine import Examined, Reply
from engine.plugins.audit.findings import Finding, Severity
from engine.plugins.audit.rules.base import Evidence, finding_of, first_difference
from engine.schemas.generation import FinishReason, Generation
from engine.tokens.conversation import Conversation


def prompt_not_template(rows: Sequence[Examined], known: Evidence) -> Iterator[Finding]:
    """Prompts that are not what the chat template renders: the first one, and what stands between two replies."""
    for row in rows:
        assert row.row.prompt_ids is not None
        if not row.prompt_is_rendered:
            at, what = _prompt_difference(row)
            yield finding_of("prompt_not_template", "warning", row, what, at, response=False)
        for difference in bridge_differences(row):
            yield finding_of("prompt_not_template", difference.severity, row, difference.message, difference.token)


def _prompt_difference(row: Examined) -> tuple[int | None, str]:
    """The first token at which a prompt differs from what the template renders, and the words."""
    assert row.row.prompt_ids is not None
    messages = row.messages or row.marks.likely(row.row.prompt_ids)
    if messages is None:
        return 0, "the prompt has no form that the chat template writes for any messages"
    try:
        rendered = row.marks.template.render(messages)
    except EngineError as error:
        return None, f"the chat template refuses the prompt's messages: {error}"
    ids = row.row.prompt_ids.tolist()
    at = first_difference(ids, rendered)
    decode = row.marks.template.decode
    here, there = decode(ids[at : at + 8]), decode(rendered[at : at + 8])
    whose = "the row's messages" if row.messages else "the messages that it spells"
    return (
        at,
        f"for {whose} the template renders {there!r} ({len(rendered)} tokens), and the prompt has {here!r} ({len(ids)} tokens)",
    )


class Difference(NamedTuple):
    """A place at which a row differs from the template."""

    token: int
    """Counted in the response."""
    severity: Severity
    message: str


def bridge_differences(row: Examined) -> Iterator[Difference]:
    """Yield the first difference between two replies of a row, if there is one."""
    pairs = list(pairwise(row.replies))
    if not pairs:
        return
    try:
        conversation = Conversation.begun(row.marks.template, row.shown_messages)
        for turn, (reply, following) in enumerate(pairs):
            found = _between(conversation, row, turn, reply, following)
            if found is not None:
                yield found
                return
    except (EngineError, ValueError) as error:  # a row can hold what no conversation can
        yield Difference(pairs[0][0].end, "warning", f"the chat template refuses this conversation: {error}")


def _between(conversation: Conversation, row: Examined, turn: int, reply: Reply, following: Reply) -> Difference | None:
    asked = conversation.prompt()
    ids = row.response[reply.start : reply.end]
    finish = FinishReason(type="stop" if reply.stopped else "length")
    conversation.reply(Generation(output_ids=ids, logprobs=np.zeros(len(ids), np.float32), finish=finish), turn=turn)
    tape = np.concatenate([asked, ids])
    here = row.response[reply.end : following.start]
    messages = row.observations(reply.end, following.start, stopped=reply.stopped)
    if messages is None and not reply.stopped and not row.marks.has_mark(here):
        said = _short(row.text(reply.end, following.start))
        return Difference(reply.end, "info", f"text was put inside a reply, without a message of its own: {said}")
    if messages is None:
        return Difference(
            reply.end,
            "warning",
            f"what stands between two replies is not what the template writes for any messages: {_short(row.text(reply.end, following.start))}",
        )
    conversation.add(messages)
    prompt = conversation.prompt()
    if not np.array_equal(prompt[: len(tape)], tape):
        return Difference(
            reply.end,
            "info",
            "the template renders this history otherwise than it was sampled; the row goes on with the sampled tokens",
        )
    there = prompt[len(tape) :]
    if np.array_equal(here, there):
        return None
    size = min(len(here), len(there))
    differs = np.flatnonzero(here[:size] != there[:size])
    at = int(differs[0]) if len(differs) else size
    decode = row.marks.template.decode
    return Difference(
        reply.end + at,
        "warning",
        f"between two replies the template writes {_short(decode(there))}, and the row has {_short(decode(here))}",
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:50]}…{text[-29:]}")
