"""Responses and Messages as episodes: one row where the history echoes, exact prompts, and equal replays (`agent_kit.check`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_kit import play, write_spec
from chat_kit import THINKING, make_tokenizer
from stopping import Resumed, content

CALL = {"text": "Let me add.", "tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}] * 2}
RESPONSES = """
TOOL = [{"type": "function", **TOOLS[0]["function"]}]
def results(answer):
    return [{"type": "function_call_output", "call_id": item["call_id"], "output": str(sum(json.loads(item["arguments"]).values()))}
            for item in answer["output"] if item["type"] == "function_call"]
"""
MESSAGES = """
TOOL = [{"name": "add", "description": "Adds.", "input_schema": TOOLS[0]["function"]["parameters"]}]
def results(answer):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": str(sum(block["input"].values()))}
                                        for block in answer["content"] if block["type"] == "tool_use"]}
def said(answer):
    return {"role": "assistant", "content": answer["content"]}
"""


@pytest.mark.parametrize(
    ("program", "reasons"),
    [
        pytest.param(
            RESPONSES
            + """
history = [ASK]
for _ in range(2):
    answer = respond(history, tools=TOOL, instructions="Add.")
    history += answer["output"] + results(answer)
answer = respond(history, tools=TOOL, instructions="Add.")
assert answer["output"][-1]["content"][0]["text"] == "It is 42.", answer
reward()
""",
            [""],
            id="responses with items",
        ),
        pytest.param(
            RESPONSES
            + """
answer = respond([ASK], tools=TOOL, instructions="Add.")
for _ in range(2):
    answer = respond(results(answer), tools=TOOL, instructions="Add.", previous_response_id=answer["id"])
assert answer["status"] == "completed", answer
reward()
""",
            [""],
            id="responses with previous_response_id",
        ),
        pytest.param(
            RESPONSES
            + """
one = respond([ASK], tools=TOOL, instructions="Add.")
two = respond(results(one), tools=TOOL, instructions="Add.", previous_response_id=one["id"])
respond(results(one), tools=TOOL, instructions="Add!", previous_response_id=one["id"])
reward()
""",
            ["", "subagent"],
            id="responses with other instructions",
        ),
        pytest.param(
            MESSAGES
            + """
history = [ASK]
for _ in range(2):
    answer = message(*history, tools=TOOL, system="Add.")
    history += [said(answer), results(answer)]
answer = message(*history, tools=TOOL, system=[{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}])
assert (answer["stop_reason"], answer["content"][0]["text"]) == ("end_turn", "It is 42."), answer
reward()
""",
            [""],
            id="messages",
        ),
        pytest.param(
            MESSAGES
            + """
one = message(ASK, tools=TOOL)
chat(ASK, {"role": "assistant", "content": "Let me add.", "tool_calls": [
    {"id": block["id"], "type": "function", "function": {"name": "add", "arguments": json.dumps(block["input"])}}
    for block in one["content"] if block["type"] == "tool_use"]}, {"role": "user", "content": "So?"}, tools=TOOLS)
edited = [{"type": "text", "text": "No."}, *one["content"][1:]]
message(ASK, {"role": "assistant", "content": edited}, results(one), tools=TOOL)
reward()
""",
            ["", "edited"],
            id="two APIs on one thread, and an edit",
        ),
    ],
)
async def test_how_many_rows_an_episode_becomes(
    tmp_path: Path, tiny_tokenizer_dir: Path, program: str, reasons: list[str]
) -> None:
    played = await play(tmp_path, tiny_tokenizer_dir, program, [CALL, CALL, "It is 42."], limits={"turn_tokens": 200})
    assert played.trajectory.outcome.failure is None
    assert played.reasons == reasons
    assert len(played.trajectory.turns) == 3


async def test_counted_tokens_are_those_of_the_prompt(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    program = (
        MESSAGES
        + """
def both(*history, **more):
    status, counted = post({"messages": list(history), **more}, "messages/count_tokens")
    assert status == 200, counted
    answer = message(*history, **more)
    assert counted["input_tokens"] == answer["usage"]["input_tokens"], (counted, answer)
    return answer

one = both(ASK, tools=TOOL, system="Add.")
two = both(ASK, said(one), results(one), tools=TOOL, system="Add.")
both(ASK, said(one), results(one), said(two), ASK, system="Add.")  # other tools
both(ASK, said(one), ASK, tools=TOOL, system="Add.")  # a branch
both(ASK)
reward()
"""
    )
    played = await play(tmp_path, tiny_tokenizer_dir, program, [CALL, CALL, "It is 42.", "So.", "No."])
    assert played.trajectory.outcome.failure is None
    assert played.reasons == ["", "tools_changed", "edited", "subagent"]
    assert len(played.requests) == 5


async def test_a_branch_may_begin_after_a_reply_that_was_cut(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    program = """
one = chat(ASK)
chat(ASK, one, ASK)
chat(ASK, one, {"role": "user", "content": "Why?"})
reward()
"""
    limits = {"turn_tokens": 3}
    played = await play(
        tmp_path, tiny_tokenizer_dir, program, ["One two three four five", "Yes.", "So."], limits=limits
    )
    assert played.trajectory.outcome.failure is None
    assert played.reasons == ["", "edited"]
    assert played.trajectory.turns[0].finish.type == "length"


DROPPING = {
    "chat": """
def ask(*history):
    return [{key: value for key, value in chat(*history, tools=TOOLS).items() if key != "reasoning_content"}]
def answer(reply):
    return [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in reply[-1].get("tool_calls", ())]
""",
    "responses": RESPONSES
    + """
def ask(*history):
    return [item for item in respond(list(history), tools=TOOL)["output"] if item["type"] != "reasoning"]
def answer(reply):
    return results({"output": reply})
""",
    "messages": MESSAGES
    + """
def ask(*history):
    blocks = message(*history, tools=TOOL, thinking={"type": "enabled", "budget_tokens": 1024})["content"]
    assert blocks[0]["type"] == "thinking", blocks
    return [said({"content": blocks[1:]})]
def answer(reply):
    return [results(reply[0])]
""",
}
"""By API: `ask` gives a reply without its reasoning, `answer` the results of its calls."""


@pytest.fixture(scope="module")
def reasoning_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template separates reasoning, and drops that of earlier turns as Qwen3's does."""
    return make_tokenizer(tmp_path_factory.mktemp("thinking"), THINKING)


@pytest.mark.parametrize("api", DROPPING)
async def test_reasoning_dropped_by_the_program_is_no_branch_and_by_the_template_is_one(
    tmp_path: Path, reasoning_dir: Path, api: str
) -> None:
    program = (
        DROPPING[api]
        + """
one = ask(ASK)
two = ask(ASK, *one, *answer(one))
ask(ASK, *one, *answer(one), *two, {"role": "user", "content": "Are you sure?"})
reward()
"""
    )
    think = "<think>\nI think.\n</think>\n\n"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
    played = await play(
        tmp_path,
        reasoning_dir,
        program,
        [f"{think}Let me add.\n{call}", f"{think}It is 42.", f"{think}Yes."],
        limits={"turn_tokens": 200},
    )
    assert played.trajectory.outcome.failure is None
    replies = [message for message in played.trajectory.messages if message.role == "assistant"]
    assert [message.reasoning for message in replies] == ["I think."] * 3
    assert [turn.branch for turn in played.trajectory.turns] == [0, 0, 1]
    assert played.reasons == ["", "the template shows what was said before the reply differently"]


STORED = {
    "responses": RESPONSES
    + """
answer = respond([ASK], tools=TOOL)
for _ in range(2):
    answer = respond(results(answer), tools=TOOL, previous_response_id=answer["id"])
reward()
""",
    "messages": MESSAGES
    + """
answer = message(ASK, tools=TOOL, thread={"type": "create"})
for _ in range(2):
    answer = message(results(answer), thread={"type": "continue", "previous_message_id": answer["id"]})
reward()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("api", STORED)
async def test_a_stopped_episode_goes_on_with_what_the_endpoint_stored(
    tmp_path: Path, tiny_tokenizer_dir: Path, api: str
) -> None:
    limits = {"turn_tokens": 200}
    spec = Resumed(write_spec(tmp_path, tiny_tokenizer_dir, STORED[api], [CALL, CALL, "It is 42."], limits=limits))
    await spec.run(tmp_path / "whole")
    with spec.store(tmp_path / "whole") as store:
        (trajectory,) = store.trajectories()
    assert trajectory.outcome.failure is None
    assert [branch.reason for branch in trajectory.branches] == [""]
    for commit in (3, 5):
        out = tmp_path / f"stopped{commit}"
        await spec.stopped(out, commit)
        await spec.run(out)
        with spec.store(out) as store:
            (resumed,) = store.trajectories()
            assert store.episode(resumed.episode_id).attempt == 0
        assert content(resumed) == content(trajectory)
        assert await spec.differences(out) == []
