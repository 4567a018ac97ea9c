"""Compares what stands between two replies of a row with what the chat template writes there, by the engine's own conversation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.errors import EngineError
from engine.plugins.audit.examine import Examined, Reply
from engine.plugins.audit.findings import Severity
from engine.schemas.generation import FinishReason, Generation
from engine.tokens.conversation import Conversation


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
