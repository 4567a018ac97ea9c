"""What a model that plays the user is shown, and what is read from its reply."""

from __future__ import annotations

from typing import Any

import pytest

from engine.actions.calling.workers import Workers
from engine.errors import SpecCodeError
from engine.plugins.roles.models import SILENCE, ModelUser, dialogue_of, read_marks, without_reasoning
from engine.schemas.environment import EpisodeView, Task
from engine.schemas.message import Message, ToolCall
from engine.schemas.reward import RewardEvent
from engine.schemas.role import Mark, UserSpec

SAID = [
    Message(role="system", content="You are the policy."),
    Message(role="user", content="An example?"),
    Message(role="assistant", content="Its answer."),
    Message(role="user", content="I want a train."),
    Message(role="assistant", content="", tool_calls=[ToolCall(id="c", name="look", arguments={})]),
    Message(role="tool", content="secret table"),
    Message(role="assistant", content="To where?", reasoning="They did not say."),
    Message(role="user", content="North."),
    Message(role="assistant", content="At nine."),
]


def view(messages: list[Message], turn: int, **changes: Any) -> EpisodeView:
    settings: dict[str, Any] = {
        "episode_id": "t/0",
        "task": Task(id="t", index=0, fields={"wish": "a train"}),
        "seed": 0,
        "messages": messages,
        "turn": turn,
        "user_turn": 1,
        "calls": [],
        "malformed": [],
        "finish": "stop",
        "facts": {},
        "rewards": [],
    }
    return EpisodeView(**(settings | changes))


def user(*prompt: tuple[str, str], **changes: Any) -> ModelUser:
    told = [{"role": role, "content": content} for role, content in prompt]

    def nobody() -> Any:
        raise AssertionError("nobody is asked")

    return ModelUser(UserSpec.model_validate({"prompt": told, **changes}), nobody, None, Workers(1))


def test_the_dialogue_is_what_was_said_aloud_in_the_episode() -> None:
    assert dialogue_of(view(SAID, 2)) == [
        ("user", "I want a train."),
        ("assistant", "To where?"),
        ("user", "North."),
        ("assistant", "At nine."),
    ]


def test_roles_are_changed_over_and_the_opener_comes_first() -> None:
    shown = user(("system", "You want {{task.wish}}."), opener="Yes?").prompt(view(SAID, 2))
    assert [(message.role, message.content) for message in shown] == [
        ("system", "You want a train."),
        ("user", "Yes?"),
        ("assistant", "I want a train."),
        ("user", "To where?"),
        ("assistant", "North."),
        ("user", "At nine."),
    ]


def test_a_prompt_that_names_the_dialogue_is_all_that_is_shown() -> None:
    shown = user(("user", "{{turn}}: {{verdict}} / {{reply}} / {{dialogue}}")).prompt(view(SAID[:-2], 1), "No.")
    assert [message.content for message in shown] == [
        "1: No. / To where? / User: I want a train.\n\nAssistant: To where?"
    ]


def test_silence_is_written_out() -> None:
    silent = [*SAID[:4], Message(role="assistant", content=" ")]
    assert dialogue_of(view(silent, 0)) == [("user", "I want a train."), ("assistant", SILENCE)]


def test_a_user_who_speaks_first_hears_what_there_is() -> None:
    assert dialogue_of(view([SAID[0], SAID[3]], -1)) == [("user", "I want a train.")]


def test_messages_in_a_row_are_put_together() -> None:
    rows = [
        Message(role="user", content="a"),
        Message(role="user", content="b"),
        Message(role="assistant", content="c"),
    ]
    assert dialogue_of(view(rows, 0)) == [("user", "a\n\nb"), ("assistant", "c")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>a</think>\n\nb", "b"),
        ("a</think>b", "b"),
        ("<think>a", ""),
        ("b <think>a", "b"),
        (" b ", "b"),
        ("", ""),
    ],
)
def test_reasoning_is_cut_off_whatever_the_template_knows(text: str, said: str) -> None:
    assert without_reasoning(text) == said


def test_marks_are_read_and_taken_out() -> None:
    marks = [
        Mark(text="[DONE]", satisfied=True, facts={"mood": "good"}),
        Mark(text="[OK]", solved=True, rewards=[RewardEvent(name="correct", value=1.0)]),
        Mark(pattern=r"SCORE=(-?[0-9.]+)", reward="quality"),
        Mark(text="[NEVER]", satisfied=True),
    ]
    turn = read_marks("Thanks. [OK] SCORE=-0.5 [DONE]", marks)
    assert (turn.content, turn.satisfied, turn.solved, turn.facts) == ("Thanks.", True, True, {"mood": "good"})
    assert turn.rewards == [
        RewardEvent(name="correct", value=1.0),
        RewardEvent(name="quality", value=-0.5, cause="the user's model says SCORE=-0.5"),
    ]
    plain = read_marks("Thanks.", marks)
    assert (plain.content, plain.satisfied, plain.solved, plain.rewards) == ("Thanks.", False, False, [])


@pytest.mark.parametrize("number", ["1.2.3", ".", "9e999"])
def test_a_number_that_is_none_is_the_users_fault(number: str) -> None:
    with pytest.raises(SpecCodeError) as caught:
        read_marks(f"S={number} x", [Mark(pattern=r"S=(\S+)", reward="s")])
    assert (caught.value.blame, caught.value.kind) == ("user", "user_bad_reply")
