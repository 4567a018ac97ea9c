"""A stored run in Python: episodes, parts of it, rows, tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import engine
from engine import plugin

REPLIES = [
    {"task": "a", "replies": ["It is 42."]},
    {"task": "b", "replies": ["It is 41.", "It is 42."]},
    {"task": "c", "replies": ["It is 40."]},
]


@pytest.fixture
def run(make_spec: Callable[..., Path], tmp_path: Path) -> engine.Run:
    tasks = {"source": "inline", "rows": [{"id": name} for name in "abc"], "id": "id"}
    spec = make_spec(REPLIES, tasks=tasks, rewards={"credit": {"method": "turn_return"}})
    return engine.run(spec, out=tmp_path, progress=False)


def test_an_episode_has_what_it_did(run: engine.Run) -> None:
    first, second, third = run.episodes
    assert [repr(episode) for episode in (first, second, third)] == [
        "<Episode a/0: satisfied, reward +1.000>",
        "<Episode b/0: satisfied, reward +0.900>",
        "<Episode c/0: script_exhausted, reward -0.100>",
    ]
    assert (second.task.id, second.failure, third.failure) == ("b", None, "script_exhausted")
    assert [(message.role, message.text) for message in second.messages] == [
        ("user", "What is 17 plus 25?"),
        ("assistant", "It is 41."),
        ("user", "Not It is 41.. Again."),
        ("assistant", "It is 42."),
        ("user", "Right."),
    ]
    assert [turn.rewards for turn in second.turns] == [{"reward": -0.1}, {"correct": 1.0}]
    assert run.episode("b/0").trajectory.path == second.trajectory.path
    with pytest.raises(engine.EngineError, match="no episode `d/0`"):
        run.episode("d/0")


def test_a_part_of_a_run_is_written_to_a_file(run: engine.Run, tmp_path: Path) -> None:
    exported = run.filter("outcome.solved").export(tmp_path / "rows.parquet", credit={"gamma": 0.5})
    assert (exported.words, exported.warnings, exported.notes) == ("2 rows", [], [])
    table = pq.read_table(exported.path)
    assert table.column("episode_id").to_pylist() == ["a/0", "b/0"]
    assert json.loads(table.schema.metadata[b"episode_engine.credit"])["gamma"] == 0.5
    assert run.rows(credit={"gamma": 0.5}).filter([True, True, False]).equals(table)
    assert run.export().path == run.folder / "rows.jsonl"
    for options, message in (
        ({"format": "jsn"}, "there is no format `jsn`; did you mean `jsonl`?"),
        ({"format": "scenario", "score": "x"}, "--score has no effect with --format scenario; leave it out, or use"),
        ({"format": "scenario"}, "--format scenario needs --episode ID"),
        ({"credit": {"gama": 0.5}}, "--credit gama: Extra inputs are not permitted (keys: method, "),
    ):
        with pytest.raises(engine.EngineError) as raised:
            run.export(**options)
        assert str(raised.value).startswith(message)


def test_a_part_of_a_run_has_its_episodes_rows_and_sums(run: engine.Run) -> None:
    solved = run.filter("outcome.solved")
    quick = solved.filter("turns.assistant == 1")
    assert [[episode.id for episode in part.episodes] for part in (run, solved, quick)] == [
        ["a/0", "b/0", "c/0"],
        ["a/0", "b/0"],
        ["a/0"],
    ]
    assert [part.summary.mean_reward for part in (run, solved, quick)] == pytest.approx([0.6, 0.95, 1.0])
    assert solved.rows().column("episode_id").to_pylist() == ["a/0", "b/0"]
    assert repr(quick) == f"<Run {run.id}: done, where outcome.solved and turns.assistant == 1>"
    with pytest.raises(engine.EngineError, match="filter"):
        run.filter("outcome.solvd")


def test_rows_are_those_of_an_export(run: engine.Run) -> None:
    rows = run.rows()
    assert rows.column("input_ids").num_chunks == 1
    assert rows.num_rows == 3
    assert [sum(mask) for mask in rows.column("loss_mask").to_pylist()] == [
        episode.row.tokens for episode in run.episodes
    ]
    assert run.rows(trainable_only=True).column("episode_id").to_pylist() == ["a/0", "b/0"]
    by_outcome = run.rows(credit={"method": "outcome"})
    assert by_outcome.column("advantages") != rows.column("advantages")
    assert by_outcome.column_names == rows.column_names


def test_episodes_as_a_table_of_pandas(run: engine.Run) -> None:
    pytest.importorskip("pandas")
    table = run.to_pandas()
    assert table[["id", "turns"]].values.tolist() == [["a/0", 1], ["b/0", 2], ["c/0", 1]]
    assert table[table.failure == "script_exhausted"].id.tolist() == ["c/0"]
    assert table.reward.sum() == pytest.approx(1.8)


def test_a_notebook_shows_the_turns_and_nothing_of_them_as_markup(
    make_spec: Callable[..., Path], tmp_path: Path
) -> None:
    run = engine.run(make_spec(["<b>41</b>", "It is 42."]), out=tmp_path, progress=False)
    shown = run._repr_html_()
    assert (
        "<tr><td>a/0</td><td>0</td><td>&lt;b&gt;41&lt;/b&gt;</td><td>answered</td><td>reward -0.100</td></tr>" in shown
    )
    assert "1 episodes, mean reward +0.900; solved 1" in shown
    assert ("<svg" in shown) == ("pictures" in plugin.installed().plugins)
    assert "<td>1</td><td>It is 42.</td><td>answered</td><td>correct +1.000</td>" in run.episodes[0]._repr_html_()


def test_check_gives_findings_as_objects(make_spec: Callable[..., Path]) -> None:
    assert [item for item in engine.check(make_spec(["42"])) if item.severity == "error"] == []
    found = engine.check(make_spec(["42"], limits={"turns": 3}))
    assert [(item.rule, item.path) for item in found] == [("spec.unknown-key", ("limits", "turns"))]
