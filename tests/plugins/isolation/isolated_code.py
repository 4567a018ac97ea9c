"""Code that does harm where a task says so: `role` names the part that does it, `kind` what it does."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine.schemas.environment import EpisodeView, Reset, Step, Task, ToolReply, UserTurn, action
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

LOADED = os.getpid()
"""The process that imported this module."""


def harm(task: Task, role: str) -> None:
    """What the task says of this part, where that ends or raises by itself."""
    if task.fields.get("role") != role:
        return
    match task.fields["kind"]:
        case "raise":
            raise LookupError(f"the {role} raises")
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            ctypes.string_at(0)
        case "memory":
            bytearray(2 * 10**9)
        case "hang":
            time.sleep(1e6)
        case "busy":
            while True:
                pass
        case "print":
            while True:
                print("x" * 10_000)
        case "bomb":
            while True:
                if os.fork() == 0:
                    time.sleep(1e6)
        case "daemon":
            subprocess.Popen(["sleep", "100000"], start_new_session=True)
            raise LookupError("it left a process behind")
        case "nonsense":
            os.write(3, b"\x00\x00\x00\x00nonsense")


async def harm_slowly(task: Task, role: str) -> None:
    """The same, and `hang_async`, which waits for ever."""
    if task.fields.get("role") == role and task.fields["kind"] == "hang_async":
        await asyncio.sleep(1e6)
    harm(task, role)


def who() -> dict[str, Any]:
    """Where this runs."""
    return {"pid": os.getpid(), "uid": os.getuid(), "torch": "torch" in sys.modules}


class Board:
    """An environment with state, a tool and a score."""

    events = ("moved",)

    def __init__(self, log: str | None = None) -> None:
        self._log = log
        self._seen = 0

    async def reset(self, task: Task, seed: int) -> Reset:
        await harm_slowly(task, "environment")
        self._seen = 1
        return Reset(messages=[Message(role="user", content="Work.")], facts={"environment": who()})

    def tools(self) -> list[Any]:
        return [self.look]

    def look(self) -> ToolReply:
        """Look."""
        self._seen += 1
        return ToolReply(content="seen", facts={"looked": who(), "seen": self._seen})

    def step(self, view: EpisodeView) -> Step:
        harm(view.task, "step")
        return Step(event="moved", facts={"stepped": self._seen})

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        harm(view.task, "score")
        return [RewardEvent(name="state", value=float(self._seen))]

    def close(self) -> None:
        if self._log:
            with Path(self._log).open("a") as file:
                file.write("closed\n")


async def work(view: EpisodeView, times: int = 1) -> ToolReply:
    """Work.

    Args:
        times: How often.
    """
    await harm_slowly(view.task, "tool")
    return ToolReply(content="done " * times, facts={"tool": who()})


class Counter:
    """A tool with state."""

    def __init__(self, start: int = 0) -> None:
        self._count = start

    async def __call__(self, view: EpisodeView) -> ToolReply:
        """Count."""
        await harm_slowly(view.task, "counter")
        self._count += 1
        return ToolReply(content=str(self._count), facts={"counter": who()})


class Asker:
    """A user that is satisfied with the first answer."""

    async def respond(self, view: EpisodeView) -> UserTurn:
        await harm_slowly(view.task, "user")
        return UserTurn(satisfied=True, solved=True, facts={"user": who()}, rewards=[RewardEvent(value=1.0)])


async def judge(view: EpisodeView, value: float = 0.5) -> list[RewardEvent]:
    """A scorer."""
    await harm_slowly(view.task, "scorer")
    return [RewardEvent(name="judged", value=value)]


@action("checked")
async def check(view: EpisodeView) -> Step:
    """An action of the spec's own."""
    await harm_slowly(view.task, "action")
    return Step(event="checked", facts={"action": who()})
