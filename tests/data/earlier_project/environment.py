"""The environment, the tool and the user of shop-user. Replace them with your own.

Each object is built anew for every episode. Methods may be plain or `async`; plain ones run in a thread. An exception
ends only its own episode, as a failure with the traceback.
"""

from __future__ import annotations

import re

from engine.schemas.environment import EpisodeView, Reset, Task, UserTurn
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent


def count_letter(word: str, letter: str) -> int:
    """Count how often a letter is in a word.

    Args:
        word: The word.
        letter: One letter.
    """
    # The model sees the name, the types and this docstring. A ValueError becomes the tool's result, which the model reads.
    if len(letter) != 1:
        raise ValueError(f"{letter!r} is not one letter; write letter='r'")
    return word.lower().count(letter.lower())


class ShopUserEnvironment:
    """Begins each episode."""

    def reset(self, task: Task, seed: int) -> Reset:
        """Return the first message. The same task and seed must give the same answer."""
        question = f"How often is the letter {task.fields['letter']} in {task.fields['word']}?"
        # `facts` are for guards and graders (`facts.letters` in the spec); the model does not see them.
        return Reset(messages=[Message(role="user", content=question)], facts={"letters": len(task.fields["word"])})

    # Optional: step(view) -> Step, for a machine with the action `step`; score(view) -> list[RewardEvent], called once
    # at the end; tools() -> list of functions that share this object's state; close().


class ShopUserUser:
    """Judges every answer.

    Args:
        correct: Reward `correct` of the turn with the right answer.
        unreadable: Reward `format` of a turn without an answer.
    """

    def __init__(self, correct: float = 1.0, unreadable: float = -0.1) -> None:
        self._correct = correct
        self._unreadable = unreadable

    def respond(self, view: EpisodeView) -> UserTurn:
        """Answer the newest turn. `view.reply` is the model's own text: grade nothing else."""
        found = re.findall(r"<answer>\s*(\d+)\s*</answer>", view.reply)
        if not found:
            reward = RewardEvent(name="format", value=self._unreadable, cause="no answer")
            return UserTurn(content="I see no answer. Write <answer>2</answer> with your number.", rewards=[reward])
        right = count_letter(str(view.task.fields["word"]), str(view.task.fields["letter"]))
        if int(found[-1]) != right:
            return UserTurn(content="That is not right. Count again.")
        reward = RewardEvent(name="correct", value=self._correct, cause="right answer")
        return UserTurn(satisfied=True, solved=True, rewards=[reward])
