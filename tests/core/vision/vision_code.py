"""Spec code that shows images, in every form and in every place."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image
from vision_kit import square

from engine.schemas.environment import EpisodeView, Reset, Step, Task, ToolReply, UserTurn
from engine.schemas.message import ImagePart, Message, TextPart, image_part

FIRST = square("red")
SECOND = square("blue", 96, 64)
THIRD = square("green", 64, 130)


def pil(data: bytes) -> Any:
    return Image.open(io.BytesIO(data))


class Gallery:
    """Shows one image in the prompt; its `step` shows the second as a tool's, and the third as a user's."""

    events = ("shown", "over")

    def reset(self, task: Task, seed: int) -> Reset:
        return Reset(messages=[Message(role="user", content=[image_part(FIRST), TextPart(text="What colour is it?")])])

    def step(self, view: EpisodeView) -> Step:
        if view.turn == 0:  # a PIL image
            content = [TextPart(text="You looked."), image_part(pil(SECOND))]
            return Step(event="shown", messages=[Message(role="tool", content=content, name="look")])
        if view.turn == 1:  # two at once, one of them seen before
            content = [image_part(THIRD), TextPart(text="And this one, beside"), image_part(FIRST)]
            return Step(event="shown", messages=[Message(role="user", content=content)])
        if view.turn == 2:
            return Step(event="shown", messages=[Message(role="user", content="Are you sure?")])
        return Step(event="over")


GEO3K = Path(__file__).parents[3] / "environments" / "data" / "geo3k" / "images"


class Figures(Gallery):
    """Shows three figures of Geometry3K, which ones by the task's `first`; every processor has to scale them."""

    def reset(self, task: Task, seed: int) -> Reset:
        every = sorted(GEO3K.glob("*.png"))
        self._figures = [every[(task.fields["first"] + step) % len(every)] for step in range(3)]
        content = [image_part(self._figures[0]), TextPart(text="What colour is it?")]
        return Reset(messages=[Message(role="user", content=content)])

    def step(self, view: EpisodeView) -> Step:
        if view.turn > 1:
            return Step(event="over")
        content = [image_part(self._figures[view.turn + 1]), TextPart(text="And this one?")]
        return Step(event="shown", messages=[Message(role="user", content=content)])


MACHINE: dict[str, Any] = {
    "initial": "PENDING",
    "states": {
        "PENDING": {"action": "reset"},
        "GENERATING": {"action": "generate"},
        "SHOWING": {"action": "step"},
        "DONE": {"action": "score", "final": True},
    },
    "transitions": [
        {"trigger": "ready", "source": "PENDING", "dest": "GENERATING"},
        {"trigger": ["answered", "truncated", "malformed", "tool_calls"], "source": "GENERATING", "dest": "SHOWING"},
        {"trigger": "shown", "source": "SHOWING", "dest": "GENERATING"},
        {"trigger": "over", "source": "SHOWING", "dest": "DONE"},
        {"trigger": ["limit", "failed", "aborted"], "source": "*", "dest": "DONE"},
    ],
}
"""Goes on whatever the model says."""


def look(where: str) -> ToolReply:
    """Look somewhere.

    Args:
        where: A side.
    """
    return ToolReply(content=[TextPart(text=f"To the {where}:"), image_part(SECOND)])


class Shower:
    """A user who answers the first time with two images, and is satisfied the second time."""

    def respond(self, view: EpisodeView) -> UserTurn:
        if view.user_turn:
            return UserTurn(satisfied=True, solved=True)
        return UserTurn(content=[image_part(THIRD), TextPart(text="And this one?"), image_part(pil(FIRST))])


class Bad:
    """A user, tool and environment that shows what cannot be shown.

    Args:
        what: Which mistake.
        folder: Where a file of an image lies.
    """

    events = ("shown",)

    def __init__(self, what: str, folder: str = ".") -> None:
        self._what = what
        self._folder = Path(folder)

    def part(self) -> ImagePart | TextPart:
        made: dict[str, Any] = {
            "bytes": lambda: image_part(b"\x89PNG\r\n\x1a\nnothing more"),
            "empty": lambda: ImagePart(image="data:image/png;base64,"),
            "cut": lambda: image_part(FIRST[:-40]),
            "missing": lambda: image_part(self._folder / "no such file.png"),
            "url": lambda: ImagePart(image="https://example.org/a.png"),
            "digest": lambda: ImagePart(image="sha256:" + "0" * 64),
            "large": lambda: image_part(square("red", 400, 400)),
            "thin": lambda: image_part(square("red", 1, 400)),
            "text": lambda: TextPart(text="Look: <|vision_start|><|image_pad|><|vision_end|>"),
            "fine": lambda: image_part(FIRST),
        }
        part: ImagePart | TextPart = made[self._what]()
        return part

    def reset(self, task: Task, seed: int) -> Reset:
        return Reset(messages=[Message(role="user", content=[self.part(), TextPart(text="What is it?")])])

    def respond(self, view: EpisodeView) -> UserTurn:
        return UserTurn(content=[self.part(), TextPart(text="And this?")])


class Screens:
    """Shows a screen of its own at each turn, in a user's message with words, or alone in a tool's.

    Args:
        count: How many; the first one is in the prompt.
        role: Of the messages after the prompt.
        side: The smallest width in pixels; screens have different sizes.
    """

    events = ("shown", "over")

    def __init__(self, count: int, role: str = "user", side: int = 56) -> None:
        self._count, self._role, self._side = count, role, side

    def screen(self, number: int) -> ImagePart:
        return image_part(square("blue", self._side + 28 * (number % 3), self._side + 28 * (number // 3)))

    def reset(self, task: Task, seed: int) -> Reset:
        return Reset(messages=[Message(role="user", content=[self.screen(0), TextPart(text="What colour is it?")])])

    def step(self, view: EpisodeView) -> Step:
        number = view.turn + 1
        if number == self._count:
            return Step(event="over")
        words = [TextPart(text=f"{number}:")] if self._role == "user" else []
        return Step(event="shown", messages=[Message(role=self._role, content=[*words, self.screen(number)])])
