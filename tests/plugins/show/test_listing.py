"""Lists of episodes: pages, sorting, filters, text search, causes, and what changes while a run is being written."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from journals import write_entries, write_result
from listing_kit import begin, ended, failure, fill, new_run
from slow_cases import slow_but_each
from store_kit import make_entry, make_task, make_trajectory

from engine.errors import StoreError
from engine.plugins.show.listing.filters import RUN
from engine.plugins.show.listing.heads import read_head
from engine.plugins.show.listing.listing import SORTS, Listing
from engine.plugins.show.listing.sources import find
from engine.schemas.journal import ScoreRecord
from engine.store import RunStore, results
from engine.store.episode_filter import END_VALUES, EpisodeFilter


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six tasks with two samples each, all finished."""
    with new_run(tmp_path_factory.mktemp("runs")) as store:
        asyncio.run(fill(store))
    return store.folder


def names(listing: Listing, *arguments: object, **named: object) -> list[str]:
    return [row.episode for row in listing.page(*arguments, **named).rows]  # type: ignore[arg-type]


def test_a_row_has_what_the_episode_ended_with(run: Path) -> None:
    with Listing([run]) as listing:
        page = listing.page()
        assert page.total == 12
        row = next(row for row in page.rows if row.episode == "t5/1")
        store = listing.store(row.run)
        began, done = store.episode("t5/1").started, store.episode("t5/1").ended
    assert began is not None
    assert done is not None
    assert row.plain() == {
        "run": run.name, "episode": "t5/1", "task": "t5", "sample": 1, "seed": str(2**62 + 1), "status": "done", "attempt": 0,
        "outcome": "solved", "state": "DONE", "event": "satisfied", "limit": None, "failure": None, "blame": None,
        "message": None, "failed_state": None, "failed_turn": None, "solved": True, "trainable": True, "reward": 5.0,
        "rewards": {"answer": 6.0, "format": -1.0}, "turns": {"assistant": 2, "user": 1, "tool": 2}, "tool_errors": 0,
        "tokens": {"sampled": 10, "trained": 10, "total": 20, "context": 0}, "seconds": done - began, "started": began,
        "ended": done, "versions": [2, 2], "step": None, "branches": 2, "images": 0, "cost": 0.0,
        "task_fields": {"level": "hard", "answer": "5"}, "review": None,
    }  # fmt: skip
    json.dumps(row.plain())


def test_the_values_of_a_head_are_those_of_the_trajectory() -> None:
    for made in (make_trajectory(1), ended(0, 0), ended(2, 1), ended(5, 0), make_trajectory(0, branches=0)):
        head = read_head(results.encode_trajectory(made).trajectory)
        assert {name: of(head) for name, of in END_VALUES.items()} == {
            name: of(made) for name, of in END_VALUES.items()
        }
    nan = replace(make_trajectory(), facts={"x": float("inf")})
    assert read_head(results.encode_trajectory(nan).trajectory).facts == {"x": float("inf")}


@pytest.mark.parametrize(
    "expression",
    [
        "outcome.solved", "outcome.reward < 3.5 && turns.assistant > 1", 'task.level == "hard"', 'facts.tries == 5 || outcome.failure != ""',
        'outcome.rewards["answer"] >= 3.0', 'last.text.contains("5")', "episode.branches == 2 && episode.version == 2",
        'episode.id == "t3/1"', "episode.images > 0", 'outcome.limit == "assistant_turns"', "limits.assistant_turns > 3 && episode.sample == 1",
        "rewards.total > 2.0", "!feedback.solved", "feedback.solved && feedback.wrong > 3", "feedback.malformed || !feedback.satisfied", "episode.trained > 5 && episode.seconds < 1000.0", "tools.calls == 2 && tokens.sampled == 10",
        "episode.trainable && images.shown == 0",
    ],
)  # fmt: skip
def test_a_filter_chooses_what_the_filter_of_export_chooses(run: Path, expression: str) -> None:
    with RunStore.open(run, readonly=True) as store:
        keep = EpisodeFilter(store, expression)
        chosen = []
        for trajectory in store.trajectories():
            try:
                chosen += [trajectory.episode_id] if keep(trajectory) else []
            except StoreError:  # no such fact; a list leaves it out
                pass
    with Listing([run]) as listing:
        assert names(listing, expression) == chosen


def by_columns(listing: Listing) -> bool:
    """Whether what the newest filter chose is a condition, and not written down."""
    assert listing._chosen is not None
    return bool(listing._chosen[1].conditions)


async def test_what_a_filter_over_columns_chooses_is_not_written_down(tmp_path: Path) -> None:
    """Unless SQL cannot decide for an episode: one that has no reward, here."""
    with new_run(tmp_path) as store:
        await fill(store)
    columns = "outcome.reward < 3.5 || turns.assistant > 1"
    with Listing([store.folder]) as listing:
        for sort, descending in product(("order", "reward"), (False, True)):
            page = listing.page(columns, sort=sort, descending=descending, offset=1, limit=3)
            assert by_columns(listing)
            whole = names(listing, f'({columns}) && task.answer != ""', sort=sort, descending=descending)
            assert not by_columns(listing)
            assert page.total == len(whole)
            assert [row.episode for row in page.rows] == whole[1:4]
        high = names(listing, "outcome.reward >= 3.5")
        assert listing.totals(columns) == listing.totals(f'({columns}) && task.answer != ""')
    with closing(sqlite3.connect(store.folder / "run.db")) as connection, connection:
        connection.execute("UPDATE episodes SET reward = NULL WHERE id = 't3/1'")
    with Listing([store.folder]) as listing:
        assert names(listing, "!(outcome.reward < 3.5)") == sorted({"t3/1", *high})
        assert not by_columns(listing)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("outcome.rewrad > 1.0", "reward"),
        ("otcome.reward > 1.0", "outcome"),
        ("turns.assistant", "compare it"),
        ('outcome.reward > "1"', "cannot be applied"),
        ("outcome.reward >", "column 17"),
        ('task.levle == "hard"', "Did you mean `task.level`?"),
    ],
)
def test_a_wrong_filter_is_an_error_that_says_what_to_write(run: Path, expression: str, message: str) -> None:
    with Listing([run]) as listing, pytest.raises(StoreError, match="filter") as caught:
        listing.page(expression)
    assert message in str(caught.value)


def test_a_query_takes_no_parameter_of_the_filter(run: Path) -> None:
    with Listing([run]) as listing, pytest.raises(ValueError, match="step"):
        listing.query("SELECT :step {}", "outcome.reward > 0.0", "", step=1)


def test_episodes_without_a_value_are_counted(run: Path) -> None:
    with Listing([run]) as listing:
        page = listing.page("facts.tries > 1")
        assert [row.episode for row in page.rows] == ["t3/0", "t3/1", "t5/0", "t5/1"]
        assert page.skipped == 6
        assert page.skipped_because is not None
        assert page.skipped_because.startswith("t0/0: ")
        assert listing.page("has(facts.tries) && facts.tries > 1").skipped == 0


@pytest.mark.parametrize("sort", slow_but_each(3, [*SORTS[:-1], "reward:answer", 'reward:no"such']))
@pytest.mark.parametrize("filter", [None, "outcome.reward > 0.5"])
def test_each_sort_key_orders_the_whole_list_over_pages(run: Path, sort: str, filter: str | None) -> None:
    with Listing([run]) as listing:
        whole = names(listing, filter, sort=sort)
        assert sorted(whole) == sorted(names(listing, filter))
        paged = [
            name for offset in range(0, 12, 5) for name in names(listing, filter, sort=sort, offset=offset, limit=5)
        ]
        assert paged == whole
        keys = [id for _, id in listing.keys(filter, sort=sort, descending=True)]
        assert keys == names(listing, filter, sort=sort, descending=True)


def test_sorting_puts_the_largest_first_and_missing_values_last(run: Path) -> None:
    with Listing([run]) as listing:
        rows = listing.page(sort="reward:answer", descending=True).rows
        assert [row.rewards["answer"] for row in rows] == sorted((row.rewards["answer"] for row in rows), reverse=True)
        assert names(listing, sort="limit", descending=False)[:4] == ["t1/0", "t1/1", "t4/0", "t4/1"]
        with pytest.raises(StoreError, match="cannot sort by `rewards`; the names are order, run"):
            listing.page(sort="rewards")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("said \"2\"\näpfel", ["t2/0", "t2/1"]), ("LET ME SEE", 12), ('"a":1', 12), ("{", 12), ("\\n", 0), ("tokens", 0), ("assistant", 0),
        ("4 + 1?", ["t4/0", "t4/1"]),
    ],
)  # fmt: skip
def test_text_is_searched_in_what_was_said_alone(run: Path, text: str, found: list[str] | int) -> None:
    with Listing([run]) as listing:
        chosen = names(listing, text=text)
        assert chosen == found if isinstance(found, list) else len(chosen) == found


async def test_text_is_searched_in_what_a_judge_said_of_the_last_attempt(tmp_path: Path) -> None:
    with new_run(tmp_path) as store:
        for index, replies in enumerate((['Poor: "no" reason', "good"], [], ["POOR work"])):
            begun = await store.begin(make_task(index), 0)
            record = ScoreRecord(rewards=[], replies=replies)
            await write_entries(begun, replace(make_entry(0), record=record))
            if index == 2:
                await begun.restart()
            await write_result(begun, ended(index, 0))
        begun = await store.begin(make_task(3), 0)  # unfinished
        await write_entries(begun, replace(make_entry(0), record=ScoreRecord(rewards=[], replies=["poor"])))
    with Listing([store.folder]) as listing:
        assert names(listing, text="poor") == ["t0/0"]
        assert names(listing, text='"NO" reason') == ["t0/0"]
        assert names(listing, text="replies") == []


def test_causes_count_failures_and_limits_and_their_filters_choose_them(run: Path) -> None:
    with Listing([run]) as listing:
        causes = listing.causes()
        assert [(cause.failure, cause.blame, cause.limit, cause.count, cause.share) for cause in causes] == [
            (None, None, "assistant_turns", 4, 4 / 12),
            ("tool_timeout", "tool", None, 4, 4 / 12),
        ]
        assert causes[1].message == "tool `t` took longer than 5 s"
        assert (causes[1].run, causes[1].episode, causes[1].state) == (run.name, "t0/0", "AWAITING_TOOL")
        for cause in causes:
            assert listing.page(cause.filter).total == cause.count
        assert [cause.count for cause in listing.causes("outcome.failure == ''")] == [4]
        assert listing.totals().plain() == {
            "episodes": 12, "done": 12, "solved": 4, "failed": 4, "limited": 4, "reward": 2.0,
        }  # fmt: skip


def test_neighbours_and_groups_follow_the_list(run: Path) -> None:
    with Listing([run]) as listing:
        found = listing.neighbours(run.name, "t2/0", "outcome.solved", sort="reward", descending=True)
        assert found.plain() == {"previous": [run.name, "t2/1"], "next": None, "position": 3, "total": 4}
        assert listing.neighbours(run.name, "t0/0", "outcome.solved").position == -1
        assert [row.sample for row in listing.group(run.name, "t4")] == [0, 1]
        with pytest.raises(StoreError, match="has no task `t9`"):
            listing.group(run.name, "t9")
        with pytest.raises(StoreError, match="there is no run `x`"):
            listing.row("x", "t0/0")


async def test_a_list_follows_a_run_that_is_written(tmp_path: Path) -> None:
    with new_run(tmp_path) as store:
        await fill(store, 1, 1)
        begun = await begin(store, 1, 4)
        name = begun.episode_id
        with Listing([store.folder]) as listing:
            rows = {row.episode: row for row in listing.page().rows}
            assert (rows[name].status, rows[name].turns, rows[name].tokens, rows[name].state) == (
                "running", {"assistant": 2}, {"sampled": 32}, "AWAITING_TOOL",
            )  # fmt: skip
            assert names(listing, "outcome.reward < 100.0") == ["t0/0"]
            assert names(listing, 'task.level == "hard"') == [name]
            assert names(listing, 'episode.status == "running" && run.step == -1') == [name]
            await write_result(begun, ended(1, 0))
            assert listing.row(store.run_id, name).outcome == "limit: assistant_turns"
            assert names(listing, "outcome.reward < 100.0") == ["t0/0", name]
            assert await store.begin_again(["tool"]) == ["t0/0"]
            assert names(listing, "outcome.reward < 100.0") == [name]
            assert [(row.status, row.attempt, row.rewards) for row in listing.group(store.run_id, "t0")] == [
                ("pending", 1, {})
            ]
            assert listing.causes()[0].limit == "assistant_turns"
            assert len(listing.causes()) == 1


async def test_another_run_in_the_same_folder_replaces_the_summaries(tmp_path: Path) -> None:
    with new_run(tmp_path, created=1.0) as store:
        await fill(store, 2, 1)
    with Listing([store.folder]) as listing:
        assert listing.page("outcome.reward < 100.0").total == 2
    for file in store.folder.iterdir():
        file.unlink()
    store.folder.rmdir()
    with new_run(tmp_path, created=2.0) as store:
        await fill(store, 1, 1, first=2)
    with Listing([store.folder]) as listing:
        assert names(listing, "outcome.reward < 100.0") == ["t2/0"]


def test_a_list_writes_nothing_into_the_run(run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.suffix == ".db" or path.suffix == ".lock"}
    with Listing([run]) as listing:
        listing.page("outcome.solved", text="a")
    assert {
        path.name: path.read_bytes() for path in run.iterdir() if path.suffix == ".db" or path.suffix == ".lock"
    } == before


async def test_runs_are_listed_together_and_failures_stay_apart(tmp_path: Path) -> None:
    folders = []
    for number in range(2):
        with new_run(tmp_path, f"run-{number}") as store:
            await fill(store, 2, 1, first=number)
            folders.append(store.folder)
    with Listing(folders) as listing:
        assert [(row.run, row.episode) for row in listing.page().rows] == [
            ("run-0", "t0/0"), ("run-0", "t1/0"), ("run-1", "t1/0"), ("run-1", "t2/0"),
        ]  # fmt: skip
        assert [row.run for row in listing.page('run.id == "run-1" && outcome.solved').rows] == ["run-1"]
        assert listing.causes()[1].count == 1
    assert find("run-1", tmp_path) == folders[1]
    assert failure().blame == "tool"


async def test_a_run_of_an_older_engine_has_the_same_list(tmp_path: Path) -> None:
    folders = []
    for name in ("new", "old"):
        with new_run(tmp_path / name) as store:
            await fill(store)
            folders.append(store.folder)
    with sqlite3.connect(folders[1] / "run.db") as connection:
        connection.execute("DROP TABLE summaries")
    expressions = ["facts.tries > 1", 'outcome.rewards["answer"] >= 3.0 && turns.user > 0', "episode.version >= 0"]
    times = {"started": None, "ended": None, "seconds": None}
    for sort, filter in product(("turns.user", "tokens.trained", "reward:answer"), (None, *expressions)):
        pages = []
        for folder in folders:
            with Listing([folder]) as listing:
                page = listing.page(filter, sort=sort, descending=True)
            pages.append(([row.plain() | times for row in page.rows], page.total, page.skipped, page.skipped_because))
        assert pages[0] == pages[1]
        assert pages[0][1] > 0


async def test_dropped_episodes_keep_what_filters_read(tmp_path: Path) -> None:
    with new_run(tmp_path) as store:
        await fill(store)
        await store.drop(["t3/0", "t3/1"])
    with Listing([store.folder]) as listing:
        assert names(listing, "has(facts.tries) && facts.tries == 3") == ["t3/0", "t3/1"]
        assert listing.page('last.text != "nobody"').skipped == 2
    with sqlite3.connect(store.folder / "run.db") as connection:
        connection.execute("DROP TABLE summaries")
    with Listing([store.folder]) as listing:
        page = listing.page("has(facts.tries)")
        assert (page.skipped, page.skipped_because) == (2, "t3/0: its content was dropped to save space")


async def test_pages_of_several_runs_are_in_one_order(tmp_path: Path) -> None:
    folders = []
    for number in range(3):
        with new_run(tmp_path, f"run-{number}") as store:
            await fill(store, 5, 2, first=number)
            folders.append(store.folder)
    with Listing(folders) as listing:
        for sort, descending in product(("order", "run", "episode", "reward", "limit", "turns.user"), (False, True)):
            whole = listing.keys(sort=sort, descending=descending)
            assert len(whole) == 30
            pages = [listing.page(sort=sort, descending=descending, offset=at, limit=7).rows for at in range(0, 30, 7)]
            assert [(row.run, row.episode) for page in pages for row in page] == whole
        rows = listing.page(sort="reward", descending=True).rows
        assert [row.reward for row in rows] == sorted((row.reward or 0.0 for row in rows), reverse=True)
        assert [row.run for row in listing.page(sort="run", descending=True, limit=1).rows] == ["run-2"]
        run, episode = listing.keys(sort="limit")[4]
        found = listing.neighbours(run, episode, sort="limit")
        assert [found.previous, found.next] == [listing.keys(sort="limit")[at] for at in (3, 5)]


async def test_a_damaged_episode_is_listed_and_named(tmp_path: Path) -> None:
    with new_run(tmp_path) as store:
        await fill(store, 3, 1)
    with sqlite3.connect(store.folder / "run.db") as connection:
        connection.execute("UPDATE trajectories SET trajectory = '{}' WHERE episode = 2")
        connection.execute("UPDATE branches SET weight_versions = x'01' WHERE episode = 3")
        connection.execute("DROP TABLE summaries")
    with Listing([store.folder]) as listing:
        assert names(listing) == ["t0/0", "t1/0", "t2/0"] == names(listing, "outcome.reward < 100.0")
        page = listing.page("episode.trained > 0")
        assert [row.episode for row in page.rows] == ["t0/0"]
        assert page.skipped == 2
        assert page.skipped_because is not None
        assert page.skipped_because.startswith("t1/0: the trajectory is damaged")
        assert "damaged" in (listing.row(store.run_id, "t2/0").message or "")
        assert names(listing, text="let me see") == ["t0/0", "t2/0"]


def test_the_page_about_show_has_every_sort_key_and_every_variable_of_runs() -> None:
    page = (Path(__file__).parents[3] / "docs/looking.md").read_text()
    for name in SORTS:
        assert f"`{name}`" in page
    for name, member in RUN.fields.items():
        assert f"| `run.{name}` | {', '.join(member.types)} | {member.doc} |" in page


def test_threads_share_a_list_and_several_lists_a_run(run: Path) -> None:
    expected = ["t2/0", "t2/1", "t5/0", "t5/1"]

    def own(_: int) -> list[str]:
        with Listing([run]) as listing:
            return names(listing, "outcome.solved")

    with ThreadPoolExecutor(6) as pool, Listing([run]) as shared:
        assert list(pool.map(own, range(6))) == [expected] * 6
        found = pool.map(lambda n: names(shared, "outcome.solved" if n % 2 else "!outcome.solved"), range(12))
        assert [sorted(each) == expected for each in found] == [bool(n % 2) for n in range(12)]
