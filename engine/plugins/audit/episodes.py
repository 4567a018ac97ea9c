"""A row of another framework as an episode: the journal's records, and the trajectory with the row's own tokens.

Each trained run of the row is a turn. What stands between two of them are the messages of the environment's step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from engine.plugins.audit.examine import Examined
from engine.plugins.audit.files.inert import Inert
from engine.plugins.audit.rows import ForeignRow, Vector
from engine.schemas.environment import Reset, Step
from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.journal import FailureRecord, GenerationRecord, Record, ResetRecord, ScoreRecord, StepRecord
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from engine.schemas.trajectory import Branch, Failure, Span, Trajectory, Turn
from engine.storable import refusal

_EMPTY = np.empty(0, np.int32)


def records_of(row: Examined, rules: list[str]) -> deque[Record]:
    """The journal's records of a row, in order: the prompt, then each reply with the step that answers it, then the rewards.

    Args:
        row: The row.
        rules: The rules that have findings in it.
    """
    own = row.row
    found: deque[Record] = deque([ResetRecord(reset=Reset(messages=row.shown_messages, facts=_facts(own, rules)))])
    if not own.has_ids:
        text = own.response_text or ""
        reply = Generation(
            output_ids=_EMPTY,
            logprobs=np.empty(0, np.float32),
            finish=FinishReason(type=own.finish or "stop"),
            text=text,
        )
        found += [GenerationRecord(generation=reply), StepRecord(step=Step(event="done"))]
    elif not row.runs:
        message = "the row has no token with loss mask 1, so it has no turn"
        found.append(FailureRecord(failure=Failure(kind="no_trained_token", blame="backend", message=message)))
    else:
        for turn, (start, end) in enumerate(row.runs):
            last = turn + 1 == len(row.runs)
            found.append(GenerationRecord(generation=_generation(row, start, end, last)))
            answer = [] if last else _answer(row, end, row.runs[turn + 1][0])
            found.append(StepRecord(step=Step(event="done" if last else "continue", messages=answer)))
    found.append(ScoreRecord(rewards=_rewards(row)))
    return found


def next_record(records: deque[Record], state: str) -> Record:
    """The record for a state: the next one; in the final state the last one, which is the score's."""
    if state == "DONE":
        return records.pop()
    return records.popleft()


def _generation(row: Examined, start: int, end: int, last: bool) -> Generation:
    own = row.row
    ids = row.response[start:end]
    logprobs = np.zeros(len(ids), np.float32) if own.logprobs is None else np.nan_to_num(own.logprobs[start:end])
    stopped = int(ids[-1]) in row.marks.template.stop_set
    cut = last and not stopped and own.finish in ("length", "abort")
    versions = _versions_of(own)[start:end]
    return Generation(
        output_ids=np.ascontiguousarray(ids),
        logprobs=np.ascontiguousarray(logprobs, np.float32),
        finish=FinishReason(type="length" if cut else "stop", matched=int(ids[-1]) if stopped else None),
        versions=_spans(versions),
        prompt_tokens=row.start + start,
    )


def _versions_of(row: ForeignRow) -> Vector:
    """int32 [response]: the version of each token; the row's newest, or 0, where the token has none."""
    assert row.response_ids is not None
    known = max(row.row_versions, default=0)
    if row.versions is None:
        return np.full(len(row.response_ids), max(known, 0), np.int32)
    return np.where(row.versions < 0, max(known, 0), row.versions).astype(np.int32)


def _spans(versions: Vector) -> list[VersionSpan]:
    found, at = [], 0
    for version, each in groupby(versions.tolist()):
        size = len(list(each))
        found.append(VersionSpan(version=version, start=at, end=at + size))
        at += size
    return found


def _answer(row: Examined, end: int, until: int) -> list[Message]:
    """What was said between two trained runs; text without the template's form is one message of a user."""
    closing = row.marks.closing
    after = end - len(closing) if closing and row.response[:end][-len(closing) :].tolist() == closing else end
    for at in dict.fromkeys((end, after)):  # a run may end with the template's closing
        if at and int(row.response[at - 1]) in row.marks.template.stop_set:
            found = row.observations(at, until, stopped=True)
            break
    else:
        found = row.observations(end, until, stopped=False)
    if found is None or any(message.role == "assistant" for message in found):
        return [Message(role="user", content=row.text(end, until))]
    return found


def _rewards(row: Examined) -> list[RewardEvent]:
    """The row's rewards by turn. A reward on a token belongs to the newest turn that has begun there."""
    own = row.row
    turns = len(row.runs) if own.has_ids else 1
    if not turns:
        return []
    amounts = np.zeros(turns)
    if own.token_rewards is not None and own.has_ids:
        starts = np.array([start for start, _ in row.runs])
        for at in np.flatnonzero(np.nan_to_num(own.token_rewards)):
            amounts[max(int(np.searchsorted(starts, at, side="right")) - 1, 0)] += own.token_rewards[at]
    elif own.reward is not None:
        amounts[-1] = own.reward
    return [
        RewardEvent(turn=turn, value=float(amount), source="row", cause="the row's reward")
        for turn, amount in enumerate(amounts)
        if amount and np.isfinite(amount)
    ]


def _facts(row: ForeignRow, rules: list[str]) -> dict[str, Any]:
    """What is known of a row besides its tokens; values that cannot be stored are named in `left_out`."""
    fields: dict[str, Any] = {}
    left_out = []
    for key, value in row.fields.items():
        plain = _plain(value, 8)
        if plain is not _UNKNOWN and refusal({key: plain}) is None and len(repr(plain)) < 20_000:
            fields[str(key)] = plain
        else:
            left_out.append(str(key))
    return {
        "findings": rules,
        "place": row.place,
        "logprobs_known": row.logprobs is not None,
        "versions_known": row.versions is not None or bool(row.row_versions),
        **({"episode": row.trajectory} if row.trajectory else {}),
        **({"turn_rewards": list(row.turn_rewards)} if row.turn_rewards else {}),
        **({"fields": fields} if fields else {}),
        **({"left_out": left_out} if left_out else {}),
    }


_UNKNOWN = object()


def _plain(value: Any, depth: int) -> Any:
    """A value in JSON's types; `_UNKNOWN` where it has none or is nested too deeply."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Inert) or depth == 0 or (isinstance(value, list | dict) and len(value) > 10_000):
        return _UNKNOWN
    if isinstance(value, list):
        found = [_plain(item, depth - 1) for item in value]
        return _UNKNOWN if any(item is _UNKNOWN for item in found) else found
    if isinstance(value, dict):
        pairs = {str(key): _plain(item, depth - 1) for key, item in value.items()}
        return _UNKNOWN if any(item is _UNKNOWN for item in pairs.values()) else pairs
    return value if value is None or isinstance(value, str | int | float | bool) else _UNKNOWN


# --- the trajectory -------------------------------------------------------------------------------------


def branch_of(row: Examined) -> Branch:
    """The row as a branch: its ids, loss mask, log-probs and versions as they are."""
    own, size = row.row, len(row.ids)
    spans = [Span(kind="prompt", start=0, end=row.start)] if row.start else []
    at = 0
    for turn, (start, end) in enumerate(row.runs):
        if at < start:
            spans.append(Span(kind="bridge", start=row.start + at, end=row.start + start))
        spans.append(Span(kind="generated", start=row.start + start, end=row.start + end, turn=turn))
        at = end
    if at < len(row.response):
        spans.append(Span(kind="bridge", start=row.start + at, end=size))
    mask = np.zeros(size, np.int32)
    turns = np.full(size, -1, np.int32)
    for span in spans:
        if span.kind == "generated":
            mask[span.start : span.end] = 1
            turns[span.start : span.end] = span.turn
    logprobs = np.zeros(size, np.float32)
    if own.logprobs is not None:
        logprobs[row.start :] = np.where(mask[row.start :] != 0, own.logprobs, 0.0)
    versions = np.full(size, -1, np.int32)
    versions[row.start :] = np.where(mask[row.start :] != 0, _versions_of(own), -1)
    return Branch(
        index=0,
        spans=spans,
        input_ids=np.ascontiguousarray(row.ids, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        weight_versions=versions,
        turn_ids=turns,
    )


def with_own_tokens(trajectory: Trajectory, row: Examined) -> Trajectory:
    """A trajectory with the row's own tokens. It is trainable only if ids and log-probs are known and the row is not left out."""
    own = row.row
    known = own.has_ids and own.logprobs is not None and bool(np.all(np.isfinite(own.logprobs)))
    trainable = trajectory.outcome.trainable and known and not own.excluded and bool(row.runs)
    trajectory = replace(trajectory, outcome=replace(trajectory.outcome, trainable=trainable))
    if not own.has_ids:
        return trajectory
    branch = branch_of(row)
    if len(trajectory.branches) == 1 and _same_tokens(trajectory.branches[0], branch):
        branch = replace(branch, spans=trajectory.branches[0].spans)  # which tell closings from bridges
    places = [span for span in branch.spans if span.kind == "generated"]
    told = {turn.index: turn for turn in trajectory.turns}
    turns = [
        replace(told.get(at) or _silent_turn(at), branch=0, start=span.start, end=span.end)
        for at, span in enumerate(places)
    ]
    counts = trajectory.counts | {"context_tokens": len(row.ids), "sampled_tokens": int(branch.loss_mask.sum())}
    return replace(trajectory, branches=[branch], turns=turns, counts=counts)


def _same_tokens(one: Branch, other: Branch) -> bool:
    """Whether two branches have the same ids and the same turns."""
    return np.array_equal(one.input_ids, other.input_ids) and np.array_equal(one.turn_ids, other.turn_ids)


def _silent_turn(index: int) -> Turn:
    """A turn behind the place at which the row's messages could not be read."""
    return Turn(index=index, branch=0, start=0, end=0, finish=FinishReason(type="stop"), event="answered")
