"""Agent programs as episodes: each request is a turn, prompts are exact, each sampled token is trained once, replays agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_kit import play, write_spec
from damaged_rows import assert_refused, damaged_row
from slow_cases import slow_but_each
from stopping import Resumed, content
from waiting import process_runs, until

from engine.runner.summary import RunSummary

CALL = {"text": "Let me add.", "tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}
LOOP = """
messages = [ASK]
while True:
    message = chat(*messages, tools=TOOLS)
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        result = sum(json.loads(call["function"]["arguments"]).values())
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
reward(1.0 if "42" in message["content"] else 0.0)
"""


async def test_a_loop_with_tools_is_one_row(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    played = await play(tmp_path, tiny_tokenizer_dir, LOOP, [CALL, CALL, "It is 42."])
    assert played.reasons == [""]
    assert [message.role for message in played.trajectory.messages] == [
        "user", "assistant", "tool", "assistant", "tool", "assistant"
    ]  # fmt: skip
    assert [message.text for message in played.trajectory.messages if message.role == "tool"] == ["42", "42"]
    assert played.trajectory.outcome.event == "exited"
    assert played.trajectory.outcome.reward == 1.0
    assert [record.event for record in played.records] == ["request"] * 3 + ["exited"]


@pytest.mark.parametrize(
    ("program", "replies", "reasons"),
    slow_but_each(
        2,
        [
            pytest.param(
                "one = chat(ASK)\nchat(ASK, {**one, 'content': 'no'}, ASK)\nreward()",
                ["It is 42.", "Yes."],
                ["", "edited"],
                id="an edited reply",
            ),
            pytest.param(
                "one = chat(ASK)\nchat(ASK, one, ASK)\nchat(ASK, one, {'role': 'user', 'content': 'Why?'})\nreward()",
                ["It is 42.", "Yes.", "So."],
                ["", "edited"],
                id="an edited question after a kept reply",
            ),
            pytest.param(
                "chat(ASK)\nchat(ASK)\nreward()", ["It is 42.", "It is 41."], ["", "repeated"], id="an unmarked repeat"
            ),
            pytest.param(
                "one = chat(ASK)\nchat(ASK, one, ASK, tools=TOOLS)\nreward()",
                ["It is 42.", "Yes."],
                ["", "tools_changed"],
                id="other tools",
            ),
            pytest.param(
                "one = chat(ASK)\nsub = {'role': 'user', 'content': 'Sub.'}\ntwo = chat(sub)\nthree = chat(ASK, one, ASK)\n"
                "four = chat(sub, two, ASK)\nchat(ASK, one, ASK, three, ASK)\nreward()",
                ["a", "b", "c", "d", "e"],
                ["", "subagent"],
                id="two threads in turn are two rows",
            ),
            pytest.param(
                "one = chat(ASK)\ntwo = chat(ASK, one, ASK)\nchat(ASK, {'role': 'user', 'content': 'Summary.'})\nreward()",
                ["a", "b", "c"],
                ["", "condensed"],
                id="a condensed history",
            ),
            pytest.param(
                "one = chat(ASK)\none = {'role': 'assistant', 'content': [{'type': 'text', 'text': one['content'] + '<|im_end|>'}],"
                " 'provider_specific_fields': None}\nchat(ASK, one, ASK)\nreward()",
                ["It is 42.", "Yes."],
                [""],
                id="what an SDK changes is no branch",
            ),
        ],
        several=True,
    ),
)
async def test_how_many_rows_an_episode_becomes(
    tmp_path: Path, tiny_tokenizer_dir: Path, program: str, replies: list[str], reasons: list[str]
) -> None:
    played = await play(tmp_path, tiny_tokenizer_dir, program, replies)
    assert played.reasons == reasons
    assert len(played.trajectory.turns) == len(replies)


@pytest.mark.parametrize("branch", [0, 1])
async def test_the_guard_reads_every_branch_of_a_program(branch: int, tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    program = """
one = chat(ASK)
two = chat(ASK, one, {"role": "user", "content": "And then?"})
chat(ASK, one, {"role": "user", "content": "And before?"})
reward()
"""
    with damaged_row(branch) as places:
        played = await play(tmp_path, tiny_tokenizer_dir, program, ["a", "b", "c"])
    assert len(played.trajectory.branches) == 2
    assert_refused(played.trajectory.outcome, places)


async def test_n_replies_are_n_turns(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    program = """
status, answer = post({"messages": [ASK], "n": 3})
texts = [choice["message"]["content"] for choice in answer["choices"]]
assert texts == ["a", "b", "c"], texts
chat(ASK, answer["choices"][1]["message"], ASK)
reward()
"""
    played = await play(tmp_path, tiny_tokenizer_dir, program, ["a", "b", "c", "d"])
    assert played.reasons == ["", "sibling", "sibling"]
    summary = RunSummary()
    for _ in range(2):
        summary.add(played.trajectory)
    assert (summary.branches, dict(summary.branch_reasons)) == (6, {"sibling": 4})
    assert [turn.branch for turn in played.trajectory.turns] == [0, 1, 2, 1]


async def test_parallel_requests_are_all_recorded(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    ones = list(pool.map(lambda at: chat({"role": "user", "content": f"Part {at}"}), range(4)))
assert sorted(one["content"] for one in ones) == list("abcd"), ones
reward()
"""
    played = await play(tmp_path, tiny_tokenizer_dir, program, list("abcd"))
    assert len(played.trajectory.branches) == 4
    assert {message.text for message in played.trajectory.messages if message.role == "user"} == {
        f"Part {at}" for at in range(4)
    }


async def test_a_marked_retry_gets_the_reply_of_the_request_that_it_repeats(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    program = """
body = {"messages": [ASK]}
first, second = post(body), post(body, **{"x-stainless-retry-count": "1"})
assert first == second and first[0] == 200, (first, second)
reward()
"""
    played = await play(tmp_path, tiny_tokenizer_dir, program, ["It is 42.", "never"])
    assert len(played.trajectory.turns) == 1


async def test_what_is_not_supported_is_refused_and_costs_no_turn(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    program = """
for field, value in {"top_logprobs": 2, "stop": ["x"], "n": 0, "tool_choice": "required", "frobnicate": 1}.items():
    status, error = post({"messages": [ASK], field: value})
    assert (status, error["param"]) == (400, field), (status, error)
status, error = post({"messages": [ASK], "model": "gpt-9"})
assert (status, error["param"]) == (404, "model"), error
image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
status, error = post({"messages": [{"role": "user", "content": [image]}]})
assert (status, error["param"]) == (400, "messages"), error
chat(ASK, temperature=0.1, max_tokens=5)
reward()
"""
    played = await play(tmp_path, tiny_tokenizer_dir, program, ["It is 42."])
    assert len(played.trajectory.turns) == 1
    assert played.records[0].overruled == ["max_tokens", "temperature"]


async def test_what_the_spec_allows_has_its_effect_and_what_it_ignores_is_reported(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    program = """
one = chat(ASK, temperature=0.5, max_tokens=3, top_p=0.5, tool_choice="required")
two = chat(ASK, one, ASK, stop=["42"])
assert two["content"] == "It is ", two
chat(ASK, one, ASK, {**two, "content": two["content"] + "42"}, ASK, max_tokens=1000)
for field, value in {"temperature": 3, "max_tokens": 0, "stop": [""], "response_format": {"type": "json_object"}}.items():
    status, error = post({"messages": [ASK], field: value})
    assert (status, error["param"]) == (400, field), (status, error)
reward()
"""
    agent = {"allow": ["temperature", "max_tokens", "stop"], "ignore": ["tool_choice"]}
    played = await play(
        tmp_path, tiny_tokenizer_dir, program, ["One two three four five six", "It is 42, so.", "Yes."], agent=agent
    )
    assert played.reasons == [""]
    assert [record.overruled for record in played.records[:3]] == [["tool_choice", "top_p"], [], []]
    sampled = [(request.sampling.temperature, request.sampling.stop) for request in played.requests]
    assert sampled == [(0.5, []), (1.0, ["42"]), (1.0, [])]
    assert [request.max_new_tokens for request in played.requests] == [3, 60, 60]
    assert [turn.finish.type for turn in played.trajectory.turns] == ["length", "stop", "stop"]


async def test_a_limit_ends_the_episode_and_the_program(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    program = "chat(ASK)\npost({'messages': [ASK, ASK]})\ntime.sleep(600)\n"
    changes: dict[str, Any] = {"limits": {"assistant_turns": 1}}
    played = await play(tmp_path, tiny_tokenizer_dir, program, ["a"], **changes)
    assert played.trajectory.outcome.limit == "assistant_turns"
    assert len(played.trajectory.turns) == 1


@pytest.mark.slow
async def test_a_program_that_never_ends_is_killed_with_what_it_started(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    program = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
chat(ASK)
with open("pid", "w") as file:
    file.write(str(child.pid))
reward(0.5)
time.sleep(600)
"""
    played = await play(tmp_path, tiny_tokenizer_dir, program, ["a"], agent={"timeout": "3s"})
    assert played.trajectory.outcome.event == "timeout"
    assert played.trajectory.outcome.reward == 0.5
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: not process_runs(pid), 120)


@pytest.mark.parametrize(
    ("program", "kind"),
    slow_but_each(
        2,
        [
            pytest.param("chat(ASK)\nsys.exit('broken')", "no_reward", id="died"),
            pytest.param("chat(ASK)", "no_reward", id="no reward"),
            pytest.param("reward()", "agent_no_request", id="no request"),
            pytest.param("chat(ASK)\nreward('good')", "bad_reward", id="no number"),
        ],
        several=True,
    ),
)
async def test_an_end_without_a_reward_is_a_failure(
    tmp_path: Path, tiny_tokenizer_dir: Path, program: str, kind: str
) -> None:
    played = await play(tmp_path, tiny_tokenizer_dir, program, ["a"])
    failure = played.trajectory.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == (kind, "environment")
    assert not played.trajectory.outcome.trainable


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ("{'messages': [ASK | {'name': 'Ada'}]}", "`messages[0].name` is not supported"),
        ("{'messages': [ASK | {'content': [{'type': 'image_url', 'image_url': {'url': 'data:,a'}}]}]}", "image"),
        ("{}, 'completions'", "POST /v1/completions is not served"),
    ],
    ids=["read", "shown", "served"],
)
async def test_a_program_whose_requests_were_all_refused_is_told_why(
    tmp_path: Path, tiny_tokenizer_dir: Path, request_: str, why: str
) -> None:
    """Wherever a request is refused: while it is read, when the model would be shown it, or for its path."""
    played = await play(tmp_path, tiny_tokenizer_dir, f"post({request_})\nsys.exit(3)", ["unused"])
    failure = played.trajectory.outcome.failure
    assert failure is not None
    assert failure.kind == "agent_no_request"
    assert failure.message.startswith(
        "the program ended with status 3 without a reply: its requests were refused, the newest because "
    )
    assert why in failure.message


async def test_a_stopped_episode_goes_on_with_its_recorded_replies(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec = Resumed(write_spec(tmp_path, tiny_tokenizer_dir, LOOP, [CALL, "It is 42."]))
    await spec.run(tmp_path / "whole")
    with spec.store(tmp_path / "whole") as store:
        (trajectory,) = store.trajectories()
    for commit in (3, 5):
        out = tmp_path / f"stopped{commit}"
        await spec.stopped(out, commit)
        await spec.run(out)
        with spec.store(out) as store:
            (resumed,) = store.trajectories()
            assert store.episode(resumed.episode_id).attempt == 0
        assert content(resumed) == content(trajectory)
        assert await spec.differences(out) == []


@pytest.mark.slow
async def test_a_program_that_asks_otherwise_on_a_resume_begins_again(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    program = "chat(ASK, {'role': 'user', 'content': str(time.time())})\nchat(ASK)\nreward()"
    spec = Resumed(write_spec(tmp_path, tiny_tokenizer_dir, program, ["a", "b"]))
    attempts = []
    for commit in (3, 5, 7):
        out = tmp_path / f"runs{commit}"
        await spec.starved(out, commit)
        await spec.run(out)
        with spec.store(out) as store:
            (resumed,) = store.trajectories()
            attempts.append(store.episode(resumed.episode_id).attempt)
        assert len(resumed.turns) == 2
        assert await spec.differences(out) == []
    assert 1 in attempts
