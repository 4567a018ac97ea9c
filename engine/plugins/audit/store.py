"""Writes the rows of another framework into a run store, one episode for each row.

    folder = asyncio.run(store_rows(examined, report, model, template, Path("runs")))

The tokens, masks, log-probs and versions of an episode's branch are the row's own, exactly. Its messages are read from
the row, and its journal holds them as records, so `engine show`, `engine view`, `engine export` and `engine rescore`
work as for a run of the engine. `engine replay` compares the row with what the engine would have written for these
messages and replies.

An episode is trainable if the ids and the log-probs of its row are known and the framework did not leave it out.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from engine.actions.calling.workers import Workers
from engine.episode.compiled import CompiledSpec, compile_spec
from engine.plugins.audit.audit import AuditReport
from engine.plugins.audit.examine import ExaminedRow
from engine.plugins.audit.rows import ForeignRow, Vector
from engine.schemas.environment import Reset, Step, Task
from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.journal import (
    FailureRecord,
    GenerationRecord,
    JournalEntry,
    Record,
    ResetRecord,
    ScoreRecord,
    StepRecord,
)
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from engine.schemas.trajectory import Branch, Failure, Span, Trajectory, Turn
from engine.spec.load import load_spec
from engine.storable import refusal, stored_fields
from engine.store import RunHeader, RunStore
from engine.store.codec import encode_record
from engine.store.header import new_run_id

if TYPE_CHECKING:
    from engine.schemas.model import ModelSpec
    from engine.tokens.template import ChatTemplate


def records_of(row: ExaminedRow, rules: list[str]) -> deque[Record]:
    """The journal's records of a row, in order: the prompt, then each reply with the step that answers it, then the
    rewards.

    Args:
        row: The row.
        rules: The rules that have findings in it.
    """
    foreign = row.foreign
    records: deque[Record] = deque(
        [ResetRecord(reset=Reset(messages=row.shown_messages, facts=_facts(foreign, rules)))]
    )
    if not foreign.has_ids:
        reply = Generation(
            output_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            finish=FinishReason(type=foreign.finish or "stop"),
            text=foreign.response_text or "",
        )
        records += [GenerationRecord(generation=reply), StepRecord(step=Step(event="done"))]
    elif not row.runs:
        message = "the row has no token with loss mask 1, so it has no turn"
        records.append(FailureRecord(failure=Failure(kind="no_trained_token", blame="backend", message=message)))
    else:
        for turn, (start, end) in enumerate(row.runs):
            last = turn + 1 == len(row.runs)
            records.append(GenerationRecord(generation=_generation(row, start, end, last)))
            answer = [] if last else _answer(row, end, row.runs[turn + 1][0])
            records.append(StepRecord(step=Step(event="done" if last else "continue", messages=answer)))
    records.append(ScoreRecord(rewards=_rewards(row)))
    return records


def _generation(row: ExaminedRow, start: int, end: int, last: bool) -> Generation:
    foreign = row.foreign
    ids = row.response[start:end]
    logprobs = (
        np.zeros(len(ids), np.float32) if foreign.logprobs is None else np.nan_to_num(foreign.logprobs[start:end])
    )
    stopped = int(ids[-1]) in row.marks.template.stop_set
    cut = last and not stopped and foreign.finish in ("length", "abort")
    versions = _versions_of(foreign)[start:end]
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(ids)]
    return Generation(
        output_ids=np.ascontiguousarray(ids),
        logprobs=np.ascontiguousarray(logprobs, np.float32),
        finish=FinishReason(type="length" if cut else "stop", matched=int(ids[-1]) if stopped else None),
        versions=[VersionSpan(version=int(versions[at]), start=at, end=until) for at, until in pairwise(edges)],
        prompt_tokens=row.start + start,
    )


def _versions_of(row: ForeignRow) -> Vector:
    """int32 [response]: the version of each token; the row's newest, or 0, where the token has none."""
    assert row.response_ids is not None
    newest = max((0, *row.row_versions))
    if row.versions is None:
        return np.full(len(row.response_ids), newest, np.int32)
    return np.where(row.versions < 0, newest, row.versions).astype(np.int32)


def _answer(row: ExaminedRow, end: int, until: int) -> list[Message]:
    """What was said between two trained runs; text without the template's form is one message of a user."""
    closing = row.marks.closing
    after = end - len(closing) if closing and row.response[:end][-len(closing) :].tolist() == closing else end
    for at in dict.fromkeys((end, after)):  # a run may end with the template's closing
        if at and int(row.response[at - 1]) in row.marks.template.stop_set:
            messages = row.marks.observations(row.response[at:until], stopped=True)
            break
    else:
        messages = row.marks.observations(row.response[end:until], stopped=False)
    if messages is None or any(message.role == "assistant" for message in messages):
        return [Message(role="user", content=row.text(end, until))]
    return messages


def _rewards(row: ExaminedRow) -> list[RewardEvent]:
    """The row's rewards by turn. A reward on a token belongs to the newest turn that has begun there."""
    foreign = row.foreign
    turns = len(row.runs) if foreign.has_ids else 1
    if not turns:
        return []
    amounts = np.zeros(turns)
    if foreign.token_rewards is not None and foreign.has_ids:
        starts = np.array([start for start, _ in row.runs])
        for at in np.flatnonzero(np.nan_to_num(foreign.token_rewards)):
            amounts[max(int(np.searchsorted(starts, at, side="right")) - 1, 0)] += foreign.token_rewards[at]
    elif foreign.reward is not None:
        amounts[-1] = foreign.reward
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
        try:
            text = json.dumps(value, default=methodcaller("tolist"))  # of NumPy's arrays and numbers
        except (TypeError, ValueError, AttributeError, RecursionError):
            text = ""
        if 0 < len(text) < 20_000 and refusal({key: (plain := json.loads(text))}) is None:
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


# --- the trajectory -------------------------------------------------------------------------------------


def branch_of(row: ExaminedRow) -> Branch:
    """The row as a branch: its ids, loss mask, log-probs and versions as they are."""
    foreign, size = row.foreign, len(row.ids)
    spans = [Span(kind="prompt", start=0, end=row.start)] if row.start else []
    mask, turns, at = np.zeros(size, np.int32), np.full(size, -1, np.int32), row.start
    for turn, run in enumerate(row.runs):
        start, end = row.start + run[0], row.start + run[1]
        if at < start:
            spans.append(Span(kind="bridge", start=at, end=start))
        spans.append(Span(kind="generated", start=start, end=end, turn=turn))
        mask[start:end], turns[start:end], at = 1, turn, end
    if at < size:
        spans.append(Span(kind="bridge", start=at, end=size))
    logprobs = np.zeros(size, np.float32)
    if foreign.logprobs is not None:
        logprobs[row.start :] = np.where(mask[row.start :] != 0, foreign.logprobs, 0.0)
    versions = np.full(size, -1, np.int32)
    versions[row.start :] = np.where(mask[row.start :] != 0, _versions_of(foreign), -1)
    return Branch(
        index=0,
        spans=spans,
        input_ids=np.ascontiguousarray(row.ids, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        weight_versions=versions,
        turn_ids=turns,
    )


def with_own_tokens(trajectory: Trajectory, row: ExaminedRow) -> Trajectory:
    """A trajectory with the row's own tokens. It is trainable only if ids and log-probs are known and the row is not
    left out."""
    foreign = row.foreign
    known = foreign.has_ids and foreign.logprobs is not None and bool(np.all(np.isfinite(foreign.logprobs)))
    trainable = trajectory.outcome.trainable and known and not foreign.excluded and bool(row.runs)
    trajectory = replace(trajectory, outcome=replace(trajectory.outcome, trainable=trainable))
    if not foreign.has_ids:
        return trajectory
    branch = branch_of(row)
    if len(trajectory.branches) == 1:
        (rendered,) = trajectory.branches
        if np.array_equal(rendered.input_ids, branch.input_ids) and np.array_equal(rendered.turn_ids, branch.turn_ids):
            branch = replace(branch, spans=rendered.spans)  # which tell closings from bridges
    read = {turn.index: turn for turn in trajectory.turns}
    unread = Turn(index=-1, branch=0, start=0, end=0, finish=FinishReason(type="stop"), event="answered")
    turns = [  # the row's messages may not have been read up to its end
        replace(read.get(at, unread), index=at, branch=0, start=span.start, end=span.end)
        for at, span in enumerate(span for span in branch.spans if span.kind == "generated")
    ]
    counts = trajectory.counts | {"context_tokens": len(row.ids), "sampled_tokens": int(branch.loss_mask.sum())}
    return replace(trajectory, branches=[branch], turns=turns, counts=counts)


_PLAIN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,79}")
_AT_ONCE = 32
"""Rows that are written at the same time."""


class StoredRows:
    """The environment of stored rows: their journals hold what it said, and it cannot go on."""

    events = ("continue", "done")

    def reset(self, task: Task, seed: int) -> Reset:
        """Refuse. Raises: RuntimeError."""
        raise RuntimeError(
            "these are rows of another framework: show, view, export and rescore them; to sample again, write a spec "
            "with their environment"
        )

    def step(self, view: object) -> Step:
        """Refuse. Raises: RuntimeError."""
        raise RuntimeError("stored rows have no next step")


def spec_text(framework: str, model: ModelSpec, rows: int) -> str:
    """The spec of a run of stored rows, as YAML. Another spec that extends it may have other `rewards`, for
    `engine rescore`."""
    document = {
        "spec": "episode/v1",
        "name": f"audit-{framework}",
        "description": f"{rows} rows of {framework}, stored by engine audit. Nothing can be sampled with this spec.",
        "model": model.model_dump(mode="json", exclude_defaults=True),
        "backend": {"kind": "scripted", "replies": ["Stored rows are not sampled again."]},
        "tasks": {"source": "jsonl", "path": "tasks.jsonl", "id": "id"},
        "environment": {"use": f"{__name__}:StoredRows", "effects": "pure"},
        "machine": "step",
        "rollout": {"samples_per_task": 1},
    }
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text


async def store_rows(
    rows: Sequence[ExaminedRow], report: AuditReport, model: ModelSpec, template: ChatTemplate, out: Path
) -> RunStore:
    """Write rows into a new run.

    Args:
        rows: The examined rows.
        report: Their report; the rules of a row's findings become facts of its episode.
        model: The model, with an absolute path if it is a folder.
        template: Its chat format.
        out: The folder in which runs are stored.

    Returns:
        The run, closed.

    Raises:
        StoreError: It cannot be written.
    """
    run_id = new_run_id(f"audit-{report.framework}", time.time())
    text = spec_text(report.framework, model, len(rows))
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "spec.yaml"
        draft.write_text(text, encoding="utf-8")
        loaded = replace(load_spec(draft), path=(out / run_id / "spec.yaml").absolute())
    header = RunHeader.of(replace(loaded, sources={str(loaded.path): text}, origins={}), run_id=run_id)
    tasks = _tasks(rows)
    rules: dict[int, list[str]] = defaultdict(list)
    for finding in report.findings:
        rules[finding.row] += [] if finding.rule in rules[finding.row] else [finding.rule]
    workers = Workers(1)
    try:
        with RunStore.create(out, header) as store:
            (store.folder / "spec.yaml").write_text(text, encoding="utf-8")
            with (store.folder / "tasks.jsonl").open("w", encoding="utf-8") as file:
                each = {task.id: task.fields for task in tasks}
                file.writelines(json.dumps(fields, ensure_ascii=False) + "\n" for fields in each.values())
            compiled = compile_spec(loaded, template, workers)
            slots = asyncio.Semaphore(_AT_ONCE)

            async def write(row: ExaminedRow, task: Task, sample: int) -> None:
                async with slots:
                    await _write(store, compiled, row, task, sample, rules[row.index])

            samples: dict[str, int] = defaultdict(int)
            async with asyncio.TaskGroup() as group:
                for row, task in zip(rows, tasks, strict=True):
                    group.create_task(write(row, task, samples[task.id]))
                    samples[task.id] += 1
            return store
    finally:
        workers.close()


def _tasks(rows: Sequence[ExaminedRow]) -> list[Task]:
    """The task of each row: its group, or the row alone."""
    found: dict[str, Task] = {}
    tasks = []
    for row in rows:
        key = f"group {row.foreign.group}" if row.foreign.group else f"row {row.index}"
        if key not in found:
            foreign = row.foreign.group or f"row-{row.index}"
            id_ = foreign if _PLAIN_ID.fullmatch(foreign) else f"group-{len(found)}"
            label = None if row.foreign.label is None else str(row.foreign.label)[:1000]
            fields = {"id": id_, "group": row.foreign.group[:1000], "label": label}
            found[key] = Task(id=id_, index=len(found), fields=stored_fields(fields))
        tasks.append(found[key])
    return tasks


async def _write(
    store: RunStore,
    compiled: CompiledSpec,
    row: ExaminedRow,
    task: Task,
    sample: int,
    rules: list[str],
) -> None:
    """Write one row: apply its records to an episode, append them, and finish it with the row's own tokens."""
    journal = await store.begin(task, sample)
    episode = compiled.episode(task, sample, [])
    records = records_of(row, rules)
    while True:
        seq, state = episode.seq, episode.state
        record = records.pop() if state == "DONE" else records.popleft()  # the last one is the score's
        event, dest = episode.feed(record)
        entry = JournalEntry(seq=seq, state=state, event=event, dest=dest, record=record, at=time.time(), seconds=0.0)
        await journal.append(entry, encode_record(record))
        if dest in compiled.ends:
            break
    trajectory = with_own_tokens(episode.trajectory(store.header.run_id, exact=row.foreign.has_ids), row)
    await journal.finish(lambda: trajectory)
