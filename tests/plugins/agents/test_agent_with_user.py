"""A user's turn, and a tool of the spec, in the same machine as an agent program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from agent_kit import play

DOCS = Path(__file__).parents[3] / "docs/agents.md"
CODE = '''
from engine.schemas.environment import UserTurn
from engine.schemas.reward import RewardEvent

class User:
    def respond(self, view):
        if "42" not in view.messages[-1].text:
            return UserTurn(content="No. Use the tool.", rewards=[RewardEvent(name="user", value=-1.0)])
        # The call brought the answer: its turn gets what the last turn got.
        moved = RewardEvent(turn="last", op="transfer", to="previous", share=1.0)
        return UserTurn(satisfied=True, solved=True, rewards=[RewardEvent(name="user", value=1.0), moved])

def add(a: int, b: int) -> int:
    """Adds."""
    return a + b
'''


def machine_of_the_docs() -> str:
    """The `machine` block of the section about users and tools."""
    (block,) = re.findall(r"```yaml\n(machine:\n.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    return block


async def test_a_user_judges_what_a_program_did_and_the_model_goes_on_with_a_tool(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    (tmp_path / "desk.py").write_text(CODE)
    replies = ["It is 41.", {"tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}, "It is 42."]
    played = await play(
        tmp_path,
        tiny_tokenizer_dir,
        "chat(ASK)\nreward(0.5)\n",
        replies,
        **yaml.safe_load(machine_of_the_docs()),
        user={"use": "desk:User"},
        tools=[{"use": "desk:add"}],
    )
    found = played.trajectory
    assert found.outcome.failure is None
    assert (found.outcome.state, found.outcome.event, found.outcome.solved) == ("DONE", "satisfied", True)
    assert [turn.event for turn in found.turns] == ["answered", "tool_calls", "answered"]
    assert [message.role for message in found.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert played.reasons == [""], "one row: the user's words and the tool's result continue it"
    assert found.outcome.rewards == pytest.approx({"reward": 0.5, "user": 0.0})
    assert [turn.rewards for turn in found.turns] == [{"reward": 0.5, "user": -1.0}, {"user": 1.0}, {"user": 0.0}]
