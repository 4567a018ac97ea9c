"""Two runs of a shop's desk, made by the real engine with scripted replies: pictures, tools, feedback, moved rewards, a failure.

    first, second = make_runs(folder)

Sample 0 of each task calls the tool, answers wrongly, and is right after feedback, which moves a part of its reward. Its wrong answer
ends with another token than the chat template writes, so a branch begins. Sample 1 is right at once, sample 2 is stopped by a limit, and in
sample 3 the user fails.
"""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from engine.schemas.environment import EpisodeView, Reset, Task, UserTurn
from engine.schemas.message import ImagePart, Message, TextPart, image_part
from engine.schemas.model import ModelSpec
from engine.schemas.reward import RewardEvent
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

MODEL = "tiny-qwen2_5-vl"
COUNTS = ((3, 5), (4, 2), (6, 1))
"""Apples and pears of each task."""


def picture(apples: int, pears: int) -> ImagePart:
    """A picture with a red square for each apple and a green one for each pear."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (168, 56), (246, 244, 238))
    draw = ImageDraw.Draw(image)
    for at in range(apples + pears):
        colour = (200, 52, 44) if at < apples else (104, 158, 60)
        left, top = 8 + 20 * (at % 8), 8 + 22 * (at // 8)
        draw.ellipse([left, top, left + 16, top + 16], fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return image_part(file.getvalue())


class Desk:
    """Shows the fruit, and marks at the end whether a reply was short."""

    def reset(self, task: Task, seed: int) -> Reset:
        """Ask the question below the picture."""
        fruit = picture(task.fields["apples"], task.fields["pears"])
        content = [fruit, TextPart(text=task.fields["question"])]
        return Reset(messages=[Message(role="user", content=content)], facts={"tries": 0, "price": 0.5})

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        """Mark the length of the last reply."""
        short = len(view.reply.split()) <= 6
        cause = "the last reply is short" if short else "the last reply has more than six words"
        return [RewardEvent(name="brevity", value=0.2 if short else -0.1, cause=cause, source="environment")]


class Clerk:
    """Says whether the answer is right."""

    def __init__(self) -> None:
        self._tries = 0

    def respond(self, view: EpisodeView) -> UserTurn:
        """Judge the answer."""
        if "plum" in view.reply:
            raise KeyError("the price list has no item 'plum'")
        self._tries += 1
        facts = {"tries": self._tries, "last_answer": view.reply.split()[-1].strip(".")}
        if view.reply.rstrip(".").endswith(view.task.fields["answer"]):
            reward = RewardEvent(name="correct", value=1.0, cause="right answer", source="user")
            return UserTurn(satisfied=True, solved=True, rewards=[reward], facts=facts)
        fine = RewardEvent(name="correct", value=-0.2, cause="wrong answer", source="user")
        return UserTurn(content="That is not right. Count the green ones again.", rewards=[fine], facts=facts)


def _call(expression: str) -> str:
    """A call of the calculator."""
    return f'<tool_call>\n{{"name":"calculate","arguments":{{"expression":"{expression}"}}}}\n</tool_call>'


@cache
def _format() -> ChatTemplate:
    return load_format(ModelSpec(path=MODEL), Path())


def _ids(text: str) -> list[int]:
    return [int(each) for each in _format().encode(text)]


def _cases(index: int, *, better: bool) -> list[dict[str, Any]]:
    apples, pears = COUNTS[index]
    right, wrong = f"There are {apples + pears}.", f"I count {apples + pears + 1}."
    call = {"text": _call(f"{apples} + {pears}"), "logprob": -0.9}
    after = [{"tokens": _ids(f"{wrong}<|endoftext|>"), "logprob": -1.6}, {"text": right, "logprob": -0.2}]
    samples = [
        [call, *after],
        [{"text": right, "logprob": -0.1}],
        [{"text": wrong, "logprob": -0.4}, {"text": f"I count {apples + pears + 2}.", "logprob": -2.0}, wrong],
        [call, "One of them is a plum."],
    ]
    if better:  # the other run: task 0 is solved by all samples, task 2 by none
        samples = {0: [[right]] * 4, 1: samples, 2: [[wrong, wrong, wrong]] * 4}[index]
    return [{"task": f"desk-{index}", "sample": at, "replies": replies} for at, replies in enumerate(samples)]


def _spec(name: str, *, better: bool) -> dict[str, Any]:
    rows = [
        {
            "id": f"desk-{index}",
            "question": "How many pieces of fruit are on the desk?",
            "level": "hard" if apples + pears > 6 else "easy",
            "apples": apples,
            "pears": pears,
            "answer": str(apples + pears),
        }
        for index, (apples, pears) in enumerate(COUNTS)
    ]
    rule = {
        "at": "AWAITING_USER_FEEDBACK",
        "when": "feedback.solved && turns.user > 1",
        "op": "transfer",
        "name": "correct",
        "turn": "last",
        "to": 0,
        "share": 0.3,
        "cause": "solved after feedback",
    }
    return {
        "spec": "episode/v1",
        "name": name,
        "model": {"path": MODEL, "tool_calls": "hermes"},
        "backend": {
            "kind": "scripted",
            "replies": [case for index in range(3) for case in _cases(index, better=better)],
        },
        "sampling": {"temperature": 0.7 if better else 1.0},
        "tasks": {"source": "inline", "rows": rows, "id": "id"},
        "prompt": [{"role": "system", "content": "You keep the desk of a fruit shop. Use the calculator."}],
        "environment": {"use": "desk:Desk", "effects": "pure"},
        "tools": [{"use": "engine.environments.tools.calculator:calculate", "timeout": "5s", "effects": "pure"}],
        "user": {"use": "desk:Clerk", "effects": "external"},
        "machine": "tools_and_user",
        "limits": {"assistant_turns": 6, "user_turns": 2, "turn_tokens": 64, "episode_tokens": 2048},
        "rewards": {"reassign": [rule], "credit": {"method": "turn_return", "gamma": 0.5 if better else 0.9}},
        "rollout": {"samples_per_task": 4, "seed": 0},
    }


def make_runs(folder: Path) -> tuple[Path, Path]:
    """Run both specs, and return the folders of the runs."""
    from command_line import engine_here  # not when the engine imports this file for the spec

    (folder / "desk.py").write_text(Path(__file__).read_text())
    found = []
    for name, better in (("desk", False), ("desk-cooler", True)):
        spec = folder / f"{name}.yaml"
        spec.write_text(yaml.safe_dump(_spec(name, better=better), sort_keys=False))
        code, told, problems = engine_here("run", spec, "--out", folder / "runs", "--keep-going", cwd=folder)
        assert code == 0, told + problems
        found.append(next(each for each in (folder / "runs").iterdir() if each.name.startswith(f"{name}-2")))
    return found[0], found[1]
