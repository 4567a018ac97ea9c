"""Episodes with and without condensing: `python bench/condensing.py`.

Runs `specs/long_search.yaml` and `specs/expand.yaml` with a scripted policy that knows the answers and searches or reads for each of them, so
that only the context decides whether an episode is solved. Prints per setting: solved episodes, tokens sampled and tokens of all
training rows per episode, condensations, and whether each sampled token has loss mask 1 in exactly one row.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.backends.registry import open_backend
from engine.runner.runner import Runner
from engine.schemas.trajectory import Trajectory
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.tokens.loading import load_format

SPECS = Path(__file__).parents[1] / "specs"
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "long_search, without": ("long_search.yaml", ["limits.on_overflow=end"]),
    "long_search, drop": ("long_search.yaml", []),
    "long_search, keywords": ("long_search.yaml", ["condense.condenser={kind: keywords, tokens: 24}"]),
    "expand, without": ("expand.yaml", ["condense.keep_last=100"]),
    "expand, first words": ("expand.yaml", []),
    "expand, keywords": ("expand.yaml", ["condense.condenser={kind: keywords, tokens: 16}"]),
}


def survey(row: dict[str, Any]) -> list[Any]:
    """Two searches for each question, the answers so far written down before each, then all answers."""
    questions = [line.partition(". ")[2].rstrip("?") for line in row["question"].splitlines()[1:]]
    answers = row["answers"][0].split("; ")
    replies: list[Any] = []
    for number, question in enumerate(questions):
        for query in (question.rpartition(" of ")[2], answers[number]):
            call = {"name": "search", "arguments": {"query": query, "results": 3}}
            replies.append({"text": "; ".join(answers[:number]), "tool_calls": [call]})
    return [*replies, f"<answer>{row['answers'][0]}</answer>"]


def reading(row: dict[str, Any]) -> list[Any]:
    """Read each passage with the answer, up to four, then answer."""
    answer = row["answers"][0]
    found = [number for number, line in enumerate(row["passages"].splitlines(), 1) if answer in line]
    calls = [{"tool_calls": [{"name": "expand", "arguments": {"block": number}}]} for number in found[:4]]
    return [*calls, f"<answer>{answer}</answer>"]


async def trajectories(name: str, changes: list[str], folder: Path) -> list[Trajectory]:
    """The episodes of a spec, one per task."""
    loaded = load_spec(SPECS / name, ["rollout.samples_per_task=1", *changes])
    script = folder / "replies.json"
    replies = survey if "long" in name else reading
    cases = [{"task": task.id, "replies": replies(task.fields)} for task in load_tasks(loaded)]
    script.write_text(json.dumps({"cases": cases}))
    loaded = load_spec(
        SPECS / name, ["rollout.samples_per_task=1", *changes, f"backend={{kind: scripted, replies: {script}}}"]
    )
    form = load_format(loaded.spec.model, loaded.base)
    backend = open_backend(loaded, form)
    await backend.start()
    store = RunStore.create(folder / "runs", RunHeader.of(loaded))
    try:
        await Runner(loaded, load_tasks(loaded), form, backend, store).run()
        return list(store.trajectories())
    finally:
        await backend.close()
        store.close()


def trained_once(trajectory: Trajectory) -> bool:
    """Whether the tokens with loss mask 1 are those of the turns, each once."""
    by_turn: Counter[int] = Counter()
    for branch in trajectory.branches:
        by_turn.update(branch.turn_ids[branch.loss_mask == 1].tolist())
    sampled = {turn.index: turn.end - turn.start for turn in trajectory.turns}
    return by_turn == sampled and sum(sampled.values()) == trajectory.counts["sampled_tokens"]


def lines() -> Iterator[str]:
    """The table."""
    yield "| spec | solved | limit reached | turns | sampled tokens | tokens of rows | rows | condensations | trained once |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for title, (name, changes) in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(trajectories(name, changes, Path(folder)))
        solved = sum("correct" in item.outcome.rewards for item in found)
        limits = Counter(item.outcome.limit for item in found if item.outcome.limit)
        means = [
            np.mean([len(item.turns) for item in found]),
            np.mean([item.counts["sampled_tokens"] for item in found]),
            np.mean([sum(len(branch.input_ids) for branch in item.branches) for item in found]),
            np.mean([len(item.branches) for item in found]),
            np.mean([len(item.condensations) for item in found]),
        ]
        failed = [item.outcome.failure for item in found if item.outcome.failure]
        assert not failed, failed[0]
        once = sum(map(trained_once, found))
        said = ", ".join(f"{limit} {count}" for limit, count in limits.items()) or "-"
        numbers = " | ".join(f"{mean:.1f}" if mean < 100 else f"{mean:,.0f}" for mean in means)
        yield f"| {title} | {solved} of {len(found)} | {said} | {numbers} | {once} of {len(found)} |"


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
