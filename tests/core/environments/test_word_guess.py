"""The word game: marks are those of the usual game, and the word stays hidden until the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.environments.word_guess import WORDS, WordGuess, marks, problems
from engine.schemas.environment import Environment, EpisodeView, Step, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]
TASK = Task(id="t", index=0, fields={"word": "crane"})
SHORT = {"right": "R", "wrong": "w", "absent": "-"}


def test_the_words_are_words_of_five_letters_in_order() -> None:
    assert list(WORDS) == sorted(set(WORDS))
    assert {len(word) for word in WORDS} == {5}
    assert len(WORDS) == 249


def test_problems_hide_every_word_before_one_comes_again() -> None:
    assert [row["word"] for row in problems(3)] == [row["word"] for row in problems(3)]
    trained, held_out = (
        {row["word"] for row in problems(199 if not kept else 50, held_out=kept)} for kept in (False, True)
    )
    assert (len(trained), len(held_out), trained | held_out) == (199, 50, set(WORDS))


@pytest.mark.parametrize(
    ("guess", "word", "shown"),
    [
        ("crane", "crane", "RRRRR"),
        ("nacre", "crane", "wwwwR"),
        ("eeeel", "level", "-R-RR"),
        ("llama", "level", "Rw---"),
        ("hello", "level", "-Rww-"),
        ("allee", "level", "-wwRw"),
    ],
)
def test_marks(guess: str, word: str, shown: str) -> None:
    assert "".join(SHORT[mark] for mark in marks(guess, word)) == shown


@settings(deadline=None, max_examples=examples(200))
@given(st.text(alphabet="abc", min_size=5, max_size=5), st.text(alphabet="abc", min_size=5, max_size=5))
def test_a_letter_is_marked_at_most_as_often_as_the_word_has_it(guess: str, word: str) -> None:
    found = marks(guess, word)
    present = Counter(letter for letter, mark in zip(guess, found, strict=True) if mark != "absent")
    assert present == Counter(guess) & Counter(word)
    assert [mark == "right" for mark in found] == [a == b for a, b in zip(guess, word, strict=True)]


def test_a_guess_is_marked_and_paid_for_new_places(view: View) -> None:
    game = WordGuess(progress=0.1)
    assert isinstance(game, Environment)
    first = game.step(view(TASK, "<guess>Trunk</guess>", facts=game.reset(TASK, 0).facts))
    assert first == Step(
        event="marked",
        messages=[
            Message(role="user", content="t: absent, r: right place, u: absent, n: right place, k: absent. 5 left.")
        ],
        rewards=[RewardEvent(name="progress", value=0.2, cause="2 more in place")],
        facts={"tries": 1, "known": "_r_n_", "solved": False},
    )
    again = game.step(view(TASK, "x", "<guess>trunk</guess>", facts=first.facts))
    assert (again.rewards, again.facts["known"]) == ([], "_r_n_")


@pytest.mark.parametrize("reply", ["crane", "<guess>cranes</guess>", "<guess></guess>", "", "<guess>c r a</guess>"])
def test_a_reply_without_a_guess_costs_a_try_and_tells_nothing(view: View, reply: str) -> None:
    game = WordGuess()
    step = game.step(view(TASK, reply, facts=game.reset(TASK, 0).facts))
    assert (step.event, [reward.name for reward in step.rewards], step.facts["known"]) == (
        "marked",
        ["format"],
        "_____",
    )
    assert "crane." not in str(step.messages[0].content)


@pytest.mark.parametrize("word", [None, "", "Crane", "c", "a-b", 5])
def test_a_task_without_a_word_is_refused(word: object) -> None:
    with pytest.raises(ValueError, match="write 2 to 20 letters a to z"):
        WordGuess().reset(Task(id="t", index=0, fields={"word": word}), 0)
    with pytest.raises(ValueError, match="tries is 0"):
        WordGuess(tries=0)
