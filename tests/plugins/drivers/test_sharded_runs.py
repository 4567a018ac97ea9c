"""The commands that read a run, on a sharded run with duplicates: each gives what it gives of the same run in one store."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from command_line import engine_here
from written_specs import save_spec

from engine.backends.registry import open_backend
from engine.plugins.drivers.places import ShardPlace
from engine.plugins.drivers.publisher import Publisher
from engine.plugins.drivers.sharded import note_status
from engine.plugins.drivers.shards import create_shards, list_parts
from engine.runner.runner import Runner
from engine.spec.tasks import load_tasks
from engine.store import RunStore, list_runs
from engine.store.header import RunHeader
from engine.tokens.loading import load_format

pytestmark = pytest.mark.slow
LEASES = (("0", (0, 1)), ("1", (1, 2)), ("2", (3,)))
"""Which tasks each driver has done: the lease of task 1 was lost after driver 0 had published it."""
CALL = {"tool_calls": [{"name": "calculate", "arguments": {"expression": "2 + 3"}}]}


class Runs(NamedTuple):
    """One run in one store, and the same run in shards."""

    folder: Path
    one: Path
    many: Path

    @property
    def forms(self) -> dict[str, str]:
        """What a command may be given to name the sharded run."""
        return {"folder": str(self.many), "shards": str(self.many / "shards"), "url": f"memory://{self.folder.name}/r"}


def write_spec(folder: Path, tokenizer: Path) -> Path:
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "sums",
        "model": {"path": str(tokenizer), "tool_calls": "hermes"},
        "backend": {"kind": "scripted", "replies": [CALL, "It is 5.", "It is 7.", "It is 9."]},
        "tasks": {
            "source": "python",
            "use": "engine.environments.arithmetic:problems",
            "with": {"count": 4},
            "id": "id",
        },
        "environment": {"use": "engine.environments.arithmetic:Arithmetic"},
        "tools": [{"use": "engine.environments.tools.calculator:calculate"}],
        "user": {"use": "engine.environments.arithmetic:Teacher"},
        "machine": "tools_and_user",
        "limits": {"assistant_turns": 4},
        "rewards": {"credit": {"method": "turn_return", "gamma": 0.95}},
        "rollout": {"samples_per_task": 2, "seed": 0},
    }
    return save_spec(folder / "spec.yaml", spec)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Runs:
    """Driver 2 has published nothing; the store of driver 1 is on another machine."""
    folder = tmp_path_factory.mktemp("sharded")
    code, _, err = engine_here("run", write_spec(folder, tiny_tokenizer_dir), cwd=folder)
    assert code == 0, err
    (one,) = list_runs(folder / "runs")
    with RunStore.open(one, readonly=True) as stored:
        loaded = stored.header.loaded_spec()
    header = RunHeader.of(loaded, overrides=[])
    tasks = load_tasks(loaded)
    many = folder / "runs" / header.run_id
    with RunStore.create(folder / "runs", header) as own:
        asyncio.run(own.plan(tasks, 2))
    place = create_shards(many, header)

    async def drive(store: RunStore, numbers: tuple[int, ...]) -> None:
        form = load_format(loaded.spec.model, loaded.base)
        backend = open_backend(loaded, form)
        await backend.start()
        await Runner(loaded, [tasks[number] for number in numbers], form, backend, store).run()
        await backend.close()

    for name, numbers in LEASES:
        with RunStore.create(many / "drivers", header, name=name) as store:
            asyncio.run(drive(store, numbers))
            publisher = Publisher(store.folder, place, name)
            if name != "2":
                for task in publisher.ready():
                    publisher.publish([task])
    shutil.rmtree(many / "drivers" / "1")
    made = Runs(folder, one, many)
    url = create_shards(many, header, made.forms["url"])
    for file in Path(place).iterdir():  # the URL has what the folder has
        ShardPlace(url).put(file, file.name)
    create_shards(many, header)
    return made


def engine(runs: Runs, *arguments: str | Path) -> str:
    code, out, err = engine_here(*arguments, cwd=runs.folder)
    assert code == 0, out + err
    return out


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The rows of an export, without what names the run and says when it was made."""
    table = pq.read_table(file).to_pylist() if file.suffix == ".parquet" else map(json.loads, file.open())
    rows = [{name: value for name, value in row.items() if name != "run_id"} for row in table]
    for row in rows:
        if "metadata" in row:
            told = row["metadata"]
            row["metadata"] = {**(json.loads(told) if isinstance(told, str) else told), "created": None}
    return rows


def tasks_in(form: str) -> list[int]:
    """The tasks of which something can be read: driver 2 has published nothing."""
    return [0, 1, 2, 3] if form == "folder" else [0, 1, 2]


FORMS = pytest.mark.parametrize("form", ["folder", "shards", "url"])
ENDED = ("started", "ended", "seconds", "run")


def test_duplicates_are_there(runs: Runs) -> None:
    parts = [part.name for part in list_parts(ShardPlace(runs.forms["url"]))]
    assert parts == ["part-0-000000", "part-0-000001", "part-1-000000", "part-1-000001"]
    told = [pq.read_table(runs.many / "shards" / f"{name}.parquet").column("task_id").to_pylist() for name in parts]
    assert [set(each) for each in told] == [{f"sum-0-000{task}"} for task in (0, 1, 1, 2)]


@FORMS
def test_show_lists_each_episode_once(runs: Runs, form: str) -> None:
    name = runs.forms[form]
    told, expected = (json.loads(engine(runs, "show", run, "--json")) for run in (name, str(runs.one)))
    wanted = {f"sum-0-000{task}" for task in tasks_in(form)}

    def plain(document: Any) -> list[Any]:
        return [{key: row[key] for key in row if key not in ENDED} for row in document["rows"] if row["task"] in wanted]

    assert told["run"] == name
    assert told["total"] == 2 * len(wanted)
    assert plain(told) == plain(expected)
    filtered = json.loads(engine(runs, "show", name, "--json", "--filter", 'task.id == "sum-0-0001" && turns.user > 1'))
    assert [row["episode"] for row in filtered["rows"]] == ["sum-0-0001/0", "sum-0-0001/1"]


@FORMS
def test_show_names_commands_that_work(runs: Runs, form: str) -> None:
    out = engine(runs, "show", runs.forms[form])
    (hint,) = re.findall("To show one: engine (.*)", out)
    assert hint.split()[1:] == [runs.many.name if form == "folder" else runs.forms[form], "sum-0-0000/0"]
    assert "It is 9." in engine(runs, *hint.split())
    code, _, err = engine_here("show", runs.forms[form], "nothing", cwd=runs.folder)
    (hint,) = re.findall("`engine (.*)` lists them", err)
    assert code == 2
    assert engine(runs, *hint.split()).splitlines()[2:] == out.splitlines()[2:]


def test_shards_have_the_status_of_their_run(runs: Runs, tmp_path: Path) -> None:
    with RunStore.open(runs.many, readonly=True) as stored:
        header = stored.header
    store = RunStore.create(tmp_path, header)
    url = create_shards(store.folder, header, f"memory://{tmp_path.name}")
    assert f" · running · {url}" in engine(runs, "show", url)
    store.close()
    note_status(store.folder)  # as `engine run` does when it ends
    assert f" · interrupted · {url}" in engine(runs, "show", url)
    store = RunStore.open(store.folder)
    note_status(store.folder, "running")  # and when it begins again
    assert f" · running · {url}" in engine(runs, "show", url)
    asyncio.run(store.plan(load_tasks(header.loaded_spec())[:2], 2))
    shutil.copytree(runs.many / "drivers" / "0", store.folder / "drivers" / "0")
    store.close()
    note_status(store.folder)
    assert f" · done · {url}" in engine(runs, "show", url)


@FORMS
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "sft", "trl", "verl"])
def test_export_writes_the_rows_of_one_store(runs: Runs, form: str, kind: str, tmp_path: Path) -> None:
    suffix = {"sft": "jsonl", "trl": "parquet", "verl": "parquet"}.get(kind, kind)
    found = []
    for name, filters in (
        (runs.forms[form], []),
        (str(runs.one), [] if form == "folder" else ["--filter", 'episode.task != "sum-0-0003"']),
    ):
        file = tmp_path / f"{len(found)}.{suffix}"
        engine(runs, "export", name, "--format", kind, "-o", file, *filters)
        found.append(rows_of(file))
    assert len(found[0]) > 2
    assert kind != "sft" or '"calculate"' in found[0][0]["tools"]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kind", "file"), [("jsonl", "rows.jsonl"), ("sft", "sft.jsonl"), ("trl", "trl_turns.parquet")]
)
def test_export_of_shards_alone_needs_a_file(runs: Runs, kind: str, file: str) -> None:
    for form in ("shards", "url"):
        name = runs.forms[form]
        code, _, err = engine_here("export", name, "--format", kind, cwd=runs.folder)
        assert code == 2
        assert (
            err.strip()
            == f"{name} has only the shards of a run, so there is no folder for {file}; say where to write it: --out FILE"
        )
    assert str(runs.many / file) in engine(runs, "export", runs.many, "--format", kind)
    (runs.many / file).unlink()


@FORMS
def test_a_scenario_of_an_episode_passes(runs: Runs, form: str, tmp_path: Path) -> None:
    shutil.copy(runs.folder / "spec.yaml", tmp_path)
    file = tmp_path / "spec.test.yaml"
    out = engine(runs, "export", runs.forms[form], "--format", "scenario", "--episode", "sum-0-0001/1", "-o", file)
    assert "which passes" in out


@FORMS
def test_compare_pairs_the_tasks(runs: Runs, form: str) -> None:
    told = json.loads(engine(runs, "compare", runs.one, runs.forms[form], "--json"))
    assert (told["tasks"], told["only_first"], told["only_second"]) == (len(tasks_in(form)), 4 - len(tasks_in(form)), 0)
    assert told["verdicts"]["same"] == told["tasks"]
    assert {each["difference"] for each in told["differences"].values()} == {0.0}


@FORMS
def test_replay_rebuilds_every_episode(runs: Runs, form: str) -> None:
    count = 2 * len(tasks_in(form))
    out = engine(runs, "replay", runs.forms[form])
    assert re.fullmatch(rf"{count} episodes, \d+ tokens replayed: {count} the same to the byte\n", out)
    assert engine(runs, "replay", runs.forms[form], "sum-0-0001/0").startswith("1 episodes, ")


@FORMS
def test_a_fork_is_refused(runs: Runs, form: str) -> None:
    code, _, err = engine_here("replay", runs.forms[form], "--from-turn", "1", cwd=runs.folder)
    assert code == 1
    assert err.startswith(f"{runs.forms[form]} is a run of several drivers; forks of such runs are not supported")
    assert set(list_runs(runs.folder / "runs")) == {runs.one, runs.many}


@FORMS
def test_view_writes_a_page_of_each_episode_once(runs: Runs, form: str, tmp_path: Path) -> None:
    count = 2 * len(tasks_in(form))
    out = engine(runs, "view", runs.forms[form], "--export", tmp_path / "page.html")
    assert f"page.html: {count} of {count} episodes" in out


@FORMS
def test_what_needs_one_store_is_refused(runs: Runs, form: str) -> None:
    name = runs.forms[form]
    code, _, err = engine_here("rescore", name, "--spec", "spec.yaml", cwd=runs.folder)
    assert code == 1
    assert err.startswith(f"{name} is a sharded run: a score is written into the store of a run")
    code, _, err = engine_here("eval", name, cwd=runs.folder)
    assert code == 1
    assert "is a stored run, and `engine eval` runs a spec: give SPEC" in err
    if form != "folder":
        code, _, err = engine_here("run", "--resume", name, cwd=runs.folder)
        assert code == 1
        assert f"{name} has only the shards of a run, which can be read" in err


RAW = re.compile(r"malformed|not a database|no such table|sqlite3\.|Traceback|ArrowInvalid: |Parquet magic")


@pytest.mark.parametrize("seed", range(24))
def test_random_damage_of_a_shard_is_named(runs: Runs, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    many = tmp_path / runs.many.name
    shutil.copytree(runs.many, many)
    files = sorted(each for each in many.rglob("*") if each.is_file() and each.suffix in (".db", ".parquet", ".json"))
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    if seed % 3 == 0:
        data = data[: rng.randrange(len(data))]
    for _ in range(1 + 40 * (seed % 2)):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    for words in (["show", "--json"], ["export", "--out", str(tmp_path / "rows.jsonl")], ["replay"], ["compare"]):
        command = [words[0], str(many), *([str(many)] if words == ["compare"] else words[1:])]
        code, out, err = engine_here(*command, cwd=tmp_path)
        told = f"{file.relative_to(many)}, {words[0]}: {code}\n{out}{err}"
        assert not RAW.search(out + err), told
        if code == 0 and words[0] == "show":
            done = [row for row in json.loads(out)["rows"] if row["status"] == "done"]
            assert len(done) == 8 or "damaged" in err, told
        if code != 0:
            assert any(each in out + err for each in ("damaged", "complete", "cannot", "not a", "replayed")), told


def test_what_the_store_of_a_driver_has_lost_is_named_if_no_shard_has_it(runs: Runs, tmp_path: Path) -> None:
    many = tmp_path / runs.many.name
    shutil.copytree(runs.many, many)
    for name in ("0", "2"):  # the episodes of driver 0 are in its shards
        with sqlite3.connect(many / "drivers" / name / "run.db") as connection:
            for table in ("trajectories", "branches", "postings", "journal", "crash_counts", "episodes"):
                connection.execute(f"DELETE FROM {table}")
    code, out, err = engine_here("show", str(many), "--json", cwd=tmp_path)
    assert code == 0, err
    assert sum(row["status"] == "done" for row in json.loads(out)["rows"]) == 6
    assert re.search(r"is damaged: 2 of 6 ended episodes are lost \(\S+/0, \S+/1\)", err), err
