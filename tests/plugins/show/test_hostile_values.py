"""Whatever a model or a spec's code returns: the episode ends, and the run can be shown, resumed, replayed and exported."""

from __future__ import annotations

import contextlib
import io
import json
from datetime import date
from pathlib import Path
from typing import Any

import hostile_code
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console
from written_specs import scripted_spec

from engine.backends.registry import open_backend
from engine.console import SafeConsole
from engine.plugins.show.episode_report import print_finished
from engine.runner.replay import Replayer
from engine.runner.runner import Runner
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.storable import MAX_DEPTH, refusal
from engine.store import RunHeader, RunStore
from engine.store.rows.export import export_rows, write_jsonl, write_parquet
from engine.terminal import visible
from engine.tokens.loading import load_format

NO_SHRINKING = (Phase.explicit, Phase.generate)
"""An example is many episodes: a failure names its own, and takes minutes to shrink."""
DEPTHS = (1, 2, MAX_DEPTH - 3, MAX_DEPTH - 2, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 128, 210, 260, 900, 3000)
PLACES = ("reset", "example", "tool", "user", "user content", "user error", "tool content", "tool error")
ENDS = ("score", "score error")
BLAMED = {"reset": "environment", "example": "environment", "score": "environment"}
BLAMED |= {"tool": "tool", "tool content": "tool", "user": "user", "user content": "user", "user error": "user"}
BLAMED |= {"score error": "environment"}


def nested(value: Any, depth: int, *, lists: bool) -> Any:
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


def shared(levels: int) -> Any:
    """A small object that is 2 ** levels elements when it is written."""
    value: Any = "x"
    for _ in range(levels):
        value = [value, value]
    return value


# ---- answers of a spec's code: Python values, built from recipes that Hypothesis can print

LEAVES = (
    2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64, 10**4299, -(10**5000),
    float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, -0.0,
    "\ud800", "a\udfff", "\x00", "\x1b]52;c;eA==\x07", "\u202e", "é\U0001f600", "x" * 70_000, "",
    b"\xff", object(), {1, 2}, date(2026, 1, 1), (1, 2), 1j, print, np.float32("nan"), np.int64(7), np.arange(3),
    np.bool_(True), np.array([object()]), np.datetime64("2026-01-01"), shared(12),
)  # fmt: skip
KEYS = ("\ud800", "", "\x00", "a", "é", 1, None, True, (1,))
SHAPES: dict[str, Any] = {
    "bare": lambda leaf, depth, key: leaf,
    "lists": lambda leaf, depth, key: nested(leaf, depth, lists=True),
    "dicts": lambda leaf, depth, key: nested(leaf, depth, lists=False),
    "key": lambda leaf, depth, key: {key: leaf},
    "fine but deep": lambda leaf, depth, key: nested(1, depth, lists=bool(depth % 2)),
}
recipes = st.tuples(
    st.sampled_from(sorted(SHAPES)), st.integers(0, len(LEAVES) - 1), st.sampled_from(DEPTHS), st.sampled_from(KEYS)
)


def made(recipe: tuple[str, int, int, Any]) -> Any:
    shape, leaf, depth, key = recipe
    return SHAPES[shape](LEAVES[leaf], depth, key)


# ---- what a model writes: JSON texts

atoms = st.sampled_from([
    r'"\ud800"', r'"\udfffa"', r'"\ud83d\ude00"', r'"\u0000\u001b\u202e"', "NaN", "-Infinity", "1e999", "1e-999", "-0",
    "9" * 30, "-" + "9" * 5000, str(2**63), str(2**63 - 1), "0." + "3" * 3000, "null", "true", '"x"',
])  # fmt: skip
names = st.sampled_from([r'"\ud800"', '""', r'"\u0000"', '"value"'])
written = st.one_of(
    atoms,
    st.builds(lambda atom, n: "[" * n + atom + "]" * n, atoms, st.sampled_from(DEPTHS)),
    st.builds(lambda atom, n: '{"a":' * n + atom + "}" * n, atoms, st.sampled_from(DEPTHS)),
    st.builds(lambda key, atom: f"{{{key}: {atom}}}", names, atoms),
)


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Any:
    """Runs tasks, one episode each, and gives the run's folder."""

    async def run(tasks: list[dict[str, Any]], replies: list[Any], **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("hostile")
        spec: dict[str, Any] = {
            **scripted_spec("hostile", tiny_tokenizer_dir, replies, tasks, ask="Go."),
            "limits": {"assistant_turns": 3, "turn_tokens": 100_000},
            "environment": {"use": "hostile_code:Board"},
            "tools": [{"use": "hostile_code:tell"}, {"use": "hostile_code:take"}],
            "user": {"use": "hostile_code:Listener"},
            **changes,
        }
        (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
        loaded = load_spec(folder / "spec.yaml")
        form = load_format(loaded.spec.model, loaded.base)
        store = RunStore.create(folder / "runs", RunHeader.of(loaded))
        for _ in range(2):  # and a resume, which finds nothing to do
            backend = open_backend(loaded, form)
            await backend.start()
            result = await Runner(loaded, load_tasks(loaded), form, backend, store).run()
            await backend.close()
            store.close()
            assert not result.faults
            store = RunStore.open(store.folder)
        store.close()
        return store.folder

    return run


async def read_everything(folder: Path) -> dict[str, Any]:
    """Show, replay and export a run, and hold both exports to each other; its trajectories by task."""
    with RunStore.open(folder, readonly=True) as store:
        rows = [*store.episodes()]
        assert {row.status for row in rows} == {"done"}
        loaded = store.loaded_spec()
        replayer = Replayer(loaded, load_format(loaded.spec.model, loaded.base), store)
        found = {}
        for row in rows:
            trajectory = found[row.task_id] = store.trajectory(row.id)
            replayed = await replayer.check(trajectory, store.task(row.task_id))
            assert replayed.difference is None, (row.id, replayed.difference)
            out = io.StringIO()
            console: Console = SafeConsole(file=out, width=2000, markup=False)
            print_finished(console, store, trajectory, row)
            assert visible(out.getvalue()) == out.getvalue()
            assert store.journal(row.id)
        lines, table = folder / "rows.jsonl", folder / "rows.parquet"
        count = write_jsonl(export_rows(store), lines)
        assert write_parquet(export_rows(store), table) == count
        assert [json.loads(line)["task_id"] for line in lines.read_bytes().splitlines()] == [
            row["task_id"] for row in pq.read_table(table).to_pylist()
        ]
        return found


TELL = '<tool_call>{"name": "tell", "arguments": {}}</tool_call>'


@pytest.mark.slow
@settings(max_examples=3, phases=NO_SHRINKING, suppress_health_check=list(HealthCheck))
@given(answers=st.lists(recipes, min_size=10, max_size=10, unique=True))
async def test_code_may_answer_anything(make_run: Any, answers: list[Any]) -> None:
    places = {
        f"{place}:{n}": (place, value) for n, value in enumerate(map(made, answers)) for place in (*PLACES, *ENDS)
    }
    hostile_code.ANSWERS.clear()
    hostile_code.ANSWERS.update({name: value for name, (_, value) in places.items()})
    tasks = [{"id": name, "place": place} for name, (place, _) in places.items()]
    replies = [TELL, "done", "done"]
    found = await read_everything(await make_run(tasks, replies))
    for name, (place, value) in places.items():
        outcome = found[name].outcome
        if place in ("reset", "tool", "user"):
            assert (outcome.failure is None) == (refusal({"facts": {"told": value}}) is None)
            if outcome.failure is None:
                assert found[name].facts["told"] == json.loads(json.dumps(value, default=lambda v: v.tolist()))
        if outcome.failure is not None:
            assert outcome.failure.blame == BLAMED[place], (name, outcome.failure)
            assert not outcome.trainable


@pytest.mark.slow
@settings(max_examples=3, phases=NO_SHRINKING, suppress_health_check=list(HealthCheck))
@given(arguments=st.lists(written, min_size=10, max_size=12, unique=True))
async def test_a_model_may_write_anything(make_run: Any, arguments: list[str]) -> None:
    texts = {
        f"t{n}": f'<tool_call>{{"name": "take", "arguments": {{"value": {text}}}}}</tool_call>'
        for n, text in enumerate(arguments)
    }
    texts |= {
        f"n{n}": f'<tool_call>{{"name": {name}, "arguments": {{{name}: 1}}}}</tool_call>'
        for n, name in enumerate([r'"\ud800"', r'"\u0000"', f'"{"x" * 1000}"'])
    }
    replies = [{"task": name, "replies": [text, "done", "done"]} for name, text in texts.items()]
    found = await read_everything(await make_run([{"id": name} for name in texts], replies))
    for number, text in enumerate(arguments):
        trajectory = found[f"t{number}"]
        assert trajectory.outcome.failure is None
        assert trajectory.outcome.trainable
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
            assert trajectory.turns[0].event == ("malformed" if refusal({"value": value}) else "tool_calls")
            continue
        assert trajectory.turns[0].event == "malformed"


BAD_ROWS = ({"a": float("nan")}, {"a": "\ud800"}, {"a": 2**63}, {"a": nested(1, 210, lists=True)}, {"a": object()})


@pytest.mark.parametrize("row", BAD_ROWS, ids=lambda row: type(row["a"]).__name__)
def test_a_task_row_that_cannot_be_stored_is_refused_before_the_run(row: Any, tmp_path: Path) -> None:
    from engine.errors import SpecError

    spec = {"spec": "episode/v1", "name": "x", "model": {"path": "smollm2-135m-instruct"}, "backend": {"kind": "local"}}
    spec |= {"tasks": {"source": "python", "use": "hostile_code:rows"}, "prompt": [{"role": "user", "content": "x"}]}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    hostile_code.ROWS[:] = [{"fine": 1}, row]
    with pytest.raises(SpecError, match="row 2 cannot be stored: `a") as caught:
        load_tasks(load_spec(tmp_path / "spec.yaml"))
    assert caught.value.diagnostics[0].rule == "tasks.bad-row"
