"""Shards in an object store: a run of several drivers through `s3://`, with an outage in the middle.

Needs `S3_PYTHON`: the Python of an environment with Ray, s3fs and moto's server (`scripts/trainer_envs.sh install s3`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from written_specs import save_spec, scripted_spec

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.exhaustive, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
URL = "s3://bucket/runs/r1"
TASKS, SAMPLES = 60, 2
EPISODES = [f"t{task}/{sample}" for task in range(TASKS) for sample in range(SAMPLES)]


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Store:
    """The server, and commands that find it by their environment."""

    def __init__(self, python: str, folder: Path) -> None:
        script = Path(__file__).parent / "s3_server.py"
        self._server = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._python, self._folder = python, folder
        self.environ = {
            "AWS_ENDPOINT_URL": self._line(),
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
            "RAY_AUTH_MODE": "disabled",
            "EPISODE_ENGINE_CACHE": str(folder / "cache"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "core" / "runner")]),
        }

    def _line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()

    def ask(self, *words: str | Path) -> Any:
        """What the server answers to a line."""
        assert self._server.stdin is not None
        print(*words, file=self._server.stdin, flush=True)
        return json.loads(self._line())

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """Start `engine` with these words."""
        return subprocess.Popen(
            [self._python, "-m", "engine.cli.main", *map(str, words)],
            cwd=self._folder,
            env=os.environ | self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def engine(self, *words: str | Path) -> Ended:
        """Run `engine` to its end."""
        process = self.start(*words)
        out, err = process.communicate()
        return Ended(process.returncode, out, err)

    def close(self) -> None:
        self._server.communicate()


def spec_of(folder: Path, tokenizer: Path) -> Path:
    """Episodes of two turns; the first answer is wrong, the second right."""
    replies = [{"text": text, "delay": 0.3} for text in ("It is 41.", "It is 42.")]
    spec: dict[str, Any] = {
        **scripted_spec("stored", tokenizer, replies, TASKS),
        "user": {"use": "code_for_tests:Critic"},
        "machine": "retry_with_feedback",
        "rollout": {"samples_per_task": SAMPLES, "concurrency": 4, "live_episodes": 4, "seed": 3},
    }
    return save_spec(folder / "spec.yaml", spec)


class Story(NamedTuple):
    """A run of two drivers whose object store stops after their first parts, and comes back; then the run continues with three."""

    store: Store
    one: Path
    """The same run with one driver."""
    many: Path
    failed: Ended
    unread: Ended
    """`engine show` while the store was away."""
    before: dict[str, str]
    """The objects, by key, and their ETags, when the store was back."""
    shown: Ended
    """`engine show` then, with two uploads that were not completed."""
    resumed: Ended
    after: dict[str, str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Iterator[Story]:
    python = os.environ.get("S3_PYTHON")
    if python is None:
        pytest.skip("NOT CHECKED: S3_PYTHON names no Python with s3fs, moto's server and Ray (see docs/scale.md)")
    folder = tmp_path_factory.mktemp("stored")
    store = Store(python, folder)
    try:
        spec = spec_of(folder, tiny_tokenizer_dir)
        alone = store.engine("run", spec, "-q", "--out", "one")
        assert alone.code == 0, alone.err
        places = ("--set", f"rollout.shards={URL}", "--set", "rollout.drivers=2")
        run = store.start("run", spec, "-q", "--out", "many", *places)
        while not {f"runs/r1/episodes-{driver}-000000.parquet" for driver in "01"} <= store.ask("list").keys():
            assert run.poll() is None, run.communicate()
            time.sleep(0.2)
        store.ask("stop")
        out, err = run.communicate()
        unread = store.engine("show", URL)
        store.ask("start")
        before = store.ask("list")
        store.ask("half", "runs/r1/episodes-0-000001.parquet")
        store.ask("half", "runs/r1/episodes-1-000001.parquet")
        shown = store.engine("show", URL, "--json", "--limit", "1000")
        (one,), (many,) = (list((folder / name).iterdir()) for name in ("one", "many"))
        resumed = store.engine("run", "--resume", many, "-q", "--set", "rollout.drivers=3")
        yield Story(
            store, one, many, Ended(run.returncode, out, err), unread, before, shown, resumed, store.ask("list")
        )
    finally:
        store.close()


def test_an_outage_ends_the_run_with_its_address_and_the_command_that_continues_it(story: Story) -> None:
    assert story.failed.code == 1
    assert re.search(rf"cannot (write|list) {URL}.*: EndpointConnectionError: Could not connect", story.failed.err)
    assert "check the URL, the network and the credentials" in story.failed.err
    told = story.failed.out + story.failed.err
    assert f"To continue: engine run --resume many/{story.many.name}" in told
    assert story.unread.code == 2
    assert story.unread.err.startswith(f"cannot read {URL}/run.json: EndpointConnectionError: Could not connect")


def test_what_was_published_before_the_outage_is_read_and_uploads_that_were_not_completed_are_not(story: Story) -> None:
    parts = {key.rpartition("/")[2] for key in story.before}
    assert {"run.json", "status.json", *(f"episodes-{driver}-000000.parquet" for driver in "01")} <= parts
    assert "episodes-0-000001.parquet" not in parts
    told = json.loads(story.shown.out)
    shown = [row["episode"] for row in told["rows"]]
    assert shown == sorted(shown, key=EPISODES.index)
    assert 0 < len(shown) < len(EPISODES)
    assert {row["solved"] for row in told["rows"]} == {True}


def test_the_run_continues_with_another_number_of_drivers_and_publishes_the_rest(story: Story, tmp_path: Path) -> None:
    assert story.resumed.code == 0, story.resumed.err
    assert "3 drivers" in story.resumed.out + story.resumed.err
    kept = story.before.keys() - {"runs/r1/status.json"}
    assert {key: story.after[key] for key in kept} == {key: story.before[key] for key in kept}
    story.store.ask("save", tmp_path)
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "done"
    parts = {file.name: pq.read_table(file).column("id").to_pylist() for file in tmp_path.glob("episodes-*.parquet")}
    assert sorted((id for ids in parts.values() for id in ids), key=EPISODES.index) == EPISODES  # each once
    before = [id for name, ids in parts.items() if f"runs/r1/{name}" in story.before for id in ids]
    assert sorted(before, key=EPISODES.index) == [row["episode"] for row in json.loads(story.shown.out)["rows"]]


@pytest.mark.parametrize("form", ["url", "folder"])
def test_commands_read_the_run_as_that_of_one_driver(story: Story, form: str, tmp_path: Path) -> None:
    name = URL if form == "url" else str(story.many)
    told = story.store.engine("show", name, "--json", "--limit", "1000")
    assert [row["episode"] for row in json.loads(told.out)["rows"]] == EPISODES
    filtered = story.store.engine("show", name, "--json", "--filter", 'task.id == "t7" && turns.user > 1')
    assert [row["episode"] for row in json.loads(filtered.out)["rows"]] == ["t7/0", "t7/1"]
    assert "It is 42." in story.store.engine("show", name, "t59/1").out

    found = []
    for run in (name, str(story.one)):
        file = tmp_path / f"{len(found)}.jsonl"
        exported = story.store.engine("export", run, "-o", file)
        assert exported.code == 0, exported.err
        rows = [json.loads(line) for line in file.open()]
        for row in rows:
            del row["run_id"], row["metadata"]["created"]
        found.append(rows)
    assert [row["episode_id"] for row in found[0]] == EPISODES
    assert found[0] == found[1]

    compared = json.loads(story.store.engine("compare", story.one, name, "--json").out)
    assert (compared["tasks"], compared["only_first"], compared["only_second"]) == (TASKS, 0, 0)
    assert compared["verdicts"]["same"] == TASKS
    assert {each["difference"] for each in compared["differences"].values()} == {0.0}
