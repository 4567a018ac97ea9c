"""Programs that run elsewhere: they open episodes over HTTP, talk, reward and end them; limits, refusals, stops."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agent_kit import play, write_spec
from stopping import Resumed, content

from engine.backends.registry import open_backend
from engine.plugins.agents.program import ServedPrograms
from engine.plugins.agents.server import server_of_loop
from engine.plugins.serve.episodes import ServedEpisodes
from engine.runner.runner import Runner
from engine.schemas.trajectory import Trajectory
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore, list_runs

TOKEN = "opener"
ASK = {"role": "user", "content": "What is 17 plus 25?"}
ROWS = [{"id": name, "question": "What is 17 plus 25?"} for name in "ab"]
LOOP = """
one = chat(ASK)
chat(ASK, one, {'role': 'user', 'content': 'Sure?'})
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["EPISODE_REWARD_URL"], b'{"value": 0.25}', headers)).read()
reward(0.25)
"""


def http(method: str, url: str, body: Any = None, token: str = TOKEN) -> tuple[int, Any, dict[str, str]]:
    """(status, answer, headers) of a request."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply), {}
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"], {key.lower(): value for key, value in error.headers.items()}


class Client:
    """A program elsewhere; every call runs in a thread, as its process would."""

    def __init__(self, address: str, service: ServedEpisodes) -> None:
        self.address, self.service = address, service

    async def call(
        self, method: str, path: str, body: Any = None, token: str = TOKEN
    ) -> tuple[int, Any, dict[str, str]]:
        url = path if path.startswith("http") else self.address + path
        return await asyncio.to_thread(http, method, url, body, token)

    async def open(self, **body: Any) -> dict[str, Any]:
        status, found, _ = await self.call("POST", "/episodes", body)
        assert status == 201, found
        return found  # type: ignore[no-any-return]

    async def chat(self, opened: dict[str, Any], *messages: dict[str, Any]) -> dict[str, Any]:
        body = {"model": opened["model"], "messages": list(messages)}
        status, found, _ = await self.call("POST", opened["base_url"] + "/chat/completions", body, opened["key"])
        assert status == 200, found
        return found["choices"][0]["message"]  # type: ignore[no-any-return]

    async def end(self, opened: dict[str, Any], **body: Any) -> dict[str, Any]:
        status, found, _ = await self.call("POST", opened["url"] + "/end", body, opened["key"])
        assert status == 200, found
        return found  # type: ignore[no-any-return]


Serve = Callable[..., Any]


@asynccontextmanager
async def serving(spec: Resumed, out: Path) -> AsyncIterator[Client]:
    """Serve a spec into the run in `out`, which is begun or resumed."""
    runs = list_runs(out)
    store = RunStore.open(runs[0]) if runs else RunStore.create(out, RunHeader.of(spec.loaded))
    backend, programs = open_backend(spec.loaded, spec.template), ServedPrograms()
    await backend.start()
    tasks = load_tasks(spec.loaded)
    runner = Runner(spec.loaded, tasks, spec.template, backend, store, keep_going=True, given=(programs,))
    halted: list[BaseException] = []
    try:
        async with runner.serving():
            await store.plan(tasks, spec.loaded.spec.rollout.samples_per_task)
            service = ServedEpisodes(runner, programs, tasks, store, TOKEN, halted.append)
            address = await server_of_loop().listen("127.0.0.1", 0, service.service.answer)
            try:
                yield Client(address, service)
            finally:
                await service.close()
                await server_of_loop().stop_listening()
    finally:
        await backend.close()
        store.close()
    assert (halted, runner.faults) == ([], [])


def write_served(folder: Path, tokenizer: Path, replies: Any, **changes: Any) -> Path:
    """Write a spec without a program."""
    changes = {"tasks": {"rows": ROWS}} | changes
    path = write_spec(folder, tokenizer, "", replies, **changes)
    text = path.read_text()
    path.write_text(text.replace("  run: exec python program.py\n", ""))
    return path


def served_spec(folder: Path, tokenizer: Path, replies: Any, **changes: Any) -> Resumed:
    return Resumed(write_served(folder, tokenizer, replies, **changes))


def trajectories(spec: Resumed, out: Path) -> dict[str, Trajectory]:
    with spec.store(out) as store:
        return {trajectory.episode_id: trajectory for trajectory in store.trajectories()}


async def talk(client: Client, opened: dict[str, Any]) -> None:
    """What `LOOP` does."""
    one = await client.chat(opened, ASK)
    await client.chat(opened, ASK, one, {"role": "user", "content": "Sure?"})


async def test_an_episode_is_the_one_that_a_run_would_have_made(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    (tmp_path / "run").mkdir()
    played = await play(tmp_path / "run", tiny_tokenizer_dir, LOOP, ["It is 42.", "Yes."])
    spec = served_spec(tmp_path, tiny_tokenizer_dir, ["It is 42.", "Yes."], agent={"timeout": "600s"})
    async with serving(spec, tmp_path / "runs") as client:
        opened = await client.open()
        assert (opened["episode"], opened["model"]) == ("a/0", "policy")
        assert opened["task"] == {"id": "a", "fields": ROWS[0], "messages": [], "seed": played.trajectory.seed}
        await talk(client, opened)
        status, _, _ = await client.call("POST", opened["reward_url"], {"value": 0.25}, opened["key"])
        assert status == 200
        ended = await client.end(opened, reward=0.25)
        assert ended == {
            "episode": "a/0", "event": "exited", "limit": None, "reward": 0.5, "rewards": {"reward": 0.5}, "trainable": True,
            "failure": None, "turns": 2, "rows": 1,
        }  # fmt: skip
        for key in (opened["key"], TOKEN):  # a client that did not get the answer asks again
            assert await client.end({**opened, "key": key}) == ended
    found = content(trajectories(spec, tmp_path / "runs")["a/0"])
    expected = content(played.trajectory)
    assert {key: found[key] for key in ("branches", "turns", "messages", "postings", "outcome")} == {
        key: expected[key] for key in ("branches", "turns", "messages", "postings", "outcome")
    }
    assert await spec.differences(tmp_path / "runs") == []


async def test_what_is_refused_and_how(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec = served_spec(tmp_path, tiny_tokenizer_dir, ["It is 42."] * 4, rollout={"live_episodes": 1})
    async with serving(spec, tmp_path / "runs") as client:
        refused: list[tuple[str, str, Any, str, int, str]] = [
            ("POST", "/episodes", {}, "wrong", 401, "bad_token"),
            ("POST", "/episodes", {}, "", 401, "bad_token"),
            ("POST", "/episodes", {"tsak": "a"}, TOKEN, 400, "unknown_key"),
            ("POST", "/episodes", {"task": 3}, TOKEN, 400, "bad_task"),
            ("POST", "/episodes", {"task": "z"}, TOKEN, 404, "no_task"),
            ("POST", "/episodes", [1], TOKEN, 400, "bad_body"),
            ("GET", "/episodes", None, TOKEN, 405, "bad_method"),
            ("POST", "/episodes/a%2F0/end", {}, TOKEN, 404, "not_open"),
            ("DELETE", "/episodes/a%2F0", None, "wrong", 401, "bad_token"),
            ("POST", "/v1/chat/completions", {"messages": [ASK]}, TOKEN, 401, "invalid_api_key"),
        ]
        for method, path, body, token, status, code in refused:
            found = await client.call(method, path, body, token)
            assert (found[0], found[1]["code"]) == (status, code), (path, found)
        assert await client.call("GET", "/health", token="") == (
            200, {"status": "ok", "open": 0, "capacity": 1, "finished": 0, "left": 2}, {},
        )  # fmt: skip
        opened = await client.open(task="b")
        status, fault, headers = await client.call("POST", "/episodes", {})
        assert (status, fault["code"], headers["retry-after"]) == (429, "at_capacity", "5")
        for body, code in (
            ({"reward": "1"}, "bad_reward"),
            ({"reward": {}}, "bad_reward"),
            ({"reward": {"other": 1}}, "bad_reward"),
            ({"status": 1.5}, "bad_status"),
            ({"rewrad": 1}, "unknown_key"),
        ):
            status, fault, _ = await client.call("POST", opened["url"] + "/end", body, opened["key"])
            assert (status, fault["code"]) == (400, code), fault
        await client.chat(opened, ASK)
        await client.end(opened, reward=1)
        status, fault, _ = await client.call("POST", "/episodes", {"task": "b"})
        assert (status, fault["code"]) == (410, "no_episodes_left")
        status, fault, _ = await client.call(
            "POST", opened["base_url"] + "/chat/completions", {"messages": [ASK]}, opened["key"]
        )
        assert (status, fault["code"]) == (401, "invalid_api_key")
        await client.end(await talked(client), reward=1)
        status, fault, _ = await client.call("POST", "/episodes", {})
        assert (status, fault["code"]) == (410, "no_episodes_left")
    assert sorted(trajectories(spec, tmp_path / "runs")) == ["a/0", "b/0"]


async def test_nothing_is_said_of_an_episode_without_its_key(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Open, ended, not opened or not there: every answer is the same."""
    spec = served_spec(tmp_path, tiny_tokenizer_dir, ["It is 42."] * 4, agent={"reward_names": ["secret"]})
    async with serving(spec, tmp_path / "runs") as client:
        first, second = await client.open(), await client.open()
        await client.chat(first, ASK)
        await client.end(first, reward={"secret": 1})
        places = [first["url"], second["url"], "/episodes/b%2F7", "/episodes/z%2F0"]
        refused = [
            await client.call(method, place + path, body, token)
            for place in places
            for method, path in (("POST", "/end"), ("DELETE", ""), ("GET", ""), ("GET", "/end"))
            for body in ({}, {"reward": {"other": 1}}, {"status": "x"}, {"unknown": 1}, [1])
            for token in ("", "wrong", (first if place != first["url"] else second)["key"])
        ]
        assert {status for status, _, _ in refused} == {401}
        assert {json.dumps(answer) for _, answer, _ in refused} == {json.dumps(refused[0][1])}
        await client.chat(second, ASK)
        await client.end(second, reward={"secret": 0})


async def talked(client: Client) -> dict[str, Any]:
    opened = await client.open()
    await client.chat(opened, ASK)
    return opened


async def _nothing(client: Client, opened: dict[str, Any]) -> None:
    """Leave it to the clock."""


async def _abandoned(client: Client, opened: dict[str, Any]) -> None:
    await client.chat(opened, ASK)
    status, found, _ = await client.call("DELETE", opened["url"])
    assert (status, found["failure"]["kind"]) == (200, "agent_abandoned")


async def _unrewarded(client: Client, opened: dict[str, Any]) -> None:
    await client.chat(opened, ASK)
    assert (await client.end(opened))["failure"]["kind"] == "no_reward"


async def _silent(client: Client, opened: dict[str, Any]) -> None:
    assert (await client.end(opened, reward=1))["failure"]["kind"] == "agent_no_request"


async def _died(client: Client, opened: dict[str, Any]) -> None:
    await client.chat(opened, ASK)
    assert (await client.end(opened, status=3, reward=0))["event"] == "died"


async def _limited(client: Client, opened: dict[str, Any]) -> None:
    await client.chat(opened, ASK)
    await client.chat(opened, ASK)
    url = opened["base_url"] + "/chat/completions"
    status, fault, _ = await client.call("POST", url, {"model": "policy", "messages": [ASK]}, opened["key"])
    assert (status, fault["code"]) in ((400, "episode_over"), (401, "invalid_api_key"))


@pytest.mark.parametrize(
    ("act", "agent", "event", "limit", "kind"),
    [
        (_nothing, {"idle": "200ms"}, "timeout", None, "agent_no_request"),
        pytest.param(_nothing, {"timeout": "200ms"}, "timeout", None, "agent_no_request", marks=pytest.mark.slow),
        (_abandoned, {}, "failed", None, "agent_abandoned"),
        (_unrewarded, {}, "exited", None, "no_reward"),
        (_silent, {}, "exited", None, "agent_no_request"),
        (_died, {}, "died", None, None),
        (_limited, {}, "limit", "assistant_turns", "no_reward"),
    ],
    ids=["idle", "out of time", "abandoned", "unrewarded", "silent", "died", "limited"],
)
async def test_how_episodes_end(
    act: Callable[[Client, dict[str, Any]], Awaitable[None]],
    agent: dict[str, Any],
    event: str,
    limit: str | None,
    kind: str | None,
    tmp_path: Path,
    tiny_tokenizer_dir: Path,
) -> None:
    spec = served_spec(
        tmp_path, tiny_tokenizer_dir, ["It is 42."] * 2, agent={"timeout": "60s"} | agent, limits={"assistant_turns": 2}
    )
    async with serving(spec, tmp_path / "runs") as client:
        opened = await client.open()
        works = [*client.service._work.values()]
        await act(client, opened)
        await asyncio.wait(works)
        assert (await client.call("GET", "/health"))[1]["open"] == 0
        status, fault, _ = await client.call("POST", opened["base_url"] + "/chat/completions", {}, opened["key"])
        assert (status, fault["code"]) == (401, "invalid_api_key")
    (trajectory,) = trajectories(spec, tmp_path / "runs").values()
    failure = trajectory.outcome.failure
    assert (failure.kind if failure else None, trajectory.outcome.limit) == (kind, limit)
    if failure is None:
        assert trajectory.outcome.event == event
    elif event == "timeout":
        assert "ran out of time" in failure.message


LONG = {"role": "user", "content": "What? " * 200}
APIS: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [LONG]},
    "/responses": {"input": LONG["content"]},
    "/messages": {"messages": [LONG], "max_tokens": 5},
}


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("changes", "key", "most"),
    [
        ({"model": {"context": 90}}, "`model.context`", "90 tokens"),
        ({"limits": {"episode_tokens": 80}}, "`limits.episode_tokens`", "80 tokens"),
    ],
    ids=["context", "episode_tokens"],
)
async def test_a_prompt_that_is_too_long_is_answered_with_the_limit(
    path: str, changes: dict[str, Any], key: str, most: str, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    spec = served_spec(tmp_path, tiny_tokenizer_dir, ["It is 42."], **changes)
    async with serving(spec, tmp_path / "runs") as client:
        opened = await client.open()
        [work] = client.service._work.values()
        status, fault = await asyncio.to_thread(
            post_to_api, opened["base_url"] + path, {"model": "policy", **APIS[path]}, opened["key"]
        )
        assert (status, fault["code"], fault["param"]) == (400, "context_length_exceeded", "messages")
        assert fault["type"] == "invalid_request_error"
        for words in ("prompt is too long", "maximum context length", key, most):
            assert words in fault["message"]
        await asyncio.wait([work])
    [trajectory] = trajectories(spec, tmp_path / "runs").values()
    assert trajectory.outcome.limit == key.strip("`").rpartition(".")[2]


def post_to_api(url: str, body: Any, key: str) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60
        ) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


@pytest.mark.parametrize(
    ("changes", "key", "seconds", "bodies"),
    [
        ({"limits": {"assistant_turns": 1}}, "`limits.assistant_turns` (1)", 0, [{"n": 2}]),
        ({"limits": {"episode_seconds": "200ms"}}, "`limits.episode_seconds`", 20, [{}]),
        pytest.param({"agent": {"timeout": "200ms"}}, "`agent.timeout`", 3, [{}, {}], marks=pytest.mark.slow),
    ],
    ids=["assistant_turns", "episode_seconds", "timeout"],
)
async def test_a_request_that_a_limit_ends_is_answered_with_its_key(
    changes: dict[str, Any],
    key: str,
    seconds: float,
    bodies: list[dict[str, Any]],
    tmp_path: Path,
    tiny_tokenizer_dir: Path,
) -> None:
    """The program's time may end while another request is answered."""
    spec = served_spec(tmp_path, tiny_tokenizer_dir, [{"text": "It is 42.", "delay": seconds}] * 2, **changes)
    async with serving(spec, tmp_path / "runs") as client:
        opened = await client.open()
        url, ask = opened["base_url"] + "/chat/completions", {"model": "policy", "messages": [ASK]}
        answers = await asyncio.gather(*(client.call("POST", url, ask | body, opened["key"]) for body in bodies))
        refused = [answer for status, answer, _ in answers if status == 400]
        assert refused
        assert {answer["code"] for answer in refused} == {"episode_over"}
        assert all(key in answer["message"] for answer in refused)


async def test_a_stopped_service_goes_on_with_what_is_not_finished(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Also after a failed disk in the middle: an open episode begins again, a finished one stays."""
    spec = served_spec(tmp_path, tiny_tokenizer_dir, ["It is 42.", "Yes."])
    async with serving(spec, tmp_path / "runs") as client:
        done, lost = await client.open(), await client.open()
        await talk(client, done)
        await client.end(done, reward=0.5)
        await client.chat(lost, ASK)
        assert client.service.open_ids == [lost["episode"]]
    with spec.store(tmp_path / "runs") as store:
        assert store.statuses() == {"a/0": "done", "b/0": "running"}
    async with serving(spec, tmp_path / "runs") as client:
        status, fault, _ = await client.call(
            "POST", lost["url"].replace(lost["url"].split("/episodes")[0], client.address) + "/end", {}
        )
        assert (status, fault["code"]) == (404, "not_open")
        again = await client.open()
        assert (again["episode"], again["task"]["seed"]) == ("b/0", lost["task"]["seed"])
        await talk(client, again)
        await client.end(again, reward=0.25)
        assert (await client.call("GET", "/health"))[1]["left"] == 0
    found = trajectories(spec, tmp_path / "runs")
    assert {name: item.outcome.reward for name, item in found.items()} == {"a/0": 0.5, "b/0": 0.25}
    assert [len(item.turns) for item in found.values()] == [2, 2]
    assert await spec.differences(tmp_path / "runs") == []


async def test_many_programs_at_once(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    rows = [{"id": f"t{number}", "question": "What?"} for number in range(6)]
    spec = served_spec(
        tmp_path,
        tiny_tokenizer_dir,
        ["It is 42.", "Yes."],
        tasks={"rows": rows},
        rollout={"samples_per_task": 2, "live_episodes": 12},
    )

    async def program(client: Client) -> str:
        opened = await client.open()
        await talk(client, opened)
        return str((await client.end(opened, reward=1))["episode"])

    async with serving(spec, tmp_path / "runs") as client:
        done = await asyncio.gather(*(program(client) for _ in range(12)))
    assert sorted(done) == sorted(f"t{number}/{sample}" for number in range(6) for sample in range(2))
    assert {len(item.turns) for item in trajectories(spec, tmp_path / "runs").values()} == {2}
    assert await spec.differences(tmp_path / "runs") == []
