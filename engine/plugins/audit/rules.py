"""The rules of an audit: one small function each, and one entry in `RULES`.

A function gets all rows that it can judge, and the sampler's own record where there is one, and yields findings. What
a rule needs of a row is declared in its entry, and rows without it are counted as not judged, with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from math import isfinite
from typing import Literal

import numpy as np

from engine.errors import EngineError
from engine.plugins.audit.examine import (
    ExaminedRow,
    ForeignReply,
    RowFinding,
    SamplerRecord,
    Severity,
)
from engine.schemas.generation import FinishReason, Generation
from engine.tokens.bridge.wrapper import common_length
from engine.tokens.conversation import Conversation


def retokenized(rows: Sequence[ExaminedRow], sampled: SamplerRecord | None) -> Iterator[RowFinding]:
    """Sampled tokens that were decoded and encoded again.

    Proofs: the sampler's record has a reply of the same text and other ids; or a later row of an episode has the same
    text as an earlier one and other ids where that one was sampled.
    """
    episodes: dict[tuple[str, str], list[ExaminedRow]] = defaultdict(list)
    for row in rows:
        if row.foreign.trajectory:
            episodes[row.foreign.group, row.foreign.trajectory].append(row)
        if sampled is None:
            continue
        for reply in row.replies:
            others = sampled.by_text.get(row.text(reply.start, reply.end))
            if reply.ids not in sampled.replies and others:
                recorded = min(others)
                at = common_length(reply.ids, recorded)
                there, here = list(recorded[at : at + 4]), list(reply.ids[at : at + 4])
                message = f"the sampler gave other ids for the same text: {there} there, {here} here "
                message += f"({row.quoted(reply.start, reply.end)})"
                yield row.finding("retokenized", "error", message, reply.start + at)
    for earlier, later in chain.from_iterable(map(pairwise, episodes.values())):
        decode = earlier.marks.template.decode
        if len(later.ids) <= 1 or not decode(later.ids).startswith(decode(earlier.ids)):
            continue
        at = common_length(earlier.ids.tolist(), later.ids.tolist())
        if any(start <= at - earlier.start < end for start, end in earlier.runs):
            there, here = earlier.ids[at : at + 4].tolist(), later.ids[at : at + 4].tolist()
            message = f"{earlier.foreign.place} has the same text with other ids, and sampled them: {there} there, "
            yield later.finding("retokenized", "error", f"{message}{here} here", at, response=False)


def observation_trained(rows: Sequence[ExaminedRow], sampled: SamplerRecord | None) -> Iterator[RowFinding]:
    """Trained tokens that no sampling made: what follows a stop token in a trained run, and what the sampler's record
    does not have."""
    for row in rows:
        for _, beyond, until in _after_stops(row):
            if beyond < until:
                yield row.finding(
                    "observation_trained",
                    "error",
                    "trained after the stop token of a reply, where sampling had ended: " + row.quoted(beyond, until),
                    beyond,
                )
        if sampled is None:
            continue
        # runs that begin with a reply of the record, without a stop token, and go on after it
        stops = row.marks.template.stop_set
        for start, end in row.runs:
            ids = tuple(row.response[start:end].tolist())
            length = 0 if ids in sampled.replies else sampled.longest_at(ids)
            if length and ids[length - 1] not in stops and ids[length] not in stops:
                yield row.finding(
                    "observation_trained",
                    "error",
                    f"trained after a reply, and not in the sampler's record: {row.quoted(start + length, end)}",
                    start + length,
                )
        for reply in row.replies:  # those that the record has in no form
            texts = {row.text(reply.start, reply.end), row.text(reply.start, reply.end - reply.stopped)}
            if not (sampled.has(reply.ids) or sampled.longest_at(reply.ids) or not texts.isdisjoint(sampled.by_text)):
                yield row.finding(
                    "observation_trained",
                    "warning",
                    f"trained, and not in the sampler's record: {row.quoted(reply.start, reply.end)}",
                    reply.start,
                )


def closing_trained(rows: Sequence[ExaminedRow], sampled: SamplerRecord | None) -> Iterator[RowFinding]:
    """Trained tokens that the template writes at the end of a reply."""
    for row in rows:
        for reply, beyond, _ in _after_stops(row):
            if reply.end < beyond:
                yield row.finding(
                    "closing_trained",
                    "error",
                    f"the template's text after a reply is trained: {row.quoted(reply.end, beyond)}",
                    reply.end,
                )
        if sampled is None:
            last = row.replies[-1] if row.foreign.finish == "length" and row.replies else None
            if last is not None and last.stopped and last.end == len(row.response):
                yield row.finding(
                    "closing_trained",
                    "error",
                    "the row says that its last reply was cut at the length limit, and its last trained token is a "
                    "stop token, which was then added",
                    last.end - 1,
                )
            continue
        for reply in row.replies:
            if not reply.stopped or reply.ids in sampled.replies:
                continue
            without, text = row.text(reply.start, reply.end - 1), row.text(reply.start, reply.end)
            by_text = without in sampled.by_text and text not in sampled.by_text
            if reply.ids[:-1] in sampled.replies or by_text:
                message = "the stop token after a reply is trained, and the sampler's record does not have it: "
                message += row.quoted(reply.end - 1, reply.end)
                yield row.finding("closing_trained", "error", message, reply.end - 1)


def _after_stops(row: ExaminedRow) -> Iterator[tuple[ForeignReply, int, int]]:
    """Replies with a stop token that the trained run goes on after: the reply, where the tokens beyond the template's
    closing begin, and where the next reply begins or the run ends."""
    closing = row.marks.closing
    for at, reply in enumerate(row.replies):
        if not reply.stopped or reply.end == reply.run_end:
            continue
        following = row.replies[at + 1].start if at + 1 < len(row.replies) else reply.run_end
        until = min(following, reply.run_end)
        yield reply, reply.end + common_length(closing, row.response[reply.end : until]), until


def missing_eos(rows: Sequence[ExaminedRow], sampled: SamplerRecord | None) -> Iterator[RowFinding]:
    """Replies that ended by themselves and whose stop token is not trained, or is not there."""
    longest = max((len(row.response) for row in rows), default=0)
    for row in rows:
        for reply in row.replies:
            if reply.stopped or (row.marks.texts and row.text(reply.start, reply.end).endswith(row.marks.texts)):
                continue
            judged = None
            if sampled is None:
                judged = _unstopped(row, reply, longest)
            elif any((*reply.ids, stop) in sampled.replies for stop in row.marks.template.stop_set):
                there = reply.end < len(row.response) and int(row.response[reply.end]) in row.marks.template.stop_set
                where = "has loss mask 0" if there else "is not in the row"
                judged = "error", f"the sampler gave a stop token at the end of this reply, which {where}"
            if judged is not None:
                yield row.finding("missing_eos", *judged, min(reply.end, len(row.response) - 1))


def _unstopped(row: ExaminedRow, reply: ForeignReply, longest: int) -> tuple[Severity, str] | None:
    """Judge a reply without a stop token by the row alone."""
    if reply.end == len(row.response):
        if row.foreign.finish == "stop":
            return "error", "the last reply ended by itself, and its stop token is not in the row"
        if row.foreign.finish is None and len(row.response) < longest:
            message = "the last reply has no stop token; nothing says that it was cut, and the longest response has "
            return "warning", f"{message}{longest} tokens"
        return None
    if int(row.response[reply.end]) in row.marks.template.stop_set:
        quoted = row.quoted(reply.start, reply.end)
        return "warning", f"the stop token after a reply is in the row with loss mask 0: {quoted}"
    following = next((start for start, _ in row.runs if start >= reply.end), len(row.response))
    if not row.marks.has_mark(row.response[reply.end : following]):
        return None  # text inside a reply, which goes on behind it
    quoted = row.quoted(max(reply.start, reply.end - 4), reply.end + 4)
    return "warning", f"a reply goes over into other tokens without a stop token: {quoted}"


def prompt_not_template(rows: Sequence[ExaminedRow], sampled: SamplerRecord | None) -> Iterator[RowFinding]:
    """Prompts that are not what the chat template renders: the first one, and the first text between two replies that
    the template would not write there, by the engine's own conversation."""
    for row in rows:
        assert row.foreign.prompt_ids is not None
        written = row.messages is not None and any(row.marks.renders(row.messages, ids) for ids in row.prompts)
        if not written and row.read_prompt is None:
            at, what = _prompt_difference(row)
            yield row.finding("prompt_not_template", "warning", what, at, response=False)
        if len(row.replies) < 2:
            continue
        try:
            conversation = Conversation.begun(row.marks.template, row.shown_messages)
            for turn, (reply, following) in enumerate(pairwise(row.replies)):
                difference = _between(conversation, row, turn, reply, following)
                if difference is not None:
                    severity, message, at = difference
                    yield row.finding("prompt_not_template", severity, message, reply.end + at)
                    break
        except (EngineError, ValueError) as error:  # a row can hold what no conversation can
            yield row.finding(
                "prompt_not_template",
                "warning",
                f"the chat template refuses this conversation: {error}",
                row.replies[0].end,
            )


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
    at = common_length(ids, rendered)
    decode = row.marks.template.decode
    here, there = decode(ids[at : at + 8]), decode(rendered[at : at + 8])
    whose = "the row's messages" if row.messages else "the messages that it spells"
    return (
        at,
        f"for {whose} the template renders {there!r} ({len(rendered)} tokens), and the prompt has {here!r} ({len(ids)} "
        "tokens)",
    )


def _between(
    conversation: Conversation, row: ExaminedRow, turn: int, reply: ForeignReply, following: ForeignReply
) -> tuple[Severity, str, int] | None:
    """Severity, message and place, counted from the end of the reply; None where there is no difference."""
    asked = conversation.prompt()
    ids = row.response[reply.start : reply.end]
    conversation.reply(
        Generation(
            output_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            finish=FinishReason(type="stop" if reply.stopped else "length"),
        ),
        turn=turn,
    )
    tape = np.concatenate([asked, ids])
    here = row.response[reply.end : following.start]
    messages = row.marks.observations(here, stopped=reply.stopped)
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
    return "warning", message, common_length(here, there)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:50]}…{text[-29:]}")


def reward_unseen(rows: Sequence[ExaminedRow], sampled: SamplerRecord | None) -> Iterator[RowFinding]:
    """Rewards that reach no trained token."""
    for row in rows:
        foreign = row.foreign
        if foreign.reward is not None and not isfinite(foreign.reward):
            yield row.finding("reward_unseen", "error", f"the reward is {foreign.reward}")
            continue
        if foreign.has_ids and foreign.reward and not row.runs:
            yield row.finding(
                "reward_unseen", "error", f"the reward {foreign.reward:g} belongs to a row without a trained token"
            )
        elif foreign.excluded and foreign.reward:
            yield row.finding(
                "reward_unseen",
                "warning",
                f"the row has the reward {foreign.reward:g} and is marked to be left out of the loss",
            )
        elif foreign.token_rewards is not None:
            places = np.flatnonzero((foreign.token_rewards != 0) & (foreign.mask == 0))
            if len(places):
                at = int(places[0])
                yield row.finding(
                    "reward_unseen",
                    "warning",
                    f"{len(places)} rewards by token are on tokens with loss mask 0, the first of "
                    f"{foreign.token_rewards[at]:g}: a sum over the row "
                    "has it, an estimator that goes from token to token leaves it out",
                    at,
                )
        if len(foreign.turn_rewards) > 1 and any(foreign.turn_rewards):
            listed = ", ".join(f"{value:g}" for value in foreign.turn_rewards[:6])
            yield row.finding(
                "reward_unseen",
                "warning",
                f"rewards by turn ({listed}) are in a field beside the tokens; the reward that is trained is "
                f"{foreign.reward}",
            )


def mixed_group(rows: Sequence[ExaminedRow], sampled: SamplerRecord | None) -> Iterator[RowFinding]:
    """Groups whose rows begin with other prompts or belong to other tasks, so that their rewards are no baseline for
    each other."""
    groups: dict[str, dict[str, ExaminedRow]] = defaultdict(dict)
    for row in rows:
        groups[row.foreign.group].setdefault(row.foreign.trajectory or f"row {row.index}", row)
    for name, members in groups.items():
        first, *others = members.values()
        for row in others:
            foreign = (row.foreign, first.foreign)
            here, there = (one.prompt_text if one.prompt_ids is None else one.prompt_ids.tobytes() for one in foreign)
            if here != there:
                prompts = [one.prompt_ids for one in foreign if one.prompt_ids is not None]
                yield row.finding(
                    "mixed_group",
                    "error",
                    f"group {name} begins with another prompt in {first.foreign.place}",
                    common_length(*prompts) if len(prompts) == 2 else None,
                    response=False,
                )
                continue
            label, expected = row.foreign.label, first.foreign.label
            if label is not None and expected is not None and str(label) != str(expected):
                yield row.finding(
                    "mixed_group",
                    "error",
                    f"group {name} has the answer {expected!r} in {first.foreign.place} and {label!r} here, with the "
                    "same prompt",
                )


def no_versions(rows: Sequence[ExaminedRow], sampled: SamplerRecord | None) -> Iterator[RowFinding]:
    """Trained tokens whose weight version is not known."""
    without = [row for row in rows if row.foreign.versions is None and not row.foreign.row_versions]
    if without and len(without) == len(rows):
        yield RowFinding(
            rule="no_versions",
            severity="info",
            row=-1,
            place="all rows",
            message="no row names the weight version that sampled it",
        )
        return
    for row in without:
        yield row.finding("no_versions", "warning", "this row names no weight version, and others do")
    for row in rows:
        versions = sorted(set(row.foreign.row_versions))
        if row.foreign.versions is None and len(versions) > 1:
            yield row.finding(
                "no_versions",
                "warning",
                f"tokens of the versions {versions[0]} to {versions[-1]} are in one row, and no token says which",
            )
        elif row.foreign.versions is not None:
            places = np.flatnonzero((row.foreign.versions < 0) & (row.foreign.mask != 0))
            if len(places):
                yield row.finding(
                    "no_versions", "warning", f"{len(places)} trained tokens have no weight version", int(places[0])
                )


Need = Literal["ids", "no images", "reward", "group"]
_REASONS: Mapping[Need, str] = {
    "ids": "the row holds only texts",
    "no images": "the row has images",
    "reward": "the row has no reward",
    "group": "the row names no group",
}
RULES: Mapping[
    str, tuple[Callable[[Sequence[ExaminedRow], SamplerRecord | None], Iterator[RowFinding]], tuple[Need, ...]]
] = {
    "retokenized": (retokenized, ("ids",)),
    "observation_trained": (observation_trained, ("ids",)),
    "closing_trained": (closing_trained, ("ids",)),
    "missing_eos": (missing_eos, ("ids",)),
    "prompt_not_template": (prompt_not_template, ("ids", "no images")),
    "reward_unseen": (reward_unseen, ("reward",)),
    "mixed_group": (mixed_group, ("group",)),
    "no_versions": (no_versions, ()),
}
"""The rules by name, each with what it needs of a row; findings of a row are listed in this order."""


def lacks(row: ExaminedRow, needs: Iterable[Need]) -> str | None:
    """Why a row cannot be judged by a rule with these needs; None if it can."""
    foreign = row.foreign
    met: dict[Need, bool] = {
        "ids": foreign.has_ids,
        "no images": not foreign.images,
        "reward": foreign.reward is not None or bool(foreign.turn_rewards),
        "group": bool(foreign.group),
    }
    return next((_REASONS[need] for need in needs if not met[need]), None)
