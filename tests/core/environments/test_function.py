"""`@environment`: a function becomes an environment, and what it may not do is refused with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from engine.environments.function import Answer, Dialogue, End, Say, environment
from engine.environments.guess_number import guess_number, problems
from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]
TASK = Task(id="t", index=0, fields={"secret": 7})


def user(text: str) -> Message:
    return Message(role="user", content=text)


def test_a_game_step_by_step(view: View) -> None:
    game = guess_number(most=9)
    assert game.reset(TASK, 3) == Reset(messages=[user("Guess my number, from 1 to 9. Write <guess>7</guess>.")])  # type: ignore[attr-defined]
    assert game.step(view(TASK, "<guess>5</guess>")) == Step(event="continue", messages=[user("Higher.")])  # type: ignore[attr-defined]
    assert game.step(view(TASK, "seven")) == Step(  # type: ignore[attr-defined]
        event="continue",
        messages=[user("Write <guess>7</guess> with your number.")],
        rewards=[RewardEvent(name="format", value=-0.1, cause="guess_number")],
    )
    assert game.step(view(TASK, "<guess>7</guess>")) == Step(  # type: ignore[attr-defined]
        event="done", rewards=[RewardEvent(name="won", value=1.0, cause="guess_number")], facts={"solved": True}
    )


def test_problems_are_the_same_for_the_same_arguments() -> None:
    assert list(problems(3, seed=1)) == list(problems(3, seed=1))
    assert {row["secret"] for row in problems(200, most=4)} == {1, 2, 3, 4}


def test_a_spec_may_set_every_parameter_that_is_not_the_engines() -> None:
    @environment
    def game(seed: int, task: Task, most: int, *, hint: str = "") -> Dialogue:
        """A game."""
        yield f"{seed} {task.id} {most} {hint}"

    assert str(inspect.signature(game)) == "(*, most: 'int', hint: 'str' = '')"
    assert (game.__name__, game.__doc__, game.__module__, game.events) == (
        "game", "A game.", __name__, ("continue", "done")
    )  # fmt: skip
    assert game(most=2).reset(TASK, 5).messages == [user("5 t 2 ")]  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="missing a required argument: 'most'"):
        game()
    with pytest.raises(TypeError, match="unexpected keyword argument 'least'"):
        game(most=1, least=2)


def test_the_end_of_a_generator_is_an_end_without_rewards(view: View) -> None:
    @environment
    def game() -> Dialogue:
        yield "Hello."

    made = game()
    made.reset(TASK, 0)  # type: ignore[attr-defined]
    assert made.step(view(TASK, "Bye.")) == Step(event="done", facts={"solved": False})  # type: ignore[attr-defined]


def test_tools_are_offered_only_where_there_are_some() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @environment(tools=[add])
    def with_tools(view: EpisodeView | None) -> Answer:
        return "Hello."

    @environment()
    def without(view: EpisodeView | None) -> Answer:
        return "Hello."

    assert with_tools().tools() == [add]  # type: ignore[attr-defined]
    assert not hasattr(without, "tools")


def test_rewards_may_be_events_of_earlier_turns(view: View) -> None:
    events = [RewardEvent(turn="first", name="late", value=0.5)]

    @environment
    def game(view: EpisodeView | None) -> Answer:
        return "Hello." if view is None else Say("Go on.", rewards=events, facts={"n": 1})

    assert game().step(view(TASK, "x")) == Step(  # type: ignore[attr-defined]
        event="continue", messages=[user("Go on.")], rewards=events, facts={"n": 1}
    )


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (None, TypeError, "gave NoneType; give a text, a list of parts"),
        (3, TypeError, "gave int"),
        ({"won": 1.0}, TypeError, "gave dict"),
        (Say("x", rewards={"won": "much"}), ValidationError, "value"),  # type: ignore[dict-item]
        (Say(3), ValidationError, "content"),  # type: ignore[arg-type]
    ],
)
def test_an_answer_that_is_none_is_refused(view: View, answer: Any, error: type[Exception], words: str) -> None:
    @environment
    def plain(view: EpisodeView | None) -> Answer:
        return answer

    @environment
    def turns() -> Dialogue:
        yield "Hello."
        yield answer

    begun = turns()
    begun.reset(TASK, 0)  # type: ignore[attr-defined]
    for game in (plain(), begun):
        with pytest.raises(error, match=words):
            game.step(view(TASK, "x"))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (End(), "ended the episode before the first reply"),
        (Say("x", rewards={"early": 1.0}), "no turn to reward"),
    ],
)
def test_a_first_answer_is_a_message_without_rewards(answer: Answer, words: str) -> None:
    @environment
    def game(view: EpisodeView | None) -> Answer:
        return answer

    with pytest.raises(ValueError, match=words):
        game().reset(TASK, 0)  # type: ignore[attr-defined]


def test_a_generator_without_a_first_message_is_refused() -> None:
    @environment
    def game() -> Dialogue:
        yield from ()
        return End()

    with pytest.raises(ValueError, match="ended the episode before the first reply"):
        game().reset(TASK, 0)  # type: ignore[attr-defined]


def turns_with_view(view: EpisodeView) -> Dialogue:
    yield "x"


def plain_without_view(task: Task) -> Answer:
    return "x"


def variadic(view: EpisodeView | None, *rest: int) -> Answer:
    return "x"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (turns_with_view, "is a generator: it receives each view as the value of `yield`"),
        (plain_without_view, "has no `yield`, so it needs the parameter `view`"),
        (variadic, "the parameter `rest` must be one that can be given by name"),
    ],
)
def test_a_function_that_cannot_be_one_is_refused_where_it_is_defined(function: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        environment(function)


def test_a_step_of_a_generator_that_never_began_says_what_to_write(view: View) -> None:
    with pytest.raises(RuntimeError, match="write `effects: replayable` in the spec"):
        guess_number().step(view(TASK, "<guess>7</guess>"))  # type: ignore[attr-defined]
