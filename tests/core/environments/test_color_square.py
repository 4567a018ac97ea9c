"""The color squares: squares follow from the task alone, each turn is paid for its own, and only eyes help."""

from __future__ import annotations

import io
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.environments.color_square import (
    COLORS,
    ColorSquare,
    Scene,
    Square,
    Viewer,
    named,
    picture,
    problems,
    square,
)
from engine.schemas.environment import Environment, EpisodeView, Task, User, UserTurn
from engine.schemas.message import ImagePart, Message, TextPart, ToolCall
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]


def task(**fields: Any) -> Task:
    return Task(id="t", index=0, fields={"seed": "0/0", "turns": 2, "size": 64, "jitter": 24} | fields)


def colors(seed: str, turns: int) -> list[str]:
    return [square(seed, turn).color for turn in range(turns)]


def other(color: str) -> str:
    return next(name for name in COLORS if name != color)


def pixels(part: ImagePart) -> Image.Image:
    head, _, body = part.image.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(b64decode(body)))


def test_they_fit_their_protocols() -> None:
    assert isinstance(ColorSquare(), Environment)
    assert isinstance(Viewer(), User)


def test_problems_are_the_same_for_the_same_arguments() -> None:
    assert list(problems(2, seed=3, turns=4, size=32, jitter=0)) == [
        {"id": "square-3-0000", "seed": "3/0", "turns": 4, "size": 32, "jitter": 0},
        {"id": "square-3-0001", "seed": "3/1", "turns": 4, "size": 32, "jitter": 0},
    ]
    assert [row["id"] for row in problems(32)] == [f"square-0-{index:04d}" for index in range(32)]


def test_the_first_square_is_pinned() -> None:
    assert square("0/0", 0) == Square(color="red", rgb=(201, 21, 35), background=114, left=20, top=21, side=36)


def test_every_colour_comes_about_as_often() -> None:
    counts = Counter(color for index in range(600) for color in colors(f"0/{index}", 2))
    assert sorted(counts) == sorted(COLORS)
    assert min(counts.values()) > 150


def test_jitter_leaves_the_colours_apart() -> None:
    apart = [max(abs(x - y) for x, y in zip(one, two, strict=True)) for one, two in combinations(COLORS.values(), 2)]
    assert min(apart) > 2 * 24


@settings(deadline=None, max_examples=examples(60))
@given(seed=st.text(max_size=8), turn=st.integers(0, 40), size=st.integers(8, 96), jitter=st.integers(0, 60))
def test_the_picture_holds_exactly_its_square(seed: str, turn: int, size: int, jitter: int) -> None:
    seen = square(seed, turn, size, jitter)
    image = pixels(picture(seed, turn, size, jitter))
    assert (image.mode, image.size) == ("RGB", (size, size))
    inside = seen.side**2
    assert 0 <= seen.left <= size - seen.side
    assert 0 <= seen.top <= size - seen.side
    assert image.crop((seen.left, seen.top, seen.left + seen.side, seen.top + seen.side)).getcolors() == [
        (inside, seen.rgb)
    ]
    assert sum(count for count, rgb in image.getcolors() or [] if rgb == (seen.background,) * 3) >= size**2 - inside
    assert all(abs(a - b) <= jitter for a, b in zip(seen.rgb, COLORS[seen.color], strict=True))


@pytest.mark.parametrize(
    ("reply", "color"),
    [
        ("red", "red"),
        ("It is BLUE.", "blue"),
        ("Red, surely red", "red"),
        ("red or blue", None),
        ("reddish", None),
        ("", None),
        ("pink", None),
    ],
)
def test_a_reply_names_one_colour_or_none(reply: str, color: str | None) -> None:
    assert named(reply) == color


def test_the_environment_shows_a_picture_and_asks() -> None:
    reset = ColorSquare(question="Which?").reset(task(), seed=1)
    assert reset.messages == [Message(role="user", content=[picture("0/0", 0), TextPart(text="Which?")])]
    assert ColorSquare(question="Which?").reset(task(), seed=2) == reset  # every sample of a task sees the same


def test_each_turn_is_paid_for_the_square_that_was_asked_about(view: View) -> None:
    first, second, third = colors("0/0", 3)
    viewer = Viewer(question="And now?", correct=2.0, wrong=-0.5)
    three = task(turns=3)
    one = viewer.respond(view(three, f"{first}"))
    assert one == UserTurn(
        content=[picture("0/0", 1), TextPart(text="And now?")],
        rewards=[RewardEvent(name="color", value=2.0, cause=f"{first}, as it is")],
        facts={"judged": 1, "judged_turn": 0, "right": 1},
    )
    bad = other(second)
    two = viewer.respond(view(three, first, bad, facts=one.facts))
    assert two == UserTurn(
        content=[picture("0/0", 2), TextPart(text="And now?")],
        rewards=[RewardEvent(name="color", value=-0.5, cause=f"{bad}, but it is {second}")],
        facts={"judged": 2, "judged_turn": 1, "right": 1},
    )
    assert viewer.respond(view(three, first, bad, third, facts=two.facts)) == UserTurn(
        satisfied=True,
        solved=False,
        rewards=[RewardEvent(name="color", value=2.0, cause=f"{third}, as it is")],
        facts={"judged": 3, "judged_turn": 2, "right": 2},
    )


def test_all_right_is_solved_and_may_be_told(view: View) -> None:
    first, second = colors("0/0", 2)
    one = Viewer(tell=True).respond(view(task(), first))
    assert one.content == [picture("0/0", 1), TextPart(text="Right. And this one?")]
    assert Viewer(tell=True).respond(view(task(), "no idea")).content == [
        picture("0/0", 1),
        TextPart(text="No. And this one?"),
    ]
    two = Viewer().respond(view(task(), first, second, facts=one.facts))
    assert (two.satisfied, two.solved) == (True, True)


def test_every_colour_at_once_earns_nothing(view: View) -> None:
    turn = Viewer(wrong=-1.0).respond(view(task(), " ".join(COLORS)))
    assert turn.rewards == [RewardEvent(name="color", value=-1.0, cause="no one colour named")]


def test_score_pays_a_last_answer_that_nobody_judged(view: View) -> None:
    first, second = colors("0/0", 2)
    judged = {"judged": 1, "judged_turn": 0, "right": 1}
    env = ColorSquare(correct=0.5, wrong=-0.5)
    assert env.score(view(task(), first, second, facts=judged)) == [
        RewardEvent(name="color", value=0.5, cause=f"{second}, as it is")
    ]
    assert env.score(view(task(), other(first))) == [
        RewardEvent(name="color", value=-0.5, cause=f"{other(first)}, but it is {first}")
    ]
    assert env.score(view(task(), first, facts=judged)) == []
    assert env.score(view(task(), first, finish="length")) == []
    call = ToolCall(id="call_0_0", name="look", arguments={})
    assert env.score(view(task(), first, calls=[call])) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "task 't' has no field 'seed'; `engine.environments.color_square:problems` makes rows with all fields"),
        ({"seed": 1, "turns": 0}, "task 't': turns is 0; write a whole number from 1"),
        ({"seed": 1, "size": 4}, "task 't': size is 4; write a whole number from 8"),
        ({"seed": 1, "jitter": "x"}, "task 't': jitter is 'x'; write a whole number from 0"),
        ({"seed": 1, "turns": True}, "task 't': turns is True; write a whole number from 1"),
    ],
)
def test_a_task_that_makes_no_sense_fails_at_reset(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared whole)
        ColorSquare().reset(Task(id="t", index=0, fields=fields), seed=0)
    assert str(caught.value) == message


def test_a_seed_is_all_that_a_task_needs() -> None:
    assert Scene.of(Task(id="t", index=0, fields={"seed": 7})) == Scene(7, 2, 64, 24)
