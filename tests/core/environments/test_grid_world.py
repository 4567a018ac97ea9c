"""The grid world: every goal can be reached, walls hold, and the picture shows exactly the cells."""

from __future__ import annotations

import io
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.environments.grid_world import MOVES, Grid, GridWorld, picture, problems
from engine.schemas.environment import Environment, EpisodeView, Step, Task
from engine.schemas.message import ImagePart, Message, TextPart
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]
ROWS = ["A..", "##.", "G.."]
TASK = Task(id="t", index=0, fields={"grid": ROWS})
STEP = RewardEvent(name="step", value=-0.02, cause="move 1")


def pixels(part: ImagePart) -> Image.Image:
    return Image.open(io.BytesIO(b64decode(part.image.partition(",")[2])))


def test_problems_are_the_same_for_the_same_arguments() -> None:
    assert list(problems(2)) == [
        {"id": "grid-0-0000", "grid": [".....", "#A...", "...G.", "#.#..", "##..#"], "shortest": 3},
        {"id": "grid-0-0001", "grid": ["..A..", "....#", "##...", ".#.#.", "..G.#"], "shortest": 4},
    ]


@settings(deadline=None, max_examples=examples(20))
@given(st.integers(0, 10**6), st.integers(3, 8), st.floats(0, 0.5), st.booleans())
def test_every_goal_can_be_reached_in_the_stated_number_of_steps(
    seed: int, size: int, walls: float, kept: bool
) -> None:
    for row in problems(2, seed, size, walls, kept):
        grid = Grid.read(row["grid"])
        cell, steps = grid.start, 0
        while cell != grid.goal:
            near = [(cell[0] + right, cell[1] + down) for right, down in MOVES.values()]
            cell = min(filter(grid.free, near), key=lambda one: grid.distance(one) or 0)
            steps += 1
        assert steps == row["shortest"] >= 2


def test_no_grid_is_both_trained_on_and_held_out() -> None:
    trained, held_out = (
        {"/".join(row["grid"]) for row in problems(100, size=3, held_out=kept)} for kept in (False, True)
    )
    assert min(len(trained), len(held_out)) > 50
    assert not trained & held_out


def test_the_picture_shows_each_cell() -> None:
    image = pixels(picture(Grid.read(ROWS), (1, 0), 16))
    assert (image.mode, image.size) == ("RGB", (48, 48))
    centres = [[image.getpixel((column * 16 + 8, row * 16 + 8)) for column in range(3)] for row in range(3)]
    free, wall, goal, agent = (245, 245, 240), (70, 70, 80), (60, 170, 80), (50, 90, 220)
    assert centres == [[free, agent, free], [wall, wall, free], [goal, free, free]]


def test_a_step_moves_the_agent_and_shows_the_grid(view: View) -> None:
    env = GridWorld()
    assert isinstance(env, Environment)
    reset = env.reset(TASK, 0)
    assert reset.facts == {"cell": "0,0", "moves": 0, "solved": False}
    step = env.step(view(TASK, "<move>Right</move>", facts=reset.facts))
    shown = [picture(Grid.read(ROWS), (1, 0), 16), TextPart(text="You moved.")]
    assert step == Step(
        event="moved",
        messages=[Message(role="user", content=shown)],
        rewards=[STEP],
        facts={"cell": "1,0", "moves": 1, "solved": False},
    )


@pytest.mark.parametrize(
    ("reply", "names", "words"),
    [
        ("<move>down</move>", ["step", "bump"], "A..\n##.\nG..\nYou cannot go there."),
        ("<move>left</move>", ["step", "bump"], "A..\n##.\nG..\nYou cannot go there."),
        ("up", ["step", "format"], "A..\n##.\nG..\nThere is no move. Write <move>up</move>, or down, left, right."),
        ("<move>up</move><move>right</move>", ["step"], ".A.\n##.\nG..\nYou moved."),
    ],
)
def test_what_a_reply_does(view: View, reply: str, names: list[str], words: str) -> None:
    env = GridWorld(show="text")
    step = env.step(view(TASK, reply, facts=env.reset(TASK, 0).facts))
    assert [reward.name for reward in step.rewards] == names
    assert step.messages[0].text == words


def test_the_goal_ends_the_walk_and_so_does_the_last_move(view: View) -> None:
    facts = {"cell": "1,2", "moves": 5, "solved": False}
    step = GridWorld().step(view(TASK, "<move>left</move>", facts=facts))
    assert (step.event, step.facts) == ("over", {"cell": "0,2", "moves": 6, "solved": True})
    assert step.rewards[-1] == RewardEvent(name="goal", value=1.0, cause="reached in 6 moves")
    assert GridWorld(moves=6).step(view(TASK, "<move>right</move>", facts=facts)).event == "over"


@pytest.mark.parametrize(
    "grid", [None, [], [""], "A.G", ["A.", "G"], ["A.", 5], ["A?G"], ["..G"], ["AAG"], ["A" + "." * 5000 + "G"]]
)
def test_a_task_without_a_grid_is_refused(grid: Any) -> None:
    with pytest.raises(ValueError, match="task 't': `grid`: write "):
        GridWorld().reset(Task(id="t", index=0, fields={"grid": grid}), 0)


@pytest.mark.parametrize("changes", [{"show": "sound"}, {"cell": 4}, {"moves": 0}])
def test_settings_without_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="write image or text"):
        GridWorld(**changes)
    with pytest.raises(ValueError, match="write size from 3"):
        list(problems(size=2))
