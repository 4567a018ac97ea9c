"""A small project without mistakes, in which `typical_mistakes` makes its edits."""

from __future__ import annotations

from collections.abc import Mapping

SPEC = """\
spec: episode/v1
name: kiosk
model: {path: org/m, tool_calls: plain, tool_role: user}
tasks:
  source: jsonl
  path: rows.jsonl
  id: number
  map: {question: question, answer: answer}
prompt:
  - {role: system, content: "You sell books."}
  - {role: user, content: "{{question}}"}
environment:
  use: kiosk:Kiosk
  with: {tries: 3, tone: plain}
tools:
  - {use: "kiosk:convert"}
  - {use: "kiosk:Shelf", name: look_up, with: {books: [atlas], fee: 0.1}}
user:
  use: kiosk:Clerk
  with: {patience: 2, polite: true}
recover:
  malformed: "Write the call again: {{problem}}"
machine:
  preset: tools_and_user
  transitions:
    - {trigger: feedback, source: AWAITING_USER_FEEDBACK, dest: DONE, conditions: facts.wrong > 2}
    - {trigger: feedback, source: AWAITING_USER_FEEDBACK, dest: GENERATING}
rewards:
  reassign:
    - {at: AWAITING_USER_FEEDBACK, turn: last, to: first, share: 0.3, name: right, when: turns.assistant > 1}
  credit: {method: gigpo, state_key: place}
  scorer: {use: "kiosk:brevity", with: {most: 100}}
rollout: {samples_per_task: 4}
limits: {user_turns: 3, tool_seconds: 5, episode_seconds: 600}
"""


CODE = '''\
from typing import Literal

from engine.schemas.environment import EpisodeView, Reset, Task, ToolReply, UserTurn
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent


class Base:
    def __init__(self, tries: int = 3, tone: Literal["plain", "warm"] = "plain") -> None:
        if tries > 9:
            raise ValueError(f"{tries} tries; at most 9")
        self.tries = tries


class Kiosk(Base):
    def reset(self, task: Task, seed: int) -> Reset:
        return Reset(messages=[], facts={"place": "door"})

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        return [RewardEvent(name="polite", value=0.1)]


class Clerk:
    def __init__(self, patience: int, polite: bool = True, name: str | None = None) -> None:
        self.wrong = 0

    def respond(self, view: EpisodeView) -> UserTurn:
        self.wrong += 1
        right = RewardEvent(name="right", value=1.0)
        return UserTurn(content="No.", facts={"wrong": self.wrong}, rewards=[right])


class Shelf:
    def __init__(self, books: list[str], fee: float = 0.0) -> None:
        self.books = set(books)

    def __call__(self, title: str) -> ToolReply:
        """Look a book up.

        Args:
            title: The book's title.
        """
        return ToolReply(content=title)


def convert(amount: float, to: Literal["km", "miles"] = "km") -> str:
    """Convert a distance.

    Args:
        amount: How far.
    """
    return str(amount)


def brevity(view: EpisodeView, most: int = 100) -> list[RewardEvent]:
    return [RewardEvent(name="brief", value=1.0)]


def rows(count: int = 2):
    for number in range(count):
        yield {"number": number, "question": "How far?", "answer": "1"}


def open_kiosk(tries: int = 3):
    return {"tries": tries}
'''


ROWS = """\
{"number": 1, "question": "How far is it?", "answer": "16 km"}
{"number": 2, "question": "And back?", "answer": "16 km"}
"""


FILES: Mapping[str, str] = {"task.yaml": SPEC, "kiosk.py": CODE, "rows.jsonl": ROWS}


PYTHON_ROWS = ("  source: jsonl\n  path: rows.jsonl\n", '  source: python\n  use: "kiosk:rows"\n')
"""An edit that is no mistake: rows that a function makes."""


RENDERED = ("  map: {question: question, answer: answer}\n", "")
