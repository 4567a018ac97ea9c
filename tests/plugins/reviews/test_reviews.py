"""What people say about episodes: what a kill leaves, whose word counts, and the fact `review` wherever facts are read."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from command_line import engine_here

from engine.errors import StoreError
from engine.plugins.replay.rescore import rescore
from engine.plugins.reviews.reviews import FILE, Reviews
from engine.spec.load import load_spec
from engine.store import RunStore

NOBODY = {"rated": False, "rating": 0.0, "tags": [], "notes": [], "by": []}


def test_the_newest_review_of_a_person_counts_and_people_are_taken_together(tmp_path: Path) -> None:
    reviews = Reviews(tmp_path)
    reviews.write([{"episode": "a/0", "by": "ann", "rating": -1, "note": "rude"}])
    reviews.write([{"episode": "a/0", "by": "ann", "rating": 1, "tags": ["fair"]}])
    reviews.write([{"episode": "a/0", "by": "bo", "rating": 0.5, "tags": ["short", "fair"], "note": "fine"}])
    reviews.write([{"episode": "a/1", "by": "bo", "rating": 3}, {"episode": "a/1", "by": "bo"}])  # taken back
    for opened in (reviews, Reviews(tmp_path)):
        assert opened.fact("a/0") == {
            "rated": True, "rating": 0.75, "tags": ["fair", "short"], "notes": ["fine"], "by": ["ann", "bo"]
        }  # fmt: skip
        assert (len(opened), opened.fact("a/1")) == (1, NOBODY)
    assert len((tmp_path / FILE).read_text().splitlines()) == 5


def test_a_line_that_a_kill_cut_is_passed_over_and_a_wrong_review_adds_nothing(tmp_path: Path) -> None:
    Reviews(tmp_path).write([{"episode": "a/0", "by": "ann", "rating": 1}])
    with (tmp_path / FILE).open("a") as file:
        file.write('{"episode": "a/1", "by": "ann", "rat')
    before = Reviews(tmp_path)
    assert (len(before), before.fact("a/0")["rating"]) == (1, 1.0)
    with pytest.raises(StoreError, match=r"`tags.0`"):
        before.write([{"episode": "a/2", "rating": 1}, {"episode": "a/2", "tags": ["two words"]}])
    before.write([{"episode": "a/1", "by": "ann", "rating": -1}])
    assert [json.loads(line)["episode"] for line in (tmp_path / FILE).read_text().splitlines()] == ["a/0", "a/1"]


def _write(folder: Path, by: str) -> None:
    for number in range(20):
        Reviews(folder).write([{"episode": f"a/{number}", "by": by, "rating": 1}])


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(tmp_path, by)) for by in ("ann", "bo")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert all(sorted(Reviews(tmp_path).fact(f"a/{number}")["by"]) == ["ann", "bo"] for number in range(20))


@pytest.fixture
async def run(make_spec: Callable[..., Path], run_spec: Callable[..., Any]) -> Any:
    """Four episodes of one task, each with a reward of -0.1 and one of 1.0."""
    return await run_spec(make_spec(["It is 41.", "It is 42."], rollout={"samples_per_task": 4}))


def rate(run: Any, *arguments: str) -> str:
    """The output of `engine rate` for this run."""
    code, out, err = engine_here("rate", run.store.folder, *arguments, "--by", "ann", cwd=run.store.folder)
    assert code == 0, err
    return out


def shown(run: Any, filter: str) -> list[str]:
    """The episodes that `engine show --filter` lists."""
    code, out, err = engine_here("show", run.store.folder, "--filter", filter, "--json", cwd=run.store.folder)
    return [row["episode"] for row in json.loads(out)["rows"]] if code == 0 else [err]


async def test_a_review_is_a_fact_for_filters_rows_and_rules(run: Any, make_spec: Callable[..., Path]) -> None:
    folder = run.store.folder
    (nothing_yet,) = shown(run, "facts.review.rating > 0")
    assert "`facts.review` does not exist" in nothing_yet
    rate(run, "a/0", "a/1", "--rating", "1", "--tag", "fair")
    rate(run, "--filter", "episode.sample == 1 && facts.review.rating == 1", "--untag", "fair", "--note", "too late")
    rate(run, "a/2", "--rating", "-2")
    assert "3 have a review" in rate(run, "a/3", "--clear")
    assert shown(run, "facts.review.rating > 0") == ["a/0", "a/1"]
    assert shown(run, "has(facts.review) && !facts.review.rated") == ["a/3"]
    assert shown(run, '"fair" in facts.review.tags || facts["review"].notes.size() > 0') == ["a/0", "a/1"]
    code, table, _ = engine_here("show", folder, cwd=folder)
    assert (code, next(line.split()[-2:] for line in table.splitlines() if "a/0" in line)) == (0, ["+1", "fair"])

    for suffix, read in (("jsonl", _json_lines), ("parquet", lambda path: pq.read_table(path).to_pylist())):
        out = folder / f"good.{suffix}"
        assert engine_here("export", folder, "--filter", "facts.review.rating > 0", "-o", out, cwd=folder)[0] == 0
        facts = {row["episode_id"]: json.loads(row["facts"])["review"] for row in read(out)}
        assert facts == {
            "a/0": {"rated": True, "rating": 1.0, "tags": ["fair"], "notes": [], "by": ["ann"]},
            "a/1": {"rated": True, "rating": 1.0, "tags": [], "notes": ["too late"], "by": ["ann"]},
        }
    code, out, err = engine_here("export", folder, "--format", "sft", "--filter", "facts.review.rated", cwd=folder)
    assert (code, out.splitlines()[0].split(":")[0]) == (0, "1 rows of 1 episodes"), err  # equal replies, once

    rules = [
        {"at": "DONE", "when": "facts.review.rating > 0", "op": "add", "to": "all", "name": "person", "value": 1.0},
        {"at": "DONE", "when": "facts.review.rating < 0", "op": "add", "name": "person", "value": -1.0},
    ]
    spec = make_spec([], rewards={"reassign": rules, "credit": {"method": "outcome", "scale": "none"}})
    with RunStore.open(folder) as store:
        result = await rescore(store, load_spec(spec), run.template, "person")
        scored = [store.trajectory(f"a/{sample}", "person") for sample in range(4)]
    assert ([change[0] for change in result.changed], result.failures.total()) == (["a/0", "a/1", "a/2"], 0)
    assert [trajectory.outcome.rewards.get("person") for trajectory in scored] == [1.0, 1.0, -1.0, None]
    assert scored[0].turns[0].rewards["person"] == 0.5
    assert run.store.trajectory("a/0").facts == run.trajectories["a/0"].facts  # the run's own results are as they were


def _json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_order_that_says_nothing_or_names_no_finished_episode_is_refused(run: Any) -> None:
    folder = run.store.folder
    for arguments, message in (
        (("a/0",), "nothing to say"),
        (("--rating", "1"), "name episodes, or choose them"),
        (("b/0", "--rating", "1"), "no episode `b/0`"),
        (("a/0", "--rating", "101"), "`rating`"),
    ):
        code, _, err = engine_here("rate", folder, *arguments, cwd=folder)
        assert code != 0
        assert message in err
    assert not (folder / FILE).exists()
