"""An environment whose images differ by task, for the tests of verl with images."""

from __future__ import annotations

from typing import Any

from vision_code import MACHINE, Gallery
from vision_kit import square

from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message, TextPart, image_part
from engine.schemas.reward import RewardEvent


class Paintings(Gallery):
    """As `Gallery`, with a first image of the task's colour and a reward by the episode's number. Episode 1 ends
    after two turns; task `blind` shows nothing."""

    def reset(self, task: Task, seed: int) -> Reset:
        colour = task.fields["colour"]
        content = [TextPart(text="What colour is it?")]
        if colour:
            content.insert(0, image_part(square(colour, 56)))
        return Reset(messages=[Message(role="user", content=content)])

    def step(self, view: EpisodeView) -> Step:
        sample = int(view.episode_id.rpartition("/")[2])
        over = view.task.fields["colour"] is None or (sample == 1 and view.turn == 1)
        step = Step(event="over") if over else super().step(view)
        return step.model_copy(update={"rewards": [RewardEvent(value=float(sample + view.turn))]})


def spec_of(model: str) -> dict[str, Any]:
    """A spec of three tasks with three episodes each; images are in the prompt, in a tool's result and in a user's
    turn."""
    rows = [{"id": "t0", "colour": "red"}, {"id": "t1", "colour": "purple"}, {"id": "blind", "colour": None}]
    return {
        "spec": "episode/v1",
        "name": "paintings",
        "model": {"path": model},
        "backend": {"kind": "local"},
        "tasks": {"source": "inline", "rows": rows, "id": "id"},
        "environment": {"use": "verl_gallery:Paintings"},
        "machine": MACHINE,
        "limits": {"turn_tokens": 6},
        "rewards": {"credit": {"method": "outcome", "baseline": "mean", "scale": "std"}},
        "rollout": {"samples_per_task": 3, "seed": 3},
        "train": {"rollout_correction": {"kind": "none"}, "dynamic_sampling": False},
    }
