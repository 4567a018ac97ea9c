"""Groups over HTTP: rows, refusals, versions, cancelled requests, slow readers and full disks."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from serve_kit import ROOT, TOKEN, ask, content, read, serving, unpacked, written

from engine.errors import StoreError, TrainError
from engine.plugins.serve.client import ServeError, Sums
from engine.plugins.serve.groups import refuse_unserved
from engine.plugins.serve.http import RouteCall
from engine.spec.load import load_spec
from engine.store import RunStore, list_runs
from engine.store.rows.export import export_rows


@pytest.fixture(scope="module", autouse=True)
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One unpacked tokenizer and its chat format for all tests."""
    unpacked(tmp_path_factory.mktemp("tokenizer"))


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
        tokens = service._runs._runner.counters.tokens
        assert content(await read(address, "one", count=3, samples=2)) == content(first)
        assert service._runs._runner.counters.tokens == tokens
        ids = [group.task_id for group in first]
        follow = await read(address, "two", tasks=[ids[0], ids[0]], samples=2)
        assert [group.task_id for group in follow] == [f"{ids[0]}~1", f"{ids[0]}~2"]
        status, error = await ask(address, "/groups", {"id": "one", "tasks": "next", "count": 2})
        assert (status, error["code"]) == (409, "other_request")
    async with serving(path) as (service, address):  # another launch
        assert content(await read(address, "one", count=3, samples=2)) == content(first)
        assert service._runs._runner.counters.tokens == 0
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
        stream: Any = await service._post(RouteCall(body, TOKEN, ""))
        await anext(stream.parts)
        while len(service._runs.finished) < 6:  # noqa: ASYNC110  (two groups of three)
            await asyncio.sleep(0.01)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(service._log.began) == 2
        assert service._runs.running() == 0
        status, error = await ask(address, "/groups", {"id": "other"})
        assert (status, error["code"]) == (429, "at_capacity")
        await stream.parts.aclose()
        assert service._open == {}
        assert [group.number for group in await read(address, "slow", count=6)] == list(range(6))


async def test_a_cancelled_request_frees_its_slots(tmp_path: Path) -> None:
    async with serving(written(tmp_path), ahead=1, max_requests=1) as (service, address):
        stream: Any = await service._post(RouteCall({"id": "one", "tasks": "next", "count": 6}, TOKEN, ""))
        await anext(stream.parts)
        work = asyncio.create_task(ask(address, "/cancel", {"id": "one"}))
        rest = [part async for part in stream.parts]
        assert (await work)[1] == [{"id": "one", "cancelled": True}]
        end = json.loads(rest[-1].splitlines()[-1])["end"]
        assert end["cancelled"]
        assert end["sent"] < 6
        assert (service._open, service._runs._groups, service._runs.running()) == ({}, {}, 0)
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
        stream: Any = await service._post(RouteCall({"id": "one", "tasks": "next", "count": 3}, TOKEN, ""))
        first = json.loads((await anext(stream.parts)).splitlines()[-1])["group"]
        while len(service._runs.finished) < 6:  # noqa: ASYNC110  (two groups of three)
            await asyncio.sleep(0.01)
        assert (await ask(address, "/weights", {"version": 1}))[0] == 200
        rest = [json.loads(part.splitlines()[-1]) for part in [part async for part in stream.parts]]
        waited, begun_later = (line["group"] for line in rest[:-1])
        assert (first["left_out"], waited["left_out"], begun_later["left_out"]) == (None, "stale", None)
        assert (waited["rows"], waited["version"], begun_later["version"]) == (0, 0, 1)
        assert rest[-1] == {"end": {"groups": 3, "sent": 3}}


async def test_a_group_of_one_episode_is_not_handed_over(tmp_path: Path) -> None:
    """Two of three episodes of task 0 fail. With one sample for a group by request, an episode has no others by intention."""
    tasks = {"source": "inline", "rows": [{"id": "t0"}, {"id": "t1"}], "id": "id"}
    changes = {
        "tasks": tasks, "environment": None, "machine": "tools_and_user", "prompt": [{"role": "user", "content": "?"}],
        "user": {"use": "code_for_training:Fading"},
    }  # fmt: skip
    path = written(tmp_path, **changes)
    path.write_text(yaml.safe_dump({k: v for k, v in yaml.safe_load(path.read_text()).items() if v is not None}))
    (tmp_path / "replies.yaml").write_text(yaml.safe_dump({"replies": ["blue", "red"]}))
    async with serving(path) as (_, address):
        _, lines = await ask(address, "/groups", {"id": "one", "tasks": ["t0", "t1"]})
        groups = {line["group"]["task_id"]: line["group"] for line in lines if "group" in line}
        assert [sum(each["trainable"] for each in group["episodes"]) for group in groups.values()] == [1, 2]
        assert (groups["t0"]["left_out"], groups["t0"]["rows"], groups["t0"]["signal"]) == (
            "too_few_episodes",
            0,
            False,
        )
        assert (groups["t1"]["left_out"], groups["t1"]["rows"]) == (None, 2)
        _, lines = await ask(address, "/groups", {"id": "two", "tasks": ["t0"], "samples": 1})
        assert [line["group"]["rows"] for line in lines if "group" in line] == [1]


async def test_a_full_disk_refuses_a_request_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    async with serving(written(tmp_path)) as (service, address):
        with monkeypatch.context() as patched:
            patched.setattr("engine.store.json_lines.os.fsync", full)
            status, error = await ask(address, "/groups", {"id": "one"})
        assert (status, error["code"]) == (507, "not_stored")
        assert "is the disk full?" in error["message"]
        assert (service._log.requests, service._runs.finished, service._open) == ({}, set(), {})
        assert len(await read(address, "one")) == 1


def test_a_damaged_log_names_its_line(tmp_path: Path) -> None:
    from engine.plugins.serve.request_log import RequestLog

    (tmp_path / "requests.jsonl").write_bytes(b'{"version":2}\n{"cancelled":"a"}\n{"vers')
    log = RequestLog(tmp_path)
    assert (log.version, log.cancelled) == (2, {"a"})
    log.tell(3)
    assert (tmp_path / "requests.jsonl").read_bytes().endswith(b'"a"}\n{"version": 3}\n')
    (tmp_path / "requests.jsonl").write_bytes(b'{"version":2}\n{"vers\n')
    with pytest.raises(StoreError, match=r"requests.jsonl:2 is damaged"):
        RequestLog(tmp_path)


def test_what_a_service_cannot_do_is_refused_at_the_start(tmp_path: Path) -> None:
    kl = {"coefficient": 0.1, "in": "reward"}
    path = written(tmp_path, train={"advantage_norm": "batch", "dynamic_sampling": True, "steps": 1, "kl": kl})
    with pytest.raises(TrainError) as error:
        refuse_unserved(load_spec(path))
    assert "`train.advantage_norm: batch`" in str(error.value)
    assert "`train.kl.in: reward` needs the log-probs of a reference model" in str(error.value)
    assert "`train.dynamic_sampling`" in str(error.value)


def test_sums_that_differ_are_refused() -> None:
    Sums(10, 4, 1.5).check(Sums(10, 4, 1.5 + 1e-7))
    for other in (Sums(9, 4, 1.5), Sums(10, 3, 1.5), Sums(10, 4, 1.4)):
        with pytest.raises(ServeError, match="do not train on these rows"):
            Sums(10, 4, 1.5).check(other)


async def test_a_store_that_fills_up_ends_the_stream_with_the_error_and_loses_no_group(tmp_path: Path) -> None:
    halted: list[BaseException] = []
    asked = {"id": "one", "tasks": "next", "count": 4}
    async with serving(written(tmp_path), halted=halted, ahead=1) as (service, address):
        stream: Any = await service._post(RouteCall(asked, TOKEN, ""))
        first = json.loads((await anext(stream.parts)).splitlines()[-1])["group"]
        await service._runs._store._writer.do(lambda c: c.execute(f"PRAGMA max_page_count = {c.execute('PRAGMA page_count').fetchone()[0]}"))  # type: ignore[union-attr]  # fmt: skip
        rest = [json.loads(part.splitlines()[-1]) for part in [part async for part in stream.parts]]
        message = rest[-1]["end"]["error"]["message"]
        assert "free space on the disk and resume the run" in message
        assert [f"StoreError: {error}" for error in halted] == [message]
        sent = [first, *(line["group"] for line in rest[:-1])]
        assert len(sent) < 4
    async with serving(tmp_path / "spec.yaml") as (service, address):  # with space again
        _, lines = await ask(address, "/groups", asked)
        again = {line["group"]["number"]: line["group"] for line in lines if "group" in line}
    calm = tmp_path / "calm"
    calm.mkdir()
    async with serving(written(calm)) as (_, address):
        _, lines = await ask(address, "/groups", asked)
    assert again == {line["group"]["number"]: line["group"] for line in lines if "group" in line}
    assert [again[group["number"]] for group in sent] == sent


ALONE = """
import importlib.util, json, os
from group_client import GroupClient, Sums
with GroupClient(os.environ["SERVE_URL"]) as client:
    sums = [[group.number, vars(Sums.of(group.batch))] for group in client.groups("one", count=3)]
print(json.dumps({"sums": sorted(sums, key=lambda each: each[0]), "found": [n for n in ("engine", "numpy", "torch", "pydantic") if importlib.util.find_spec(n)]}))
"""


@pytest.mark.slow
@pytest.mark.trainers
async def test_the_client_alone_runs_in_an_environment_of_only_httpx_and_pyarrow(tmp_path: Path) -> None:
    python = os.environ.get("CLIENT_PYTHON")
    if python is None:
        pytest.skip("NOT CHECKED: CLIENT_PYTHON names no Python of an environment with only httpx and pyarrow")
    shutil.copy(ROOT / "engine/plugins/serve/client.py", tmp_path / "group_client.py")
    async with serving(written(tmp_path)) as (_, address):
        env = {"SERVE_URL": address, "EPISODE_ENGINE_TOKEN": TOKEN, "PYTHONPATH": str(tmp_path)}
        process = await asyncio.create_subprocess_exec(
            python, "-c", ALONE, cwd=tmp_path, env=env, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        assert process.returncode == 0
        groups = await read(address, "one", count=3)
    own = [
        [group.number, {name: getattr(group.sums, name) for name in ("tokens", "trained", "advantages")}]
        for group in groups
    ]
    assert json.loads(said) == {"sums": own, "found": []}
