"""An episode that is not finished, as far as its journal goes.

Replies are decoded text as it was sampled: tool calls and reasoning are not taken out of it, and rewards are not known,
because both need the spec's code. No code of the spec is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.plugins.show.listing.texts import texts_of
from engine.schemas.journal import (
    GenerationRecord,
    JournalEntry,
    ResetRecord,
    StepRecord,
    ToolsRecord,
    UserRecord,
)
from engine.schemas.message import Message, ToolCall
from engine.schemas.trajectory import Outcome, Trajectory, Turn
from engine.spec.conversation import conversation_of
from engine.spec.template import fill

if TYPE_CHECKING:
    from engine.schemas.generation import Generation
    from engine.store.reader import RunReader
    from engine.store.reading import EpisodeRow


def partial_episode(store: RunReader, row: EpisodeRow, journal: Sequence[JournalEntry]) -> Trajectory:
    """Return the messages and turns that the journal holds, without branches and rewards."""
    messages: list[Message] = []
    turns: list[Turn] = []
    for entry in journal:
        record = entry.record
        match record:
            case ResetRecord():
                prompt = record.prompt if record.prompt is not None else list(_prompt(store, row.task_id))
                messages += [*prompt, *record.reset.messages]
            case GenerationRecord():
                messages.append(_reply(store, record.generation))
                turns.append(_turn(len(turns), entry))
            case ToolsRecord():
                messages += [
                    Message(role="tool", content=result.content, tool_call_id=result.call_id, name=result.name)
                    for result in record.results
                ]
            case UserRecord() if record.turn.content:
                messages.append(Message(role="user", content=record.turn.content))
            case StepRecord():
                messages += record.step.messages
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
        facts={name: value for entry in journal for name, value in _facts(entry).items()},
        path=[(entry.state, entry.event, entry.dest) for entry in journal],
    )


def _prompt(store: RunReader, task_id: str) -> Iterator[Message]:
    """Yield the spec's prompt, filled in with the task's fields; nothing if it cannot be read."""
    try:
        spec, fields = store.loaded_spec().spec, store.task(task_id).fields
        if spec.conversation is not None:
            yield from conversation_of(fields, spec.conversation)
            return
        for message in spec.messages:
            if isinstance(message.content, str):
                yield Message(role=message.role, content=fill(message.content, fields))
    except EngineError:
        return


def _reply(store: RunReader, generation: Generation) -> Message:
    if generation.text is not None:
        calls = [call for call in generation.calls if isinstance(call, ToolCall)]
        return Message(role="assistant", content=generation.text, reasoning=generation.reasoning, tool_calls=calls)
    texts = texts_of(store)
    ids = generation.output_ids.tolist()
    return Message(role="assistant", content=texts.decode(ids) or f"({len(ids)} tokens: {texts.problem})")


def _turn(index: int, entry: JournalEntry) -> Turn:
    record = entry.record
    assert isinstance(record, GenerationRecord)
    generation = record.generation
    return Turn(
        index=index,
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


def _facts(entry: JournalEntry) -> dict[str, object]:
    record = entry.record
    match record:
        case ResetRecord():
            return dict(record.reset.facts)
        case ToolsRecord():
            return {name: value for result in record.results for name, value in result.facts.items()}
        case UserRecord():
            return dict(record.turn.facts)
        case StepRecord():
            return dict(record.step.facts)
    return {}
