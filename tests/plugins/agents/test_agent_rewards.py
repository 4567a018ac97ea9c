"""Rewards of agent programs: by `POST /v1/reward`, by a file, by the exit status; into the ledger, to the turns that they name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_kit import Played, play, write_spec
from stopping import Resumed, content

from engine.errors import SpecError
from engine.plugins.agents.command import CommandProgram
from engine.plugins.agents.inbox import Inbox
from engine.plugins.agents.program import AgentProgram, ProgramEnd
from engine.plugins.agents.wire.requests import ApiError, Session
from engine.spec.load import load_spec

POST = """
def give(**body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    data = json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(os.environ["EPISODE_REWARD_URL"], data, headers)) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]
"""
NAMES: dict[str, Any] = {"reward_names": ["reward", "tests"]}


def rewards(played: Played) -> list[dict[str, float]]:
    return [turn.rewards for turn in played.trajectory.turns]


async def test_posted_rewards_are_on_the_turns_that_they_name(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    program = (
        POST
        + """
_, one = post({"messages": [ASK]})
assert give(value=0.25) == (200, {"turn": 0, "name": "reward", "value": 0.25})
_, many = post({"messages": [ASK, ASK], "n": 2})
assert give(value=2, name="tests", response_id=many["id"], choice=1)[1]["turn"] == 2
assert give(value=-1.5, name="tests", response_id=one["id"])[0] == 200
wrong = [
    (dict(value=1, response_id="chatcmpl-unknown"), 404, "response_id"),
    (dict(value=1, response_id=one["id"] + "7"), 404, "response_id"),
    (dict(value=1, response_id=many["id"]), 400, "choice"),
    (dict(value=1, response_id=many["id"], choice=2), 400, "choice"),
    (dict(value=float("nan")), 400, "value"), (dict(value=1e31), 400, "value"), (dict(value=True), 400, "value"),
    (dict(), 400, "value"), (dict(value=1, name="testz"), 400, "name"), (dict(value=1, turn=0), 400, "turn"),
]
for body, status, param in wrong:
    found, error = give(**body)
    assert (found, error["param"]) == (status, param), (body, error)
reward({"reward": 4, "tests": 8})
"""
    )
    played = await play(tmp_path, tiny_tokenizer_dir, program, ["a", "b", "c"], agent=NAMES)
    assert rewards(played) == [{"reward": 0.25, "tests": -1.5}, {}, {"tests": 10.0, "reward": 4.0}]
    assert {posting.source for posting in played.trajectory.postings} == {"agent"}
    assert [len(record.rewards) for record in played.records] == [0, 1, 0, 4]


async def test_posted_rewards_are_moved_like_all_others(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Also by a rule in the state to which each reply leads, and after the end."""
    program = POST + "chat(ASK)\ngive(value=1.0)\nchat(ASK, ASK)\ngive(value=8.0)\n"
    rules = [
        {"at": "AGENT_RUNNING", "when": "turns.assistant == 1", "op": "add", "turn": "last", "value": 0.5},
        {"at": "DONE", "turn": "last", "to": "first", "share": 0.25},
    ]
    played = await play(tmp_path, tiny_tokenizer_dir, program, ["a", "b"], rewards={"reassign": rules})
    assert rewards(played) == [{"reward": 3.5}, {"reward": 6.0}]


@pytest.mark.parametrize(
    ("program", "wanted", "failure"),
    [
        pytest.param("chat(ASK)", 1.0, None, id="status 0", marks=pytest.mark.slow),
        pytest.param("chat(ASK)\nsys.exit(3)", 0.0, None, id="status 3"),
        pytest.param("chat(ASK)\nos.kill(os.getpid(), 9)", 0.0, "no_reward", id="killed", marks=pytest.mark.slow),
        pytest.param("chat(ASK)\ntime.sleep(600)", 0.0, "no_reward", id="out of time", marks=pytest.mark.slow),
    ],
)
async def test_the_exit_status_is_a_reward(
    tmp_path: Path, tiny_tokenizer_dir: Path, program: str, wanted: float, failure: str | None
) -> None:
    agent = {"reward": "exit_code", "timeout": "3s"}
    played = await play(tmp_path, tiny_tokenizer_dir, program, ["a"], agent=agent)
    outcome = played.trajectory.outcome
    assert outcome.reward == wanted
    assert (outcome.failure.kind if outcome.failure else None) == failure
    assert rewards(played) == ([{}] if failure else [{"reward": wanted}])


@pytest.mark.parametrize(
    ("given", "total"),
    [
        ("reward(0.5)\ngive(value=2)", 2.5),
        pytest.param("reward(0.5)", 0.5, marks=pytest.mark.slow),
        pytest.param("", None, marks=pytest.mark.slow),
    ],
)
async def test_a_limit_takes_the_rewards_that_were_given_and_their_absence_is_a_failure(
    tmp_path: Path, tiny_tokenizer_dir: Path, given: str, total: float | None
) -> None:
    program = POST + f"chat(ASK)\n{given}\npost({{'messages': [ASK, ASK]}})\ntime.sleep(600)\n"
    played = await play(tmp_path, tiny_tokenizer_dir, program, ["a"], limits={"assistant_turns": 1})
    outcome = played.trajectory.outcome
    assert outcome.limit == "assistant_turns"
    assert outcome.trainable == (total is not None)
    assert outcome.reward == (total or 0.0)
    assert (outcome.failure.blame if outcome.failure else None) == (None if total is not None else "environment")


@pytest.mark.slow
async def test_an_undeclared_name_in_the_file_is_a_failure(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    played = await play(tmp_path, tiny_tokenizer_dir, "chat(ASK)\nreward({'testz': 1})", ["a"])
    failure = played.trajectory.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("bad_reward", "environment")
    assert "agent.reward_names" in failure.message


async def test_a_reward_after_the_end_is_refused(tmp_path: Path) -> None:
    other = AgentProgram(CommandProgram("exec sleep 600", tmp_path, {}, {}, "b/0"), 60)
    await other.start()  # keeps the server open
    run = AgentProgram(CommandProgram("echo $EPISODE_REWARD_URL $OPENAI_API_KEY", tmp_path, {}, {}, "a/0"), 60)
    await run.start()
    end = await run.next()
    assert isinstance(end, ProgramEnd)
    address, key = end.output.split()
    async with httpx.AsyncClient() as client:
        answer = await client.post(address, headers={"authorization": f"Bearer {key}"}, json={"value": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "episode_over")
    await other.stop()
    with pytest.raises(ApiError, match="has ended"):
        run.inbox.reward({"value": 1})


@pytest.mark.slow
async def test_a_resume_posts_each_reward_once(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    program = POST + "chat(ASK)\ngive(value=1.0)\nchat(ASK, ASK)\ngive(value=8.0)\n"
    spec = Resumed(write_spec(tmp_path, tiny_tokenizer_dir, program, ["a", "b"]))
    found = []
    for commit in (5, 99):
        out = tmp_path / f"stopped{commit}"
        await spec.stopped(out, commit)
        await spec.run(out)
        with spec.store(out) as store:
            found += store.trajectories()
        assert await spec.differences(out) == []
    assert content(found[0]) == content(found[1])
    assert [turn.rewards for turn in found[0].turns] == [{"reward": 1.0}, {"reward": 8.0}]


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ({"use": "a:b"}, "an agent has one of `run` and `use`"),
        ({"run": None, "use": "a:b", "env": {"A": "b"}}, "`env` belongs to `run`"),
        ({"with": {"a": 1}}, "`with` belongs to `use`"),
        ({"reward": "exit_code", "reward_names": ["tests"]}, "`reward: exit_code` gives `reward`"),
    ],
)
def test_settings_without_effect_are_refused(
    tmp_path: Path, tiny_tokenizer_dir: Path, agent: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        load_spec(write_spec(tmp_path, tiny_tokenizer_dir, "", ["a"], agent=agent))


async def test_an_inbox_without_replies_takes_no_reward() -> None:
    inbox = Inbox(Session(), "a/0")
    with pytest.raises(ApiError, match="no reply was sent yet"):
        inbox.reward({"value": 1})
    await asyncio.sleep(0)
