"""Agent programs that are coroutines of the spec's code (`agent.use`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_kit import Played, play, write_spec

from engine.spec.load import load_spec
from engine.validate import check_spec

CODE = """
import asyncio
import httpx

cancelled = []

class Model:
    def __init__(self, base_url, key, model):
        self.client = httpx.AsyncClient(base_url=base_url, headers={"authorization": "Bearer " + key})
        self.model = model

    async def say(self, *messages):
        answer = await self.client.post("/chat/completions", json={"model": self.model, "messages": messages})
        return answer.status_code, answer.json()

async def solve(task, base_url, key, model, how="right"):
    ask = {"role": "user", "content": task["fields"]["question"]}
    api = Model(base_url, key, model)
    try:
        async with api.client:
            if how == "silent":
                return 1.0
            status, one = await api.say(ask)
            assert status == 200, one
            first = one["choices"][0]["message"]
            if how == "parallel":
                others = await asyncio.gather(*(api.say(ask, first, ask | {"content": str(at)}) for at in range(3)))
                return {"reward": sum(status == 200 for status, _ in others)}
            if how == "raises":
                raise RuntimeError("no idea")
            if how == "never ends":
                await asyncio.sleep(600)
            if how == "at a limit":
                status, _ = await api.say(ask, first, ask)
                await asyncio.sleep(600)
            if how == "nothing":
                return None
            if how == "wrong":
                return "good"
            return float("42" in first["content"])
    except asyncio.CancelledError:
        cancelled.append(how)
        raise

def plain(task, base_url, key, model):
    return 1.0
"""
REPLIES: list[Any] = [
    "It is 42.",
    {"text": "b", "delay": 0.2},
    {"text": "c", "delay": 0.2},
    {"text": "d", "delay": 0.2},
]


async def played(folder: Path, tokenizer: Path, how: str, **changes: Any) -> Played:
    """An episode of a coroutine in a module of its own."""
    name = f"solver_{folder.name}"
    (folder / f"{name}.py").write_text(CODE)
    agent = {"run": None, "use": f"{name}:solve", "with": {"how": how}, **changes.pop("agent", {})}
    return await play(folder, tokenizer, "", REPLIES, agent=agent, **changes)


@pytest.mark.parametrize(
    ("how", "event", "reward", "failure"),
    [
        pytest.param("right", "exited", 1.0, None, marks=pytest.mark.slow),
        ("parallel", "exited", 3.0, None),
        ("raises", "died", 0.0, "no_reward"),
        pytest.param("nothing", "exited", 0.0, "no_reward", marks=pytest.mark.slow),
        pytest.param("wrong", "failed", 0.0, "bad_reward", marks=pytest.mark.slow),
        pytest.param("silent", "exited", 0.0, "agent_no_request", marks=pytest.mark.slow),
    ],
)
async def test_it_ends_with_the_events_of_a_program(
    tmp_path: Path, tiny_tokenizer_dir: Path, how: str, event: str, reward: float, failure: str | None
) -> None:
    found = await played(tmp_path, tiny_tokenizer_dir, how)
    outcome = found.trajectory.outcome
    assert (outcome.event if failure is None or how == "wrong" else found.records[-1].event) == event
    assert outcome.reward == reward
    assert (outcome.failure.kind if outcome.failure else None) == failure
    if how == "parallel":
        assert found.reasons == ["", "edited", "edited"]
    if how == "raises":
        assert outcome.failure is not None
        assert "no idea" in outcome.failure.message


@pytest.mark.parametrize(
    ("how", "agent", "limits"),
    [
        pytest.param("never ends", {"timeout": "1s"}, {}, marks=pytest.mark.slow),
        ("at a limit", {}, {"assistant_turns": 1}),
    ],
)
async def test_it_is_cancelled_at_a_limit(
    tmp_path: Path, tiny_tokenizer_dir: Path, how: str, agent: dict[str, Any], limits: dict[str, Any]
) -> None:
    import importlib

    found = await played(tmp_path, tiny_tokenizer_dir, how, agent=agent, limits=limits)
    assert found.trajectory.outcome.limit == ("assistant_turns" if limits else None)
    assert found.records[-1].event == ("request" if limits else "timeout")
    assert importlib.import_module(f"solver_{tmp_path.name}").cancelled == [how]


@pytest.mark.slow
def test_how_it_is_called_is_checked(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    (tmp_path / "solver_checked.py").write_text(CODE)
    for agent, words in (
        ({"use": "solver_checked:solve", "with": {"how": "right"}}, ""),
        ({"use": "solver_checked:solve", "with": {"why": "right"}}, "why"),
        ({"use": "solver_checked:solves"}, "solves"),
        ({"use": "solver_checked:plain"}, "not a coroutine function"),
    ):
        path = write_spec(tmp_path, tiny_tokenizer_dir, "", ["a"], agent={"run": None, **agent})
        found = [finding.message for finding in check_spec(load_spec(path)) if finding.severity == "error"]
        assert len(found) == bool(words), found
        assert all(words in message for message in found), found
