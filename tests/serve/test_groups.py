"""Groups over HTTP: rows, refusals, versions, cancelled requests, slow readers, a full disk, and the README's client beside a killed service."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from shipped_tokenizers import unpack

from engine.agents.server import server_of_loop
from engine.backends.registry import open_backend
from engine.client import Group, GroupClient, ServeError, Sums
from engine.environments.color_square import problems
from engine.errors import StoreError, TrainError
from engine.runner.run import Runner
from engine.schemas.model import ModelSpec
from engine.serve.groups import GroupService, refuse_unserved
from engine.serve.http import Call
from engine.serve.wire import wire_schema
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore, list_runs
from engine.store.export import export_rows
from engine.tokens.format import ChatFormat
from engine.tokens.loading import load_format

ROOT = Path(__file__).parents[2]
TOKEN = "a secret token"
SPEC: dict[str, Any] = {
    "spec": "episode/v1",
    "name": "served",
    "model": {"path": "qwen2_5_vl"},
    "tasks": {
        "source": "python",
        "use": "engine.environments.color_square:problems",
        "with": {"count": 6, "seed": 3, "turns": 2, "size": 56},
        "id": "id",
    },
    "environment": {"use": "engine.environments.color_square:ColorSquare", "effects": "pure"},
    "user": {"use": "engine.environments.color_square:Viewer"},
    "machine": "retry_with_feedback",
    "limits": {"assistant_turns": 2, "user_turns": 2},
    "rollout": {"samples_per_task": 3, "concurrency": 4},
    "backend": {"kind": "scripted", "replies": "replies.yaml"},
}
TASKS = [row["id"] for row in problems(count=6, seed=3, turns=2, size=56)]
REPLIES = {
    "cases": [
        {"task": TASKS, "sample": 1, "replies": ["green", "blue"]},
        {"task": TASKS, "sample": 2, "replies": ["red", "yellow"]},
    ],
    "replies": ["blue", "red"],
}


TOKENIZER: dict[str, Path] = {}
FORMAT: dict[str, ChatFormat] = {}


@pytest.fixture(scope="module", autouse=True)
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One unpacked tokenizer and its chat format for all tests."""
    folder = TOKENIZER["folder"] = unpack("qwen2_5_vl", tmp_path_factory.mktemp("tokenizer"))
    FORMAT["format"] = load_format(ModelSpec(path=str(folder)), folder)


def written(folder: Path, **changes: Any) -> Path:
    (folder / "replies.yaml").write_text(yaml.safe_dump(REPLIES))
    changes = {"model": {"path": str(TOKENIZER["folder"])}} | changes
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(SPEC | changes))
    return path


@asynccontextmanager
async def serving(path: Path, **options: Any) -> AsyncIterator[tuple[GroupService, str]]:
    """The service of a spec over the run beside it, and its address."""
    out, loaded = path.parent / "runs", load_spec(path)
    runs = list_runs(out) if out.exists() else []
    store = RunStore.open(runs[0]) if runs else RunStore.create(out, RunHeader.of(loaded))
    form, tasks = FORMAT["format"], load_tasks(loaded)
    backend = open_backend(loaded, form)
    await backend.start()
    runner = Runner(loaded, tasks, form, backend, store, keep_going=True, training=True)
    halted: list[BaseException] = []
    try:
        async with runner.serving():
            service = GroupService(loaded, tasks, form, backend, store, runner, TOKEN, halted.append, **options)
            address = await server_of_loop().listen("127.0.0.1", 0, service.service)
            try:
                yield service, address
            finally:
                await service.close()
                await server_of_loop().stop_listening()
    finally:
        await backend.close()
        store.close()


async def read(address: str, id: str, **asked: Any) -> list[Group]:
    """All groups of a request, by number."""

    def work() -> list[Group]:
        with GroupClient(address, TOKEN, patience=30) as client:
            return sorted(client.groups(id, **asked), key=lambda group: group.number)

    return await asyncio.to_thread(work)


async def ask(address: str, path: str, body: Any, token: str = TOKEN) -> tuple[int, Any]:
    async with httpx.AsyncClient(base_url=address, timeout=None, trust_env=False) as http:
        reply = await http.post(path, content=json.dumps(body), headers={"authorization": f"Bearer {token}"})
    lines = reply.text.splitlines()
    return reply.status_code, [json.loads(line) for line in lines] if reply.status_code == 200 else reply.json()[
        "error"
    ]


def content(groups: list[Group]) -> list[Any]:
    keys = ("episode_id", "branch", "input_ids", "loss_mask", "logprobs", "weight_versions", "advantages", "image_data")
    return [[{key: row[key] for key in keys} for row in group.batch.to_pylist()] for group in groups]


async def test_the_rows_are_those_of_an_export_with_the_images(tmp_path: Path) -> None:
    path = written(tmp_path)
    async with serving(path) as (service, address):
        groups = await read(address, "one", count=4)
        _, lines = await ask(address, "/groups", {"id": "one", "tasks": "next", "count": 4})
        assert service.service is not None
    with RunStore.open(list_runs(tmp_path / "runs")[0], readonly=True) as store:
        rows = {(row["episode_id"], row["branch"]): row for row in export_rows(store, trainable_only=True)}
        served = [row for group in groups for row in group.batch.to_pylist()]
        assert {(row["episode_id"], row["branch"]) for row in served} == set(rows)
        assert len(served) == len(rows)
        for row in served:
            stored = rows[row["episode_id"], row["branch"]]
            for key in ("input_ids", "loss_mask", "logprobs", "weight_versions", "turn_ids", "advantages"):
                assert row[key] == stored[key].tolist(), key
            assert row["run_id"] == store.run_id
        assert any(any(row["advantages"]) for row in served)
        shown = {image["image"] for row in served for image in row["images"]}
        data = {name: found for group in groups for name, found in group.images.items()}
        assert shown
        assert data == {digest: store.image(digest).data for digest in shown}
    json_rows = [line["row"] for line in lines if "row" in line]
    assert sorted(row["episode_id"] for row in json_rows) == sorted(row["episode_id"] for row in served)
    assert {row["episode_id"]: row["advantages"] for row in json_rows} == {
        row["episode_id"]: row["advantages"] for row in served
    }
    assert lines[-1] == {"end": {"groups": 4, "sent": 4}}


async def test_a_repeated_request_gets_the_same_groups_and_runs_nothing_again(tmp_path: Path) -> None:
    path = written(tmp_path)
    async with serving(path) as (service, address):
        first = await read(address, "one", count=3, samples=2)
        tokens = service._runs._runner.live.tokens
        assert content(await read(address, "one", count=3, samples=2)) == content(first)
        assert service._runs._runner.live.tokens == tokens
        ids = [group.task_id for group in first]
        follow = await read(address, "two", tasks=[ids[0], ids[0]], samples=2)
        assert [group.task_id for group in follow] == [f"{ids[0]}~1", f"{ids[0]}~2"]
        status, error = await ask(address, "/groups", {"id": "one", "tasks": "next", "count": 2})
        assert (status, error["code"]) == (409, "other_request")
    async with serving(path) as (service, address):  # another launch
        assert content(await read(address, "one", count=3, samples=2)) == content(first)
        assert service._runs._runner.live.tokens == 0
        _, lines = await ask(
            address, "/groups", {"id": "one", "count": 3, "samples": 2, "tasks": "next", "skip": [0, 2]}
        )
        assert [line["group"]["number"] for line in lines if "group" in line] == [1]
        assert [group.task_id for group in await read(address, "three", count=4)][3] == f"{ids[0]}~3"


REFUSED: list[tuple[str, Any, int, str]] = [
    ("/groups", {}, 400, "`id`"),
    ("/groups", {"id": "a", "taks": 1}, 400, "unknown key `taks`"),
    ("/groups", {"id": "a", "tasks": ["nowhere"]}, 404, "`tasks[0]`: there is no task 'nowhere'"),
    ("/groups", {"id": "a", "tasks": []}, 400, "`tasks`"),
    ("/groups", {"id": "a", "count": 0}, 400, "`count` is a whole number from 1"),
    ("/groups", {"id": "a", "samples": "3"}, 400, "`samples`"),
    ("/groups", {"id": "a", "sampling": {"temperature": "hot"}}, 400, "`sampling.temperature`"),
    ("/groups", {"id": "a", "sampling": {"heat": 1}}, 400, "`sampling.heat`"),
    ("/groups", {"id": "a", "version": 3}, 409, "the newest that POST /weights told is 0"),
    ("/groups", {"id": "a", "trainer": "verll"}, 400, "did you mean `verl`?"),
    ("/groups", {"id": "a", "trainer": "art"}, 409, "ART openpipe-art 0.5.18: not carried: "),
    ("/groups", {"id": "a", "skip": [-1]}, 400, "`skip`"),
    ("/groups", [1], 400, "not a JSON object"),
    ("/groups", {"id": "x" * (1 << 20)}, 413, "larger than 1048576 bytes"),
    ("/cancel", {"id": "nobody"}, 404, "there is no request 'nobody'"),
    ("/weights", {"version": -1}, 400, "`version`"),
]  # fmt: skip
"""Path, body, status, and a part of the message."""


async def test_a_bad_request_is_refused_by_name(tmp_path: Path) -> None:
    async with serving(written(tmp_path)) as (service, address):
        for path, body, status, part in REFUSED:
            found, error = await ask(address, path, body)
            assert (found, part in error["message"]) == (status, True), (body, error)
        assert service._log.requests == {}


async def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    async with serving(written(tmp_path)) as (_, address):
        for path in ("/groups", "/weights", "/cancel"):
            status, error = await ask(address, path, {"id": "a"}, "wrong")
            assert (status, error["code"]) == (401, "bad_token")
            assert TOKEN not in error["message"]


async def test_a_slow_reader_stops_the_sampling_and_a_reader_that_leaves_frees_the_slots(tmp_path: Path) -> None:
    async with serving(written(tmp_path), ahead=2, max_requests=1) as (service, address):
        body = {"id": "slow", "tasks": "next", "count": 6}
        stream: Any = await service._post(Call(body, TOKEN, ""))
        await anext(stream.parts)
        while len(service._runs.done) < 6:  # noqa: ASYNC110  (two groups of three)
            await asyncio.sleep(0.01)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(service._log.began) == 2
        assert service._runs.running == 0
        status, error = await ask(address, "/groups", {"id": "other"})
        assert (status, error["code"]) == (429, "at_capacity")
        await stream.parts.aclose()
        assert service._open == {}
        assert [group.number for group in await read(address, "slow", count=6)] == list(range(6))


async def test_a_cancelled_request_frees_its_slots(tmp_path: Path) -> None:
    async with serving(written(tmp_path), ahead=1, max_requests=1) as (service, address):
        stream: Any = await service._post(Call({"id": "one", "tasks": "next", "count": 6}, TOKEN, ""))
        await anext(stream.parts)
        work = asyncio.create_task(ask(address, "/cancel", {"id": "one"}))
        rest = [part async for part in stream.parts]
        assert (await work)[1] == [{"id": "one", "cancelled": True}]
        end = json.loads(rest[-1].splitlines()[-1])["end"]
        assert end["cancelled"]
        assert end["sent"] < 6
        assert (service._open, service._runs._groups, service._runs.running) == ({}, {}, 0)
        status, error = await ask(address, "/groups", {"id": "one", "tasks": "next", "count": 6})
        assert (status, error["code"]) == (410, "cancelled")
        with pytest.raises(ServeError, match="was cancelled"):
            await read(address, "one", count=6)


async def test_groups_that_began_too_many_versions_ago_are_not_handed_over(tmp_path: Path) -> None:
    async with serving(written(tmp_path), ahead=1) as (_, address):
        asked = {"id": "one", "tasks": "next", "count": 3}
        async with httpx.AsyncClient(base_url=address, timeout=None, trust_env=False) as http:
            head = {"authorization": f"Bearer {TOKEN}"}
            await read(address, "one", count=3)
            assert (await http.post("/weights", json={"version": 4}, headers=head)).json()["version"] == 4
            assert (await http.post("/weights", json={"version": 3}, headers=head)).status_code == 409
        _, lines = await ask(address, "/groups", asked)
        assert [line["group"]["left_out"] for line in lines if "group" in line] == ["stale"] * 3
        status, error = await ask(address, "/groups", {"id": "two", "version": 3})
        assert (status, error["code"]) == (409, "old_version")
        assert [group.version for group in await read(address, "two", version=4)] == [4]


async def test_a_version_that_is_told_while_a_group_waits_to_be_read_leaves_it_out(tmp_path: Path) -> None:
    async with serving(written(tmp_path), ahead=2) as (service, address):
        stream: Any = await service._post(Call({"id": "one", "tasks": "next", "count": 3}, TOKEN, ""))
        first = json.loads((await anext(stream.parts)).splitlines()[-1])["group"]
        while len(service._runs.done) < 6:  # noqa: ASYNC110  (two groups of three)
            await asyncio.sleep(0.01)
        assert (await ask(address, "/weights", {"version": 1}))[0] == 200
        rest = [json.loads(part.splitlines()[-1]) for part in [part async for part in stream.parts]]
        waited, begun_later = (line["group"] for line in rest[:-1])
        assert (first["left_out"], waited["left_out"], begun_later["left_out"]) == (None, "stale", None)
        assert (waited["rows"], waited["version"], begun_later["version"]) == (0, 0, 1)
        assert rest[-1] == {"end": {"groups": 3, "sent": 3}}


async def test_a_full_disk_refuses_a_request_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    async with serving(written(tmp_path)) as (service, address):
        with monkeypatch.context() as patched:
            patched.setattr("engine.serve.request_log.os.fsync", full)
            status, error = await ask(address, "/groups", {"id": "one"})
        assert (status, error["code"]) == (507, "not_stored")
        assert "is the disk full?" in error["message"]
        assert (service._log.requests, service._runs.done, service._open) == ({}, set(), {})
        assert len(await read(address, "one")) == 1


def test_a_damaged_log_names_its_line(tmp_path: Path) -> None:
    from engine.serve.request_log import RequestLog

    (tmp_path / "requests.jsonl").write_bytes(b'{"version":2}\n{"cancelled":"a"}\n{"vers')
    log = RequestLog(tmp_path)
    assert (log.version, log.cancelled) == (2, {"a"})
    assert (tmp_path / "requests.jsonl").read_bytes().endswith(b'"a"}\n')
    (tmp_path / "requests.jsonl").write_bytes(b'{"version":2}\n{"vers\n')
    with pytest.raises(StoreError, match=r"requests.jsonl:2: the line is damaged"):
        RequestLog(tmp_path)


def test_what_a_service_cannot_do_is_refused_at_the_start(tmp_path: Path) -> None:
    path = written(tmp_path, train={"advantage_norm": "batch", "dynamic_sampling": True, "steps": 1})
    with pytest.raises(TrainError) as error:
        refuse_unserved(load_spec(path))
    assert "`train.advantage_norm: batch`" in str(error.value)
    assert "`train.dynamic_sampling`" in str(error.value)


def test_sums_that_differ_are_refused() -> None:
    Sums(10, 4, 1.5).check(Sums(10, 4, 1.5 + 1e-7))
    for other in (Sums(9, 4, 1.5), Sums(10, 3, 1.5), Sums(10, 4, 1.4)):
        with pytest.raises(ServeError, match="do not train on these rows"):
            Sums(10, 4, 1.5).check(other)


def test_the_documented_columns_are_those_of_the_wire() -> None:
    page = (ROOT / "docs/serve.md").read_text()
    table = dict(
        re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page.split("### Columns")[1].split("\n## ")[0], re.MULTILINE)
    )
    assert table == {column.name: str(column.type).split("<")[0] for column in wire_schema()}


# --- the README's example -----------------------------------------------------------------------------------

ONLY = """
import sys
class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition('.')[0]
        allowed = {'engine', 'httpx', 'pyarrow', 'httpcore', 'h11', 'anyio', 'idna', 'certifi', 'sniffio', 'typing_extensions', 'numpy'}
        if name.startswith('engine.') and name != 'engine.client':
            raise ImportError('the client imports ' + name)
        if top not in allowed and top not in sys.stdlib_module_names:
            raise ImportError('the client imports ' + name)
sys.meta_path.insert(0, Only())
exec(compile(open(sys.argv[1]).read(), sys.argv[1], 'exec'))
"""


@contextmanager
def command(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`engine serve`; its process and address."""
    env = os.environ | {"EPISODE_ENGINE_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "engine.cli.main", "serve", "--quiet", *arguments]
    process = subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for text in process.stdout:
            lines.append(text)
            if found := re.match(r"Serving \S+ at (http://\S+);", text):
                break
        else:
            raise AssertionError("".join(lines))
        assert TOKEN not in "".join(lines)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def example(folder: Path, url: str) -> subprocess.Popen[str]:
    section = (ROOT / "README.md").read_text().split("## Train in another process")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    assert len(found[1].splitlines()) <= 20
    (folder / "example.py").write_text(found[1])
    env = os.environ | {"EPISODE_ENGINE_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), "SERVE_URL": url}
    line = [sys.executable, "-u", "-c", ONLY, str(folder / "example.py")]
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_example_of_the_readme_gets_each_group_once_from_a_service_that_is_killed(tmp_path: Path) -> None:
    results = []
    for name in ("calm", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        written(folder)
        with command(folder, "spec.yaml", "--ahead", "1") as (process, url):
            client = example(folder, url)
            assert client.stdout is not None
            lines = [client.stdout.readline()]
            if name == "killed":
                process.send_signal(signal.SIGKILL)
                process.wait()
                port = url.rpartition(":")[2]
                with command(folder, "--resume", "latest", "--port", port, "--ahead", "1") as (again, _):
                    lines += client.stdout.readlines()
                    assert client.wait() == 0
                    again.send_signal(signal.SIGTERM)
                    assert again.wait() == 143
            else:
                lines += client.stdout.readlines()
                assert client.wait() == 0
        results.append(lines)
        with RunStore.open(list_runs(folder / "runs")[0], readonly=True) as store:
            assert {row.status for row in store.episodes()} == {"done"}
    assert sorted(results[0]) == sorted(results[1])
    assert len(results[0]) == len(set(results[0])) == 8
