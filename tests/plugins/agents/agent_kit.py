"""Runs an agent program against the scripted backend, and checks what holds of every such episode: see `by_turn` and `check_rows`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from stopping import Resumed
from written_specs import save_spec, scripted_spec

from engine.backends.registry import open_backend
from engine.plugins.agents.record import AgentRecord
from engine.runner.runner import Runner
from engine.schemas.generation import GenerateRequest, Generation
from engine.schemas.trajectory import Trajectory
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore

CLIENT = '''
import json, os, sys, time, urllib.error, urllib.request
TASK = json.loads(os.environ["EPISODE_TASK"])
ASK = {"role": "user", "content": TASK["fields"]["question"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters":
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]

def post(body, path="chat/completions", **headers):
    """(status, answer) of one request."""
    url = os.environ["OPENAI_BASE_URL"] + "/" + path
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json",
        "anthropic-version": "2023-06-01", **headers}
    data = json.dumps({"model": os.environ["OPENAI_MODEL"], **body}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]

def chat(*messages, **more):
    """The message of the reply to a conversation."""
    status, answer = post({"messages": list(messages), **more})
    assert status == 200, answer
    return answer["choices"][0]["message"]

def respond(given, **more):
    """The response to input items."""
    status, answer = post({"input": given, **more}, "responses")
    assert status == 200, answer
    return answer

def message(*messages, **more):
    """The message that answers messages, by Anthropic's API."""
    status, answer = post({"messages": list(messages), "max_tokens": 99, **more}, "messages")
    assert status == 200, answer
    return answer

def reward(value=1.0):
    with open(os.environ["EPISODE_REWARD_FILE"], "w") as file:
        json.dump(value, file)
'''
"""What the programs of tests begin with: a client of the standard library."""


class Call(NamedTuple):
    """One request to the backend."""

    request: GenerateRequest
    generation: Generation
    began: float
    ended: float


def most_at_once(calls: Sequence[Call]) -> int:
    """The largest number of requests that the backend answered at the same time."""
    return max(sum(other.began <= call.began < other.ended for other in calls) for call in calls)


@dataclass
class Played:
    """One episode that was run."""

    trajectory: Trajectory
    records: list[AgentRecord]
    requests: list[GenerateRequest] = field(default_factory=list)
    """What the backend was asked, by turn."""
    calls: list[Call] = field(default_factory=list)
    """All that it was asked, in the order in which it answered."""

    @property
    def prompts(self) -> list[list[int]]:
        """The ids that the backend was given, by turn."""
        return [request.input_ids.tolist() for request in self.requests]

    @property
    def reasons(self) -> list[str]:
        return [branch.reason for branch in self.trajectory.branches]


def write_spec(folder: Path, tokenizer: Path, program: str, replies: Any, **changes: Any) -> Path:
    """Write a program and its spec."""
    (folder / "program.py").write_text(CLIENT + program)
    spec: dict[str, Any] = {
        **scripted_spec("agent", tokenizer, replies, [{"id": "a", "question": "What is 17 plus 25?"}], ask=None),
        "agent": {"run": "exec python program.py", "timeout": "60s"},
        "machine": "agent",
        "limits": {"turn_tokens": 60, "assistant_turns": 8},
    }
    for key, value in changes.items():
        spec[key] = spec[key] | value if isinstance(value, dict) and isinstance(spec.get(key), dict) else value
    return save_spec(folder / "spec.yaml", spec)


async def play(folder: Path, tokenizer: Path, program: str, replies: Any, **changes: Any) -> Played:
    """Run one episode, and check it: prompts, trained tokens, and that a replay gives the same."""
    spec = Resumed(write_spec(folder, tokenizer, program, replies, **changes))
    backend = open_backend(spec.loaded, spec.template)
    calls: list[Call] = []
    generate = backend.generate

    async def recorded(request: GenerateRequest) -> Generation:
        began = time.monotonic()
        generation = await generate(request)
        calls.append(Call(request, generation, began, time.monotonic()))
        return generation

    backend.generate = recorded  # type: ignore[method-assign]
    await backend.start()
    store = RunStore.create(folder / "runs", RunHeader.of(spec.loaded))
    try:
        await Runner(spec.loaded, load_tasks(spec.loaded), spec.template, backend, store).run()
    finally:
        await backend.close()
        store.close()
    with spec.store(folder / "runs") as read:
        (trajectory,) = read.trajectories()
        journal = read.journal(trajectory.episode_id)
    records = [entry.record for entry in journal if isinstance(entry.record, AgentRecord)]
    played = Played(trajectory, records, by_turn(trajectory, calls), calls)
    assert await spec.differences(folder / "runs") == []
    check_rows(trajectory)
    return played


def by_turn(trajectory: Trajectory, calls: Sequence[Call]) -> list[GenerateRequest]:
    """The request that the backend got for each turn: another one for each, with the turn's prompt and its reply."""
    left, found = [*calls], []
    for turn in trajectory.turns:
        ids = trajectory.branches[turn.branch].input_ids
        for call in left:
            same = np.array_equal(call.request.input_ids, ids[: turn.start])
            if same and np.array_equal(call.generation.output_ids, ids[turn.start : turn.end]):
                found.append(call.request)
                left.remove(call)
                break
        else:
            raise AssertionError(f"the server did not see the prompt and reply of turn {turn.index}")
    return found


def check_rows(trajectory: Trajectory) -> None:
    """Each sampled token is trained once, but those of replies that nobody received, which are not trained."""
    trained = [int(turn) for branch in trajectory.branches for turn in branch.turn_ids[branch.loss_mask == 1]]
    wanted = [turn.index for turn in trajectory.turns if not turn.unreceived for _ in range(turn.end - turn.start)]
    assert sorted(trained) == wanted
    assert trajectory.counts["sampled_tokens"] == sum(turn.end - turn.start for turn in trajectory.turns)
    for branch in trajectory.branches:
        untrained = branch.loss_mask == 0
        assert not branch.logprobs[untrained].any()
        assert (branch.weight_versions[untrained] == -1).all()
