"""Unchanged agents of real packages as episodes. `scripts/agent_packages.sh` installs the packages, each in an environment of its own.

Of each, `play` asserts that prompts are those that the backend saw, that each sampled token is trained once, and that a replay gives the
same rows. The reasons of the rows are exact: one row is `[""]`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from agent_kit import Played, play
from chat_kit import THINKING, make_tokenizer

pytestmark = pytest.mark.agents

ROOT = Path(__file__).parents[3]
PACKAGES = Path(os.environ.get("AGENT_PACKAGES", ROOT / ".agents"))
PROGRAMS = Path(__file__).parent / "programs"
CALL: dict[str, Any] = {"text": "Let me add.", "tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}
FORGETS = "the template shows what was said before the reply differently"
STRICT: dict[str, Any] = {"ignore": ["strict"]}
"""Of a program whose tools ask for strict arguments, which need a grammar."""


def thinking(reply: str | dict[str, Any]) -> str:
    """A reply with reasoning before it, as Qwen3 writes it."""
    whole: dict[str, Any] = {"text": reply} if isinstance(reply, str) else reply
    calls = [f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in whole.get("tool_calls", ())]
    return f"<think>\nI think.\n</think>\n\n{whole['text']}{''.join(calls)}"


async def run(folder: Path, tokenizer: Path, package: str, program: str, replies: Any, **changes: Any) -> Played:
    python = PACKAGES / package / "bin/python"
    if not python.exists():
        pytest.skip(f"NOT CHECKED: run scripts/agent_packages.sh {package}")
    changes["agent"] = {
        "run": f"exec {python} {PROGRAMS}/{program}",
        "timeout": "120s",
        "env": {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"},
    } | changes.get("agent", {})
    changes.setdefault("limits", {"turn_tokens": 400})
    played = await play(folder, tokenizer, "", replies, **changes)
    outcome = played.trajectory.outcome
    assert (outcome.failure, outcome.event, outcome.reward) == (None, "exited", 1.0)
    assert len(played.trajectory.turns) == len(replies)
    if tokenizer.name == "thinking":
        replied = [message for message in played.trajectory.messages if message.role == "assistant"]
        assert [message.reasoning for message in replied] == ["I think."] * len(replies)
    return played


@pytest.fixture
def reasoning_dir(tmp_path: Path) -> Path:
    """A tokenizer whose template separates reasoning, and drops that of earlier turns as Qwen3's does."""
    return make_tokenizer(tmp_path / "thinking", THINKING)


TWO_QUESTIONS = [CALL, "It is 42.", "Yes."]
"""A call, and an answer, and an answer to the second question."""


@pytest.mark.parametrize("how", ["responses whole", "responses streamed", "chat whole", "chat streamed"])
async def test_openai_agents(tmp_path: Path, tiny_tokenizer_dir: Path, how: str) -> None:
    program = f"openai_agents_program.py {how}"
    played = await run(tmp_path, tiny_tokenizer_dir, "openai-agents", program, TWO_QUESTIONS, agent=STRICT)
    assert played.reasons == [""]
    strict = "tools[0].function.strict" if how.startswith("chat") else "tools[0].strict"
    assert all(record.overruled == [strict] for record in played.records[:3])


@pytest.mark.parametrize("how", ["responses whole", "chat whole"])
async def test_reasoning_dropped_by_openai_agents_and_by_the_template(
    tmp_path: Path, reasoning_dir: Path, how: str
) -> None:
    """Chat Completions: the package drops reasoning. In both, the template drops it before the second question: a second row."""
    program = f"openai_agents_program.py {how}"
    played = await run(tmp_path, reasoning_dir, "openai-agents", program, [*map(thinking, TWO_QUESTIONS)], agent=STRICT)
    assert played.reasons == ["", FORGETS]
    assert [turn.branch for turn in played.trajectory.turns] == [0, 0, 1]


@pytest.mark.parametrize("how", ["responses whole", "responses streamed", "chat whole", "chat streamed"])
async def test_langgraph(tmp_path: Path, tiny_tokenizer_dir: Path, how: str) -> None:
    played = await run(tmp_path, tiny_tokenizer_dir, "langgraph", f"langgraph_program.py {how}", TWO_QUESTIONS)
    assert played.reasons == [""]


@pytest.mark.parametrize("how", ["responses whole", "chat whole"])
async def test_reasoning_dropped_by_langgraph_and_by_the_template(
    tmp_path: Path, reasoning_dir: Path, how: str
) -> None:
    replies = [*map(thinking, TWO_QUESTIONS)]
    played = await run(tmp_path, reasoning_dir, "langgraph", f"langgraph_program.py {how}", replies)
    assert played.reasons == ["", FORGETS]
    assert [turn.branch for turn in played.trajectory.turns] == [0, 0, 1]


async def test_smolagents_with_tool_calls(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Its history has calls rewritten as text, so each step is a row."""
    final = {"text": "", "tool_calls": [{"name": "final_answer", "arguments": {"answer": "42"}}]}
    agent = {"allow": ["stop"], "ignore": ["tool_choice"]}
    played = await run(
        tmp_path, tiny_tokenizer_dir, "smolagents", "smolagents_program.py tools", [CALL, final], agent=agent
    )
    assert played.reasons == ["", "edited"]
    assert played.records[0].overruled == ["tool_choice"]


async def test_smolagents_with_code(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Its history has each reply with the stop text again, and with the code that it ran as a call in text: each step is a row."""
    replies = ["Thought: add.\n<code>\nprint(add(a=17, b=25))\n</code>", "<code>\nfinal_answer(42)\n</code>"]
    played = await run(
        tmp_path, tiny_tokenizer_dir, "smolagents", "smolagents_program.py code", replies, agent={"allow": ["stop"]}
    )
    assert played.reasons == ["", "edited"]
    assert "</code>" in played.requests[0].sampling.stop


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
async def test_litellm(tmp_path: Path, tiny_tokenizer_dir: Path, provider: str) -> None:
    program = f"litellm_program.py {provider}"
    played = await run(tmp_path, tiny_tokenizer_dir, "mini-swe-agent", program, [CALL, "It is 42."])
    assert played.reasons == [""]


@pytest.mark.parametrize("thinks", [False, True])
async def test_mini_swe_agent(
    tmp_path: Path, tiny_tokenizer_dir: Path, thinks: bool, request: pytest.FixtureRequest
) -> None:
    def bash(command: str) -> dict[str, Any]:
        return {"text": "Next.", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}

    replies: list[Any] = [bash("expr 17 + 25"), bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42")]
    tokenizer = request.getfixturevalue("reasoning_dir") if thinks else tiny_tokenizer_dir
    replies = [*map(thinking, replies)] if thinks else replies
    played = await run(tmp_path, tokenizer, "mini-swe-agent", "mini_swe_agent_program.py", replies)
    assert played.reasons == [""]


@pytest.mark.parametrize("how", ["loop", "streamed", "dropped", "runner"])
async def test_anthropic(tmp_path: Path, reasoning_dir: Path, how: str) -> None:
    """The tool runner asks for no thinking, so it has none to send back; `dropped` has some and drops it."""
    replies = [thinking(CALL), thinking(CALL), thinking("It is 42.")]
    played = await run(tmp_path, reasoning_dir, "anthropic", f"anthropic_program.py {how}", replies)
    assert played.reasons == [""]


@pytest.mark.parametrize("how", ["whole", "streamed"])
async def test_autogen(tmp_path: Path, tiny_tokenizer_dir: Path, how: str) -> None:
    """It sends `name` with each message of a user or an agent."""
    program, agent = f"autogen_program.py {how}", {"ignore": ["name"]}
    played = await run(tmp_path, tiny_tokenizer_dir, "autogen", program, TWO_QUESTIONS, agent=agent)
    assert played.reasons == [""]
    assert [record.overruled for record in played.records[:3]] == [["messages.name"]] * 3


async def test_curl(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("NOT CHECKED: no curl")
    agent = {"run": f"sh {PROGRAMS}/curl_program.sh"}
    played = await play(tmp_path, tiny_tokenizer_dir, "", ["one", "two", "three", "four"], agent=agent)
    assert played.trajectory.outcome.failure is None
    assert played.reasons == ["", "subagent", "repeated"]
