"""Writes the rows of another framework into a run store, one episode for each row.

    folder = asyncio.run(store_rows(examined, report, model, template, Path("runs")))

The tokens, masks, log-probs and versions of an episode's branch are the row's own, exactly. Its messages are read from the row, and its journal
holds them as records, so `engine show`, `engine view`, `engine export` and `engine rescore` work as for a run of the engine. `engine replay` compares
the row with what the engine would have written for these messages and replies.

An episode is trainable if the ids and the log-probs of its row are known and the framework did not leave it out.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from engine.actions.calling.workers import Workers
from engine.episode.compiled import CompiledSpec, compile_spec
from engine.plugins.audit.episodes import next_record, records_of, with_own_tokens
from engine.plugins.audit.examine import Examined
from engine.plugins.audit.findings import Report
from engine.schemas.environment import Reset, Step, Task
from engine.schemas.journal import JournalEntry
from engine.spec.load import load_spec
from engine.storable import stored_fields
from engine.store import RunHeader, RunStore
from engine.store.codec import encode_record
from engine.store.header import new_run_id

if TYPE_CHECKING:
    from engine.schemas.model import ModelSpec
    from engine.tokens.template import ChatTemplate

_PLAIN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,79}")
_AT_ONCE = 32
"""Rows that are written at the same time."""


class StoredRows:
    """The environment of stored rows: their journals hold what it said, and it cannot go on."""

    events = ("continue", "done")

    def reset(self, task: Task, seed: int) -> Reset:
        """Refuse. Raises: RuntimeError."""
        raise RuntimeError(
            "these are rows of another framework: show, view, export and rescore them; to sample again, write a spec with their environment"
        )

    def step(self, view: object) -> Step:
        """Refuse. Raises: RuntimeError."""
        raise RuntimeError("stored rows have no next step")


def spec_text(framework: str, model: ModelSpec, rows: int) -> str:
    """The spec of a run of stored rows, as YAML. Another spec that extends it may have other `rewards`, for `engine rescore`."""
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
    rows: Sequence[Examined], report: Report, model: ModelSpec, template: ChatTemplate, out: Path
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

            async def write(row: Examined, task: Task, sample: int) -> None:
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


def _tasks(rows: Sequence[Examined]) -> list[Task]:
    """The task of each row: its group, or the row alone."""
    found: dict[str, Task] = {}
    tasks = []
    for row in rows:
        key = f"group {row.row.group}" if row.row.group else f"row {row.index}"
        if key not in found:
            own = row.row.group or f"row-{row.index}"
            id_ = own if _PLAIN_ID.fullmatch(own) else f"group-{len(found)}"
            label = None if row.row.label is None else str(row.row.label)[:1000]
            fields = {"id": id_, "group": row.row.group[:1000], "label": label}
            found[key] = Task(id=id_, index=len(found), fields=stored_fields(fields))
        tasks.append(found[key])
    return tasks


async def _write(
    store: RunStore,
    compiled: CompiledSpec,
    row: Examined,
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
        record = next_record(records, state)
        event, dest = episode.feed(record)
        entry = JournalEntry(seq=seq, state=state, event=event, dest=dest, record=record, at=time.time(), seconds=0.0)
        await journal.append(entry, encode_record(record))
        if dest in compiled.ends:
            break
    trajectory = with_own_tokens(episode.trajectory(store.header.run_id, exact=row.row.has_ids), row)
    await journal.finish(lambda: trajectory)
