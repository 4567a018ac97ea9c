"""One episode as a JSON document: transcript, turns, rewards, facts over time, path, branches and timings.

    document = episode_document(store, "sum-17/0")

`tokens.py` has the tokens of its branches, which are read only when they are shown.

Invariants:
- A document holds only JSON values, and no integer that JavaScript would round: such integers are texts.
- It is built from the store alone. No code of the spec is imported, so a run of a stranger can be looked at.
- An episode that is still running has the same document, built from its journal; what is not known yet is null or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from engine.plugins.show.listing.advantages import Advantages
from engine.plugins.show.listing.unfinished import partial_episode
from engine.runner.summary import branch_reasons
from engine.schemas.journal import (
    FailureRecord,
    GenerationRecord,
    JournalEntry,
    LimitRecord,
    ResetRecord,
    ScoreRecord,
    StepRecord,
    ToolsRecord,
    UserRecord,
)
from engine.schemas.message import ImagePart, Message
from engine.store.shown_messages import reply_numbers, shown_messages

if TYPE_CHECKING:
    from engine.schemas.reward import Posting, RewardEvent
    from engine.schemas.trajectory import Branch, Trajectory, Turn
    from engine.store.reader import RunReader
    from engine.store.reading import EpisodeRow

Document = dict[str, Any]
_SAFE_INTEGER = 2**53
"""JavaScript's numbers hold integers up to here."""


def plain(value: Any) -> Any:
    """Return a JSON value that every browser reads back: large integers, NaN and infinities become texts."""
    match value:
        case bool() | str() | None:
            return value
        case int():
            return value if abs(value) < _SAFE_INTEGER else str(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
    return str(value)


def episode_document(store: RunReader, episode_id: str, attempt: int | None = None) -> Document:
    """Return one episode of a run, finished or not.

    Args:
        store: The run, which may still be running.
        episode_id: The episode.
        attempt: Show the journal of this attempt, from 0, instead of the result of the newest one.

    Raises:
        StoreError: the run has no such episode or attempt, or its records are damaged.
    """
    row = store.episode(episode_id)
    journal = store.journal(episode_id, attempt)
    task = store.task(row.task_id)
    finished = row.status == "done" and attempt in (None, row.attempt)
    trajectory = store.trajectory(episode_id) if finished else partial_episode(store, row, journal)
    advantages = Advantages.of_group(store, row.task_id) if finished else Advantages.none("the episode is not finished")
    begin = journal[0].at if journal else row.started or 0.0
    return {
        "run": store.run_id,
        "episode": row.id,
        "task": {"id": task.id, "index": task.index, "fields": plain(task.fields)},
        "sample": row.sample_index,
        "seed": str(row.seed if row.seed is not None else trajectory.seed),
        "status": _status(store, row),
        "finished": finished,
        "attempt": row.attempt if attempt is None else attempt,
        "attempts": row.attempt + 1,
        "started": row.started,
        "ended": row.ended,
        "outcome": plain(trajectory.outcome.plain()) if finished else None,
        "counts": plain(trajectory.counts),
        "evaluation": store.header.evaluation,
        "messages": list(_messages(trajectory, journal)),
        "turns": [_turn(trajectory, turn, advantages) for turn in trajectory.turns],
        "credit": {"method": advantages.method, "missing": advantages.missing},
        "postings": [_posting(each) for each in trajectory.postings],
        "moves": moves(trajectory.postings),
        "facts": plain(trajectory.facts),
        "path": [_step(entry, begin, turn) for entry, turn in _with_turns(journal)],
        "branches": branch_heads(trajectory.branches),
        "branch_reasons": branch_reasons(trajectory),
        "condensations": [
            {"turn": each.turn, "reason": each.reason, "before": each.before, "after": each.after}
            for each in trajectory.condensations
        ],
    }


def _status(store: RunReader, row: EpisodeRow) -> str:
    """`running` only while its run is: an episode of a run that has ended was broken off."""
    return "broken off" if row.status == "running" and store.status != "running" else row.status


def message_document(message: Message) -> Document:
    """Return a message: its parts in order, images by digest."""
    content = message.content
    parts = [content] if isinstance(content, str) else content
    return {
        "role": message.role,
        "parts": [
            {"image": part.image, "width": part.width, "height": part.height}
            if isinstance(part, ImagePart)
            else {"text": part if isinstance(part, str) else part.text}
            for part in parts
            if part != ""
        ],
        "reasoning": message.reasoning,
        "calls": [
            {"id": call.id, "name": call.name, "arguments": plain(call.arguments)} for call in message.tool_calls
        ],
        "call": message.tool_call_id,
        "name": message.name,
    }


def _messages(trajectory: Trajectory, journal: Sequence[JournalEntry]) -> Iterator[Document]:
    """Yield the messages. `turn` is the turn of a reply and of what followed it; -1 before the first turn."""
    replies = {at: turn for turn, at in enumerate(reply_numbers(trajectory))} if trajectory.turns else {}
    results = {
        result.call_id: result
        for entry in journal
        if isinstance(entry.record, ToolsRecord)
        for result in entry.record.results
    }
    turn = -1
    for at, message in enumerate(trajectory.messages):
        turn = replies.get(at, turn)
        document = message_document(message) | {"turn": turn, "reply": at in replies}
        result = results.get(message.tool_call_id or "")
        if message.role == "tool" and result is not None:
            document |= {"error": result.error, "seconds": result.seconds}
        yield document


def _turn(trajectory: Trajectory, turn: Turn, advantages: Advantages) -> Document:
    messages, numbers = shown_messages(trajectory, turn.index)
    return {
        "index": turn.index,
        "message": numbers[-1],
        "branch": turn.branch,
        "start": turn.start,
        "end": turn.end,
        "tokens": turn.end - turn.start or turn.reply_tokens,
        "finish": turn.finish.plain(),
        "event": turn.event,
        "unreceived": turn.unreceived,
        "rewards": plain(turn.rewards),
        "advantage": advantages.of_turn(trajectory.episode_id, turn.index),
        "state_key": turn.state_key,
        "seconds": turn.seconds,
        "queue_seconds": turn.queue_seconds,
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "cost": turn.cost,
        "shown": [
            number if number >= 0 else message_document(message)
            for message, number in zip(messages[:-1], numbers[:-1], strict=True)
        ],
    }


def _posting(posting: Posting) -> Document:
    return plain(posting.plain())  # type: ignore[no-any-return]


def moves(postings: Sequence[Posting]) -> list[Document]:
    """Return who wrote or moved which reward, when and why: one entry for each `add` and `set`, and one for each transfer.

    The postings of a transfer are adjacent in the ledger, and sum to zero.
    """
    found: list[Document] = []
    moving: list[Posting] = []
    for posting in postings:
        if posting.op != "transfer":
            found.append(_move([posting], posting.delta))
            continue
        moving.append(posting)
        if abs(math.fsum(each.delta for each in moving)) < 1e-9:
            found.append(_move(moving, math.fsum(each.delta for each in moving if each.delta > 0)))
            moving = []
    if moving:
        found.append(_move(moving, math.fsum(each.delta for each in moving if each.delta > 0)))
    return found


def _move(postings: Sequence[Posting], amount: float) -> Document:
    first = postings[0]
    return {
        "op": first.op,
        "names": list(dict.fromkeys(each.name for each in postings)),
        "amount": plain(amount),
        "from": sorted({each.turn for each in postings if each.delta < 0}) if first.op == "transfer" else [],
        "to": sorted({each.turn for each in postings if each.delta > 0 or first.op != "transfer"}),
        "at_turn": first.at_turn,
        "source": first.source,
        "cause": first.cause,
        "postings": [each.seq for each in postings],
    }


def _with_turns(journal: Sequence[JournalEntry]) -> Iterator[tuple[JournalEntry, int]]:
    """Yield each journal entry with the newest assistant turn after it."""
    turn = -1
    for entry in journal:
        turn += isinstance(entry.record, GenerationRecord)
        yield entry, turn


def _step(entry: JournalEntry, begin: float, turn: int) -> Document:
    return {
        "seq": entry.seq,
        "state": entry.state,
        "event": entry.event,
        "dest": entry.dest,
        "kind": entry.record.kind,
        "turn": turn,
        "at": max(0.0, entry.at - begin),
        "seconds": entry.seconds,
        **_details(entry),
    }


def _details(entry: JournalEntry) -> Document:
    """Return what a record says besides its messages: facts, marks, rewards, causes of an end."""
    record = entry.record
    match record:
        case ResetRecord():
            return {"facts": plain(record.reset.facts)}
        case GenerationRecord():
            generation = record.generation
            return {
                "tokens": len(generation.output_ids) or generation.sampled_tokens,
                "finish": generation.finish.type,
                "queue_seconds": generation.queue_seconds,
                "generation_seconds": generation.seconds,
                "prompt_tokens": generation.prompt_tokens,
                "cached_tokens": generation.cached_tokens,
                "problem": generation.finish.message,
            }
        case ToolsRecord():
            facts = {name: value for result in record.results for name, value in result.facts.items()}
            return {
                "facts": plain(facts),
                "tools": [
                    {"name": result.name, "call": result.call_id, "error": result.error, "seconds": result.seconds}
                    for result in record.results
                ],
            }
        case UserRecord():
            said = record.turn
            return {
                "facts": plain(said.facts),
                "satisfied": said.satisfied,
                "solved": said.solved,
                "recover": said.recover,
                "canned": record.canned,
                "tokens": said.tokens,
            }
        case StepRecord():
            return {"facts": plain(record.step.facts)}
        case ScoreRecord():
            return _score(record)
        case LimitRecord():
            return {"limit": record.limit, "value": record.value}
        case FailureRecord():
            return {"failure": plain(record.failure.plain())}
        case _:
            return record.summary()


def _score(record: ScoreRecord) -> Document:
    """Return the marks, and the judge's replies each with its mark. The judge's marks are the last ones, one for each reply."""
    marks = [_mark(event) for event in record.rewards]
    own = max(0, len(marks) - len(record.replies))
    judge = [{"text": text, "mark": mark} for text, mark in zip_longest(record.replies, marks[own:])]
    return {"marks": marks[:own], "judge": judge}


def _mark(event: RewardEvent) -> Document:
    return {
        "turn": event.turn,
        "name": event.name,
        "value": event.value,
        "source": event.source,
        "cause": event.cause,
    }


def branch_heads(branches: Sequence[Branch]) -> list[Document]:
    """Return each branch without its tokens: why it began, and the token where it parts from an earlier branch."""
    heads: list[Document] = []
    for number, branch in enumerate(branches):
        shared = [(common_start(branch.input_ids, other.input_ids), other.index) for other in branches[:number]]
        token, origin = max(shared, key=lambda pair: (pair[0], -pair[1])) if shared else (0, -1)
        heads.append(
            {
                "index": branch.index,
                "reason": branch.reason,
                "tokens": len(branch.input_ids),
                "sampled": int(branch.loss_mask.sum()),
                "turns": sorted({int(turn) for turn in branch.turn_ids if turn >= 0}),
                "from": origin,
                "parts_at": token if shared else None,
                "spans": [each.plain() for each in branch.spans],
                "images": [each.plain() for each in branch.images],
            }
        )
    return heads


def common_start(first: Any, second: Any) -> int:
    """Return the number of ids that two arrays of ids, int32 [tokens], have in common from their start."""
    length = min(len(first), len(second))
    different = (first[:length] != second[:length]).nonzero()[0]
    return int(different[0]) if len(different) else length
