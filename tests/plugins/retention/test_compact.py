"""Compaction of a run: what goes, what stays, `kill -9` at any point of it, and a full disk."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journals import write_entries, write_result
from slow_cases import slow_but
from store_kit import make_entry, make_header, make_task, make_trajectory, plain

from engine.errors import StoreError
from engine.plugins.retention.compact import compact, measure_groups
from engine.schemas.environment import Reset
from engine.schemas.journal import ResetRecord
from engine.schemas.message import Message
from engine.schemas.trajectory import Failure
from engine.store import RunStore, database
from engine.store.lock import FILE as LOCK

GROUPS = 12
SAMPLES = 2
PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f\x15\xc4\x89"
    b"\x00\x00\x00\rIDATx\x9cc\xf8\xff\xff?\x00\x05\xfe\x02\xfe\xa75\x81\x84\x00\x00\x00\x00IEND\xaeB`\x82"
)


async def fill(out: Path, *, groups: int = GROUPS, tokens: int = 400, failed: tuple[int, ...] = ()) -> Path:
    """A run of some groups of two episodes, of which those of `failed` have a failure."""
    with RunStore.create(out, make_header()) as store:
        for index in range(groups):
            for sample in range(SAMPLES):
                await begin_and_finish(store, index, sample, tokens=tokens, failed=index in failed and sample == 1)
    return store.folder


async def begin_and_finish(store: RunStore, index: int, sample: int, *, tokens: int = 40, failed: bool = False) -> None:
    begun = await store.begin(make_task(index), sample)
    for seq in range(4):
        await write_entries(begun, make_entry(seq, index, tokens))
    trajectory = make_trajectory(index, sample)
    if failed:
        failure = Failure(kind="timeout", blame="tool", message="no answer", state="AWAITING_TOOL", turn=0)
        outcome = make_trajectory().outcome
        trajectory = make_trajectory(
            index, sample, outcome=type(outcome)(state="FAILED", event="failed", failure=failure)
        )
    await write_result(begun, trajectory)


def group(index: int) -> list[str]:
    return [f"t{index}/{sample}" for sample in range(SAMPLES)]


def content(folder: Path) -> dict[str, Any]:
    """Each episode's journal and trajectory; the kind `dropped` if its content was dropped."""
    found: dict[str, Any] = {}
    with RunStore.open(folder, readonly=True) as store:
        for row in store.episodes():
            try:
                entries = [plain(entry) for entry in store.journal(row.id)]
                found[row.id] = (row, entries, plain(store.trajectory(row.id)))
            except StoreError as error:
                found[row.id] = (row, error.kind)
    return found


def rows(folder: Path) -> list[Any]:
    with RunStore.open(folder, readonly=True) as store:
        return [*store.episodes()]


async def test_a_group_is_dropped_and_its_summary_stays(tmp_path: Path) -> None:
    folder = await fill(tmp_path)
    before, summaries = content(folder), rows(folder)
    told = compact(folder, [group(0), group(3)], keep_failed=False)
    after = content(folder)
    assert (told.groups, told.episodes) == (2, 4)
    assert rows(folder) == summaries
    assert {name for name, found in after.items() if found[1] == "dropped"} == {*group(0), *group(3)}
    assert {name: found for name, found in after.items() if found[1] != "dropped"} == {
        name: found for name, found in before.items() if name not in {*group(0), *group(3)}
    }
    with RunStore.open(folder, readonly=True) as store:
        assert len(list(store.trajectories())) == (GROUPS - 2) * SAMPLES
        assert (store.dropped().episodes, store.dropped().size) == (4, told.size)
        assert store.status == "done"
        with pytest.raises(StoreError, match=r"the content of t0/0 was dropped on 20.*`engine show`"):
            store.trajectory("t0/0")
        with pytest.raises(StoreError, match="was dropped"):
            store.journal("t0/1")


async def test_the_file_shrinks_by_what_was_dropped(tmp_path: Path) -> None:
    folder = await fill(tmp_path, tokens=20_000)
    size = (folder / "run.db").stat().st_size
    told = compact(folder, map(group, range(GROUPS - 1)), keep_failed=False)
    left = (folder / "run.db").stat().st_size
    assert told.before.file == size
    assert told.after.file == left
    assert told.size <= size - left <= 1.2 * told.size
    assert left < size / 8


async def test_a_measurement_writes_nothing_and_says_what_goes(tmp_path: Path) -> None:
    folder = await fill(tmp_path, failed=(2,))
    data = (folder / "run.db").read_bytes()
    told = measure_groups(folder, map(group, range(4)), keep_failed=True)
    assert (folder / "run.db").read_bytes() == data
    done = compact(folder, map(group, range(4)), keep_failed=True)
    assert (told.groups, told.episodes, told.size, told.failed) == (done.groups, done.episodes, done.size, done.failed)
    assert (done.groups, done.failed) == (3, 1)


async def test_a_second_compaction_drops_nothing_twice(tmp_path: Path) -> None:
    folder = await fill(tmp_path)
    first = compact(folder, [group(0)], keep_failed=False)
    second = compact(folder, [group(0), ["unknown/0"], group(1)], keep_failed=False)
    assert second.episodes == 2
    assert second.total.episodes == 4
    assert second.total.size == first.size + second.size


async def test_a_run_that_is_written_is_refused(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, make_header()) as store, pytest.raises(StoreError, match="is being written"):
        compact(store.folder, [], keep_failed=False)


async def test_the_lock_file_still_says_how_the_last_writer_ended(tmp_path: Path) -> None:
    folder = await fill(tmp_path)
    before = (folder / LOCK).read_text()
    compact(folder, [group(0)], keep_failed=False)
    assert (folder / LOCK).read_text() == before


async def test_a_running_store_drops_and_uses_the_space_again(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, make_header()) as store:
        sizes = []
        for index in range(20):
            for sample in range(SAMPLES):
                await begin_and_finish(store, index, sample, tokens=20_000)
            if index >= 2:
                await store.drop(group(index - 2))
            sizes.append(store.space().file)
        assert sizes[-1] <= sizes[4]
        assert store.dropped().episodes == 18 * SAMPLES


async def test_an_unfinished_episode_of_a_group_that_nothing_continues_is_dropped_too(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, make_header()) as store:
        begun = await store.begin(make_task(0), 0)
        await write_entries(begun, make_entry(0))
        await write_entries(begun, make_entry(1, tokens=5_000))
    told = compact(store.folder, [["t0/0"]], keep_failed=False)
    assert told.size > 40_000
    with RunStore.open(store.folder) as again:
        assert (await again.begin(make_task(0), 0)).entries == []  # from the beginning, as a new attempt
        assert again.episode("t0/0").attempt == 1
        assert again.dropped().episodes == 0


async def test_a_dropped_episode_that_is_needed_again_begins_anew(tmp_path: Path) -> None:
    folder = await fill(tmp_path, groups=2)
    compact(folder, [group(0)], keep_failed=False)
    with RunStore.open(folder) as store:
        with pytest.raises(StoreError, match="is done"):
            await store.begin(make_task(1), 0)
        await begin_and_finish(store, 0, 0)
        row = store.episode("t0/0")
        assert (row.status, row.attempt) == ("done", 1)
        assert len(store.journal("t0/0")) == 4
        assert store.dropped_ids() == {"t0/1"}


async def test_images_go_with_the_last_episode_that_shows_them(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, make_header()) as store:
        part = await store.put_image(PNG)
        for index in range(2):
            begun = await store.begin(make_task(index), 0)
            shown = Message(role="user", content=[part])
            entry = make_entry(0)
            await write_entries(begun, replace(entry, record=ResetRecord(reset=Reset(messages=[shown]))))
            await write_result(begun, make_trajectory(index, messages=[shown]))
    folder = store.folder
    assert compact(folder, [["t0/0"]], keep_failed=False).images == 0
    with RunStore.open(folder, readonly=True) as reader:
        assert reader.image(part.image).data == PNG
    told = compact(folder, [["t1/0"]], keep_failed=False)
    assert (told.images, told.image_size) == (1, len(PNG))
    with RunStore.open(folder, readonly=True) as reader:
        assert reader.image_digests() == []


async def test_engines_without_the_table_refuse_a_compacted_run(tmp_path: Path) -> None:
    folder = await fill(tmp_path, groups=2)
    version = "PRAGMA user_version"
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        assert connection.execute(version).fetchone()[0] == database.SCHEMA_VERSION
    compact(folder, [["nothing/0"]], keep_failed=False)
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        assert connection.execute(version).fetchone()[0] == database.SCHEMA_VERSION
    compact(folder, [group(0)], keep_failed=False)
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        assert connection.execute(version).fetchone()[0] == database.COMPACTED_VERSION


# --- kill -9 and a full disk -------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from engine.store import database
from engine.plugins.retention import compact as module

folder, steps, groups = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
opened = database.connect_writer

def dying(path):
    connection = opened(path)
    left = [steps]

    def step():
        left[0] -= 1
        if left[0] <= 0 and steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    if steps:
        connection.set_progress_handler(step, 10)
    else:
        connection.set_progress_handler(lambda: left.__setitem__(0, left[0] - 1) or 0, 10)
    dying.left = left
    return connection

database.connect_writer = dying
module.compact(folder, [[f"t{each}/0", f"t{each}/1"] for each in range(groups)], keep_failed=False)
print(-dying.left[0])
"""


def run_child(folder: Path, steps: int, groups: int, **limits: Any) -> subprocess.CompletedProcess[str]:
    """Compact in another process, which kills itself after `steps` × 10 instructions of SQLite; 0: never."""
    return subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(steps), str(groups)],
        capture_output=True, text=True, check=False, env={**os.environ}, timeout=120, **limits,
    )  # fmt: skip


def copy_of(folder: Path, name: str) -> Path:
    other = folder.parent / name
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    return other


@pytest.mark.slow
@pytest.mark.parametrize("points", slow_but([2, 24], 2))
async def test_killed_at_any_point_each_episode_is_whole_or_dropped(points: int, tmp_path: Path) -> None:
    groups = 6
    folder = await fill(tmp_path, tokens=3_000)
    before = content(folder)
    whole = run_child(copy_of(folder, "whole"), 0, groups)
    assert whole.returncode == 0, whole.stderr
    most = int(whole.stdout)
    goal = content(folder.parent / "whole")
    draw = random.Random(7)
    seen = set()
    for number in range(points):
        killed = copy_of(folder, f"killed-{number}")
        at = draw.randint(1 + number * most // points, max(2, (number + 1) * most // points - 1))
        assert run_child(killed, at, groups).returncode == -signal.SIGKILL
        found = content(killed)
        for index in range(GROUPS):
            states = {found[name][1] == "dropped" for name in group(index)}
            assert len(states) == 1  # a group is dropped whole or not at all
            for name in group(index):
                assert found[name] == before[name] or (index < groups and found[name] == goal[name])
        seen.add(sum(each[1] == "dropped" for each in found.values()))
        compact(killed, map(group, range(groups)), keep_failed=False)
        assert content(killed) == goal
        with closing(sqlite3.connect(killed / "run.db")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert (killed / "run.db").stat().st_size == (folder.parent / "whole" / "run.db").stat().st_size
    assert len(seen) > 1 or points < 4  # the points lie before and after commits


LIMITED = """
import resource, signal, sys
from pathlib import Path
from engine.errors import StoreError
from engine.plugins.retention.compact import compact

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    told = compact(Path(sys.argv[1]), [[f"t{each}/0", f"t{each}/1"] for each in range(6)], keep_failed=False)
    print(told.problem or "done")
except StoreError as error:
    print(error)
"""


def run_limited(folder: Path, size: int) -> subprocess.CompletedProcess[str]:
    """Compact in another process, in which no file may grow beyond `size` bytes."""
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder), str(size)],
        capture_output=True, text=True, check=False, env={**os.environ}, timeout=120,
    )  # fmt: skip


SLOW = pytest.mark.slow


@SLOW  # by default: compactions that are killed, above
@pytest.mark.parametrize("part", [0.05, 0.0, 0.3, 0.6])
async def test_a_full_disk_loses_nothing(part: float, tmp_path: Path) -> None:
    """No file may grow beyond a part of the run's size, the WAL included."""
    folder = await fill(tmp_path, tokens=30_000)
    before = content(folder)
    size = (folder / "run.db").stat().st_size
    done = run_limited(folder, int(size * part))
    assert done.returncode == 0, done.stderr
    found = content(folder)
    for name, each in found.items():
        assert each[1] == "dropped" or each == before[name]
    if part < 0.5:  # what is left does not fit beside what is there
        assert "disk" in done.stdout or "could not be shrunk" in done.stdout, done.stdout
    compact(folder, map(group, range(6)), keep_failed=False)  # with space again
    assert sum(each[1] == "dropped" for each in content(folder).values()) == 6 * SAMPLES
