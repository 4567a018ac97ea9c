"""Name the colour of a square, then of the next one: a minimal environment with images.

`problems` makes the tasks, `ColorSquare` shows the first square, and `Viewer` judges each answer and shows the next
square in its own turn. The reward of a turn is for the square of that turn.

Invariant: the squares are a pure function of the task's `seed` and the turn, so all samples of a task see the same
pixels. No text contains the colour: only the picture shows it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from engine.schemas.environment import EpisodeView, Reset, Task, UserTurn
from engine.schemas.message import ContentPart, ImagePart, Message, TextPart, image_part
from engine.schemas.reward import RewardEvent

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 215, 50),
    "purple": (145, 60, 185),
    "orange": (240, 140, 30),
}
"""The colours of squares, and their RGB values before the jitter."""

_WORDS = re.compile(rf"\b(?:{'|'.join(COLORS)})\b", re.IGNORECASE)
_SMALLEST, _LARGEST = 0.3, 0.6
"""Side of the square as a fraction of the picture's side."""


class Square(NamedTuple):
    """One square and its position in its picture."""

    color: str
    rgb: tuple[int, int, int]
    background: int
    """Grey level, 0 to 255."""
    left: int
    top: int
    side: int
    """Pixels."""


def problems(
    count: int = 32, seed: int = 0, turns: int = 2, size: int = 64, jitter: int = 24
) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `seed`, `turns`, `size` and `jitter`, the same for the same arguments.

    Args:
        count: How many.
        seed: Seeds the squares.
        turns: Squares in each episode.
        size: Side of the pictures, pixels.
        jitter: Maximum deviation of each channel from the colour; see `square`.
    """
    for index in range(count):
        yield {
            "id": f"square-{seed}-{index:04d}",
            "seed": f"{seed}/{index}",
            "turns": turns,
            "size": size,
            "jitter": jitter,
        }


def square(seed: int | str, turn: int, size: int = 64, jitter: int = 24) -> Square:
    """The square of a task's turn.

    Args:
        seed: The task's seed.
        turn: Index of the turn, from 0.
        size: Side of the picture in pixels.
        jitter: Maximum deviation of each channel from the colour. With 24 the six colours stay distinct.
    """
    rng = random.Random(f"color_square/{seed}/{turn}")
    color = rng.choice(list(COLORS))
    red, green, blue = (max(0, min(255, channel + rng.randint(-jitter, jitter))) for channel in COLORS[color])
    side = rng.randint(round(_SMALLEST * size), round(_LARGEST * size))
    left, top = rng.randint(0, size - side), rng.randint(0, size - side)
    return Square(color, (red, green, blue), rng.randint(96, 160), left, top, side)


@lru_cache(maxsize=1024)
def picture(seed: int | str, turn: int, size: int = 64, jitter: int = 24) -> ImagePart:
    """The square as an RGB picture, `size` x `size`, a PNG."""
    from PIL import Image

    seen = square(seed, turn, size, jitter)
    canvas = Image.new("RGB", (size, size), (seen.background,) * 3)
    canvas.paste(seen.rgb, (seen.left, seen.top, seen.left + seen.side, seen.top + seen.side))
    return image_part(canvas)


def named(reply: str) -> str | None:
    """The colour that a reply names; None if it names none or several."""
    colors = {word.lower() for word in _WORDS.findall(reply)}
    return colors.pop() if len(colors) == 1 else None


class Scene(NamedTuple):
    """The squares of a task, from its fields, which `problems` makes."""

    seed: int | str
    turns: int
    size: int
    jitter: int

    @classmethod
    def of(cls, task: Task) -> Scene:
        """The scene of a task. Only `seed` is required; the defaults are two turns of 64 pixels.

        Raises:
            ValueError: A field is missing or invalid.
        """
        fields = {"turns": 2, "size": 64, "jitter": 24} | dict(task.fields)
        if "seed" not in fields:
            raise ValueError(
                f"task {task.id!r} has no field 'seed'; `engine.environments.color_square:problems` makes rows "
                "with all fields"
            )
        for name, least in (("turns", 1), ("size", 8), ("jitter", 0)):
            value = fields[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"task {task.id!r}: {name} is {value!r}; write a whole number from {least}")
        return cls(fields["seed"], fields["turns"], fields["size"], fields["jitter"])

    def show(self, turn: int, words: str) -> list[ContentPart]:
        """The message of a turn: the picture, then the question."""
        return [picture(self.seed, turn, self.size, self.jitter), TextPart(text=words)]

    def judge(self, reply: str, turn: int, correct: float, wrong: float) -> tuple[bool, RewardEvent]:
        """Whether a reply names the colour of the square of `turn`, and the reward for it."""
        said, color = named(reply), square(self.seed, turn, self.size, self.jitter).color
        if said == color:
            return True, RewardEvent(name="color", value=correct, cause=f"{color}, as it is")
        cause = "no one colour named" if said is None else f"{said}, but it is {color}"
        return False, RewardEvent(name="color", value=wrong, cause=cause)


class ColorSquare:
    """Shows the first square and asks for its colour.

    Args:
        question: The text after the picture.
        correct: Reward `color` of a right last answer that no user judged, for example because `limits.user_turns` was
            reached.
        wrong: Reward `color` of a wrong last answer that no user judged.
    """

    def __init__(self, question: str = "What colour is the square?", correct: float = 1.0, wrong: float = 0.0) -> None:
        self._question = question
        self._correct = correct
        self._wrong = wrong

    def reset(self, task: Task, seed: int) -> Reset:
        """The first picture and the question. The squares depend on the task, not on the episode's seed."""
        return Reset(messages=[Message(role="user", content=Scene.of(task).show(0, self._question))])

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        """Reward a last answer that no user has judged."""
        shown = int(view.facts.get("judged", 0))
        judged = view.facts.get("judged_turn") == view.turn
        if judged or view.finish != "stop" or view.calls or view.malformed:
            return []
        return [Scene.of(view.task).judge(view.reply, shown, self._correct, self._wrong)[1]]


class Viewer:
    """A user who judges each answer and shows the next square; satisfied after the task's last one.

    Args:
        question: The text after each further picture.
        tell: Whether the user says if the answer was right. This gives the model information that is not in the
            picture.
        correct: Reward `color` of a turn that names its square's colour.
        wrong: Reward `color` of a turn that does not.
    """

    def __init__(
        self, question: str = "And this one?", tell: bool = False, correct: float = 1.0, wrong: float = 0.0
    ) -> None:
        self._question = question
        self._tell = tell
        self._correct = correct
        self._wrong = wrong

    def respond(self, view: EpisodeView) -> UserTurn:
        """Judge the answer about the newest square. The facts `judged` and `right` count squares."""
        scene = Scene.of(view.task)
        shown = int(view.facts.get("judged", 0))
        right, reward = scene.judge(view.reply, shown, self._correct, self._wrong)
        count = int(view.facts.get("right", 0)) + int(right)
        facts = {"judged": shown + 1, "judged_turn": view.turn, "right": count}
        if shown + 1 >= scene.turns:
            return UserTurn(satisfied=True, solved=count == scene.turns, rewards=[reward], facts=facts)
        words = f"{'Right.' if right else 'No.'} {self._question}" if self._tell else self._question
        return UserTurn(content=scene.show(shown + 1, words), rewards=[reward], facts=facts)
