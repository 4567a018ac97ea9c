"""Rules about trained tokens: were they sampled, and does each reply end as it was sampled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from engine.plugins.audit.examine import Evidence, ExaminedRow, ForeignReply, SamplerRecord, first_difference
from engine.plugins.audit.findings import RowFinding, Severity


def retokenized(rows: Sequence[ExaminedRow], known: Evidence) -> Iterator[RowFinding]:
    """Sampled tokens that were decoded and encoded again.

    Proofs: the sampler's record has a reply of the same text and other ids; or a later row of an episode has the same
    text as an earlier one and other ids where that one was sampled.
    """
    episodes: dict[tuple[str, str], list[ExaminedRow]] = defaultdict(list)
    for row in rows:
        if row.foreign.trajectory:
            episodes[row.foreign.group, row.foreign.trajectory].append(row)
        for reply in row.replies if known.sampled is not None else ():
            assert known.sampled is not None
            others = known.sampled.by_text.get(row.text(reply.start, reply.end))
            if reply.ids not in known.sampled.replies and others:
                sampled = min(others)
                at = first_difference(reply.ids, sampled)
                there, here = list(sampled[at : at + 4]), list(reply.ids[at : at + 4])
                message = f"the sampler gave other ids for the same text: {there} there, {here} here "
                message += f"({row.quoted(reply.start, reply.end)})"
                yield row.finding("retokenized", "error", message, reply.start + at)
    for rows_of_episode in episodes.values():
        for earlier, later in pairwise(rows_of_episode):
            yield from _rewritten(earlier, later)


def _rewritten(earlier: ExaminedRow, later: ExaminedRow) -> Iterator[RowFinding]:
    """A later row of an episode that spells an earlier one with other ids."""
    template = earlier.marks.template
    if len(later.ids) <= 1 or not template.decode(later.ids).startswith(template.decode(earlier.ids)):
        return
    at = first_difference(earlier.ids.tolist(), later.ids.tolist())
    if at >= len(earlier.ids):
        return
    where = at - earlier.start
    if any(start <= where < end for start, end in earlier.runs):
        yield later.finding(
            "retokenized",
            "error",
            f"{earlier.foreign.place} has the same text with other ids, and sampled them: "
            f"{earlier.ids[at : at + 4].tolist()} there, "
            f"{later.ids[at : at + 4].tolist()} here",
            at,
            response=False,
        )


def observation_trained(rows: Sequence[ExaminedRow], known: Evidence) -> Iterator[RowFinding]:
    """Trained tokens that no sampling made: what follows a stop token in a trained run, and what the sampler's record
    does not have."""
    for row in rows:
        for _, beyond, until in _after_stops(row):
            if beyond < until:
                message = "trained after the stop token of a reply, where sampling had ended: "
                yield row.finding("observation_trained", "error", message + row.quoted(beyond, until), beyond)
        if known.sampled is not None:
            yield from _not_sampled(row, known.sampled)


def _not_sampled(row: ExaminedRow, sampled: SamplerRecord) -> Iterator[RowFinding]:
    """Trained runs that begin with a reply of the sampler's record, without a stop token, and go on after it; and
    replies that the record has in no form."""
    stops = row.marks.template.stop_set
    for start, end in row.runs:
        ids = tuple(row.response[start:end].tolist())
        length = 0 if ids in sampled.replies else sampled.longest_at(ids)
        if length and ids[length - 1] not in stops and ids[length] not in stops:
            message = f"trained after a reply, and not in the sampler's record: {row.quoted(start + length, end)}"
            yield row.finding("observation_trained", "error", message, start + length)
    for reply in row.replies:
        texts = {row.text(reply.start, reply.end), row.text(reply.start, reply.end - reply.stopped)}
        if not (sampled.has(reply.ids) or sampled.longest_at(reply.ids) or not texts.isdisjoint(sampled.by_text)):
            message = f"trained, and not in the sampler's record: {row.quoted(reply.start, reply.end)}"
            yield row.finding("observation_trained", "warning", message, reply.start)


def closing_trained(rows: Sequence[ExaminedRow], known: Evidence) -> Iterator[RowFinding]:
    """Trained tokens that the template writes at the end of a reply."""
    for row in rows:
        for reply, beyond, _ in _after_stops(row):
            if reply.end < beyond:
                message = f"the template's text after a reply is trained: {row.quoted(reply.end, beyond)}"
                yield row.finding("closing_trained", "error", message, reply.end)
        for reply in row.replies if known.sampled is not None else ():
            assert known.sampled is not None
            if reply.stopped and _stop_was_added(row, reply, known.sampled):
                message = "the stop token after a reply is trained, and the sampler's record does not have it: "
                message += row.quoted(reply.end - 1, reply.end)
                yield row.finding("closing_trained", "error", message, reply.end - 1)
        if known.sampled is None and row.foreign.finish == "length" and row.replies:
            last = row.replies[-1]
            if last.stopped and last.end == len(row.response):
                message = (
                    "the row says that its last reply was cut at the length limit, and its last trained token is a "
                    "stop token, which was then added"
                )
                yield row.finding("closing_trained", "error", message, last.end - 1)


def _stop_was_added(row: ExaminedRow, reply: ForeignReply, sampled: SamplerRecord) -> bool:
    """Whether the record has a reply without its stop token, by ids or by text, and none with it."""
    if reply.ids in sampled.replies:
        return False
    without, text = row.text(reply.start, reply.end - 1), row.text(reply.start, reply.end)
    return reply.ids[:-1] in sampled.replies or (without in sampled.by_text and text not in sampled.by_text)


def _after_stops(row: ExaminedRow) -> Iterator[tuple[ForeignReply, int, int]]:
    """Replies with a stop token that the trained run goes on after: the reply, where the tokens beyond the template's
    closing begin, and where the next reply begins or the run ends."""
    closing = row.marks.closing
    for at, reply in enumerate(row.replies):
        if not reply.stopped or reply.end == reply.run_end:
            continue
        following = row.replies[at + 1].start if at + 1 < len(row.replies) else reply.run_end
        until = min(following, reply.run_end)
        shared = 0
        while (
            shared < min(len(closing), until - reply.end) and int(row.response[reply.end + shared]) == closing[shared]
        ):
            shared += 1
        yield reply, reply.end + shared, until


def missing_eos(rows: Sequence[ExaminedRow], known: Evidence) -> Iterator[RowFinding]:
    """Replies that ended by themselves and whose stop token is not trained, or is not there."""
    longest = max((len(row.response) for row in rows), default=0)
    for row in rows:
        for reply in row.replies:
            if reply.stopped or (known.stops and row.text(reply.start, reply.end).endswith(known.stops)):
                continue
            judged = _unstopped(row, reply, longest) if known.sampled is None else _stop_lost(row, reply, known.sampled)
            if judged is not None:
                severity, message = judged
                yield row.finding("missing_eos", severity, message, min(reply.end, len(row.response) - 1))


def _stop_lost(row: ExaminedRow, reply: ForeignReply, sampled: SamplerRecord) -> tuple[Severity, str] | None:
    """Judge a reply without a stop token by the sampler's record."""
    if not any((*reply.ids, stop) in sampled.replies for stop in row.marks.template.stop_set):
        return None
    there = reply.end < len(row.response) and int(row.response[reply.end]) in row.marks.template.stop_set
    where = "has loss mask 0" if there else "is not in the row"
    return "error", f"the sampler gave a stop token at the end of this reply, which {where}"


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
