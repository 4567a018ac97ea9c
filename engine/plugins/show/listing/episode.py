"""One episode as a JSON document: transcript, turns, rewards, facts over time, path, branches and timings.

    document = episode_document(store, "sum-17/0")

`tokens.py` has the tokens of its branches, which are read only when they are shown.

Invariants:
- A document holds only JSON values, and no integer that JavaScript would round: such integers are texts.
- It is built from the store alone. No code of the spec is imported, so a run of a stranger can be looked at.
- An episode that is still running has the same document, built from its journal (`partial_episode`); what is not known
  yet is null or empty. Its replies are decoded text as it was sampled: tool calls and reasoning are not taken out of
  it, and rewards are not known, because both need the spec's code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from engine.plugins.show.listing.rows import status_word
from engine.plugins.show.listing.tokens import UNFINISHED, Advantages, texts_of
from engine.runner.summary import branch_reasons
from engine.schemas.journal import (
    FailureRecord,
    GenerationRecord,
    JournalEntry,
    LimitRecord,
    RecordBase,
    ResetRecord,
    ScoreRecord,
    StepRecord,
    ToolsRecord,
    UserRecord,
)
from engine.schemas.message import ImagePart, Message, ToolCall
from engine.schemas.trajectory import Outcome, Trajectory, Turn
from engine.spec.conversation import conversation_of
from engine.spec.template import fill
from engine.store.reviews import REVIEWS
from engine.store.shown_messages import reply_numbers, shown_messages

if TYPE_CHECKING:
    from engine.schemas.generation import Generation
    from engine.schemas.reward import Posting
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
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
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
    advantages = Advantages.of_group(store, row.task_id) if finished else Advantages(missing=UNFINISHED)
    return {
        "run": store.run_id,
        "episode": row.id,
        "task": {"id": task.id, "index": task.index, "fields": plain(task.fields)},
        "sample": row.sample_index,
        "seed": str(row.seed if row.seed is not None else trajectory.seed),
        "status": status_word(row.status, store.status),
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
        "postings": [plain(posting.plain()) for posting in trajectory.postings],
        "moves": [move_document(postings) for postings in moves(trajectory.postings)],
        "facts": plain(trajectory.facts),
        "reviews": [plain(review) for reviews in REVIEWS.made(None, store.folder) for review in reviews.of(row.id)],
        "path": _path(journal, journal[0].at if journal else row.started or 0.0),
        "branches": branch_heads(trajectory.branches),
        "branch_reasons": branch_reasons(trajectory),
        "condensations": [
            {
                "turn": condensation.turn,
                "reason": condensation.reason,
                "before": condensation.before,
                "after": condensation.after,
            }
            for condensation in trajectory.condensations
        ],
    }


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


def moves(postings: Sequence[Posting]) -> Iterator[list[Posting]]:
    """Yield the postings of posting `add` and `set`, and those of posting transfer: they are adjacent in the ledger,
    and sum to zero."""
    moving: list[Posting] = []
    for posting in postings:
        if posting.op != "transfer":
            yield [posting]
            continue
        moving.append(posting)
        if abs(math.fsum(posting.delta for posting in moving)) < 1e-9:
            yield moving
            moving = []
    if moving:
        yield moving


def move_document(postings: Sequence[Posting]) -> Document:
    """Who wrote or moved which reward, when and why."""
    first = postings[0]
    transfer = first.op == "transfer"
    return {
        "op": first.op,
        "names": list(dict.fromkeys(posting.name for posting in postings)),
        "amount": plain(
            math.fsum(posting.delta for posting in postings if posting.delta > 0) if transfer else first.delta
        ),
        "from": sorted({posting.turn for posting in postings if posting.delta < 0}) if transfer else [],
        "to": sorted({posting.turn for posting in postings if posting.delta > 0 or not transfer}),
        "at_turn": first.at_turn,
        "source": first.source,
        "cause": first.cause,
        "postings": [posting.seq for posting in postings],
    }


def _path(journal: Sequence[JournalEntry], begin: float) -> list[Document]:
    """The steps of an episode. `turn` is the newest assistant turn after a step, `at` the seconds since the episode
    began."""
    steps, turn = [], -1
    for entry in journal:
        turn += isinstance(entry.record, GenerationRecord)
        steps.append(
            {
                "seq": entry.seq,
                "state": entry.state,
                "event": entry.event,
                "dest": entry.dest,
                "kind": entry.record.kind,
                "turn": turn,
                "at": max(0.0, entry.at - begin),
                "seconds": entry.seconds,
            }
            | plain(_details(entry.record))
        )
    return steps


def _details(record: RecordBase) -> Document:
    """Return what a record says besides its messages: facts, marks, rewards, causes of an end."""
    match record:
        case ResetRecord():
            return {"facts": record.reset.facts}
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
            return {
                "facts": {name: value for result in record.results for name, value in result.facts.items()},
                "tools": [
                    {"name": result.name, "call": result.call_id, "error": result.error, "seconds": result.seconds}
                    for result in record.results
                ],
            }
        case UserRecord():
            turn = record.turn
            return {
                "facts": turn.facts,
                "satisfied": turn.satisfied,
                "solved": turn.solved,
                "recover": turn.recover,
                "canned": record.canned,
                "tokens": turn.tokens,
            }
        case StepRecord():
            return {"facts": record.step.facts}
        case ScoreRecord():  # the judge's marks are the last ones, one for each of its replies
            marks = [
                {name: getattr(event, name) for name in ("turn", "name", "value", "source", "cause")}
                for event in record.rewards
            ]
            others = max(0, len(marks) - len(record.replies))
            return {
                "marks": marks[:others],
                "judge": [{"text": text, "mark": mark} for text, mark in zip_longest(record.replies, marks[others:])],
            }
        case LimitRecord():
            return {"limit": record.limit, "value": record.value}
        case FailureRecord():
            return {"failure": record.failure.plain()}
        case _:
            return record.summary()


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
                "spans": [span.plain() for span in branch.spans],
                "images": [image.plain() for image in branch.images],
            }
        )
    return heads


def common_start(first: Any, second: Any) -> int:
    """Return the number of ids that two arrays of ids, int32 [tokens], have in common from their start."""
    length = min(len(first), len(second))
    different = (first[:length] != second[:length]).nonzero()[0]
    return int(different[0]) if len(different) else length


def partial_episode(store: RunReader, row: EpisodeRow, journal: Sequence[JournalEntry]) -> Trajectory:
    """Return the messages and turns that the journal holds, without branches and rewards."""
    messages: list[Message] = []
    turns: list[Turn] = []
    for entry in journal:
        record = entry.record
        match record:
            case ResetRecord():
                prompt = record.prompt if record.prompt is not None else _prompt(store, row.task_id)
                messages += [*prompt, *record.reset.messages]
            case GenerationRecord():
                messages.append(_reply(store, record.generation))
                generation = record.generation
                turns.append(
                    Turn(
                        index=len(turns),
                        branch=-1,
                        start=0,
                        end=len(generation.output_ids),
                        finish=generation.finish,
                        event=entry.event,
                        seconds=generation.seconds,
                        queue_seconds=generation.queue_seconds,
                        prompt_tokens=generation.prompt_tokens,
                        cached_tokens=generation.cached_tokens,
                        reply_tokens=generation.sampled_tokens,
                        cost=generation.cost,
                    )
                )
            case _:
                messages += record.said()
    last = journal[-1] if journal else None
    return Trajectory(
        run_id=store.run_id,
        episode_id=row.id,
        task_id=row.task_id,
        sample_index=row.sample_index,
        seed=row.seed or 0,
        history="branch",
        outcome=Outcome(state=last.dest if last else "", event=last.event if last else "", trainable=False),
        messages=messages,
        turns=turns,
        branches=[],
        facts={name: value for entry in journal for name, value in _details(entry.record).get("facts", {}).items()},
        path=[(entry.state, entry.event, entry.dest) for entry in journal],
    )


def _prompt(store: RunReader, task_id: str) -> list[Message]:
    """The spec's prompt, filled in with the task's fields; empty if it cannot be read."""
    try:
        spec, fields = store.loaded_spec().spec, store.task(task_id).fields
        if spec.conversation is not None:
            return list(conversation_of(fields, spec.conversation))
        return [
            Message(role=message.role, content=fill(message.content, fields))
            for message in spec.messages
            if isinstance(message.content, str)
        ]
    except EngineError:
        return []


def _reply(store: RunReader, generation: Generation) -> Message:
    if generation.text is not None:
        return Message(
            role="assistant",
            content=generation.text,
            reasoning=generation.reasoning,
            tool_calls=[call for call in generation.calls if isinstance(call, ToolCall)],
        )
    texts = texts_of(store)
    ids = generation.output_ids.tolist()
    return Message(role="assistant", content=texts.decode(ids) or f"({len(ids)} tokens: {texts.problem})")
