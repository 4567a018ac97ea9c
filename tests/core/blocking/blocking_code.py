"""Environments, tools, users and scorers that misbehave where and how the episode's task says, sync and async.

A task's fields: `where` (environment, tool, user, scorer, or nowhere) and `how` (one of `MISBEHAVIOURS`). With `GATE`, the path of a file, in
the environment, all wait for that file before they misbehave, and then write a file of their own beside it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from engine.schemas.environment import EpisodeView, Reset, Step, Task, UserTurn
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

FOR_EVER = 1e6
MISBEHAVIOURS = ("sleep", "busy", "swallow", "exit", "interrupt", "raise")
GATE = Path(os.environ.get("GATE", os.devnull))


def misbehaves_at(gate: Path, how: str) -> Path:
    """The file that says that code behind a gate begins to misbehave."""
    return gate.with_name(f"{gate.name}-{how}")


def _waits(how: str) -> bool:
    return bool(how) and not GATE.exists()


def misbehave(how: str) -> None:
    """What plain code may do. Nothing in a process that is told that it is cured."""
    if "CURED" in os.environ:
        return
    while _waits(how):
        time.sleep(0.02)
    if how and "GATE" in os.environ:
        misbehaves_at(GATE, how).touch()
    if how == "sleep":
        time.sleep(FOR_EVER)
    elif how == "busy":
        while True:
            pass
    elif how == "swallow":
        while True:
            try:
                time.sleep(0.05)
            except BaseException:  # noqa: BLE001  (the misbehaviour)
                continue
    elif how == "exit":
        raise SystemExit(3)
    elif how == "interrupt":
        raise KeyboardInterrupt
    elif how == "raise":
        raise LookupError("lost")


async def misbehave_async(how: str) -> None:
    """What code on an event loop may do: it blocks the loop, or swallows its cancellation."""
    while _waits(how):  # noqa: ASYNC110  (for a file of another process)
        await asyncio.sleep(0.02)
    while how == "swallow" and "CURED" not in os.environ:
        try:
            await asyncio.sleep(FOR_EVER)
        except BaseException:  # noqa: BLE001  (the misbehaviour)
            continue
    misbehave(how)


def _how(fields: dict[str, Any], where: str) -> str:
    return str(fields.get("how", "")) if fields.get("where") == where else ""


class Board:
    """Plain methods."""

    def reset(self, task: Task, seed: int) -> Reset:
        misbehave(_how(task.fields, "environment"))
        return Reset(messages=[Message(role="user", content=f"Board {task.id}.")])


class AsyncBoard:
    """`async` methods; it holds a lock of its loop, as a client session does, from its constructor on."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.steps = 0

    def _same_loop(self) -> None:
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("attached to a different loop")

    async def reset(self, task: Task, seed: int) -> Reset:
        self._same_loop()
        await misbehave_async(_how(task.fields, "environment"))
        return Reset(messages=[Message(role="user", content=f"Board {task.id}.")])

    async def step(self, view: EpisodeView) -> Step:
        self._same_loop()
        self.steps += 1
        await asyncio.sleep(0.01)
        if self.steps == 3:
            await self._meet(view.task.fields)
        words = Message(role="user", content=f"Moved {self.steps}.")
        return Step(event="won" if self.steps == 6 else "moved", messages=[words], facts={"steps": self.steps})

    arrived = 0
    blocks = False

    async def _meet(self, fields: dict[str, Any]) -> None:
        """Wait until the bad episode blocks the loop, which it does when so many others as its task says wait here."""
        AsyncBoard.arrived += 1
        while "others" in fields and AsyncBoard.arrived <= fields["others"]:  # noqa: ASYNC110  (each may have another loop)
            await asyncio.sleep(0.01)
        AsyncBoard.blocks |= "others" in fields
        await misbehave_async(_how(fields, "step"))
        while not AsyncBoard.blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    events = ("moved", "won")

    async def close(self) -> None:
        """Nothing to close."""


def probe(view: EpisodeView) -> str:
    """Look something up."""
    misbehave(_how(view.task.fields, "tool"))
    return "looked up"


async def probe_async(view: EpisodeView) -> str:
    """Look something up."""
    await asyncio.sleep(0)
    await misbehave_async(_how(view.task.fields, "tool"))
    return "looked up"


class User:
    """Plain."""

    def respond(self, view: EpisodeView) -> UserTurn:
        misbehave(_how(view.task.fields, "user"))
        return UserTurn(satisfied=True, solved=True, rewards=[RewardEvent(name="right", value=1.0)])


class SlowUser:
    """Healthy: it takes half a second each time, and is satisfied the third time."""

    def __init__(self, seconds: float = 0.5) -> None:
        self.seconds = seconds
        self.turns = 0

    def respond(self, view: EpisodeView) -> UserTurn:
        time.sleep(self.seconds)
        self.turns += 1
        if self.turns < 3:
            return UserTurn(content="Go on.")
        return UserTurn(satisfied=True, solved=True, rewards=[RewardEvent(name="right", value=1.0)])


class AsyncUser:
    """`async`."""

    async def respond(self, view: EpisodeView) -> UserTurn:
        await asyncio.sleep(0)
        await misbehave_async(_how(view.task.fields, "user"))
        return UserTurn(satisfied=True, solved=True, rewards=[RewardEvent(name="right", value=1.0)])


def score(view: EpisodeView) -> list[RewardEvent]:
    """Plain."""
    misbehave(_how(view.task.fields, "scorer"))
    return [RewardEvent(name="score", value=0.5)]


async def score_async(view: EpisodeView) -> list[RewardEvent]:
    """`async`."""
    await asyncio.sleep(0)
    await misbehave_async(_how(view.task.fields, "scorer"))
    return [RewardEvent(name="score", value=0.5)]


def start_thread(view: EpisodeView) -> str:
    """Start a thread that never ends, and is no daemon."""
    threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()
    return "started"


async def use_executor(view: EpisodeView) -> str:
    """Wait for a thread of asyncio's own, which never ends."""
    await asyncio.to_thread(time.sleep, FOR_EVER)
    return "waited"


async def swallow(view: EpisodeView) -> str:
    """Swallow every cancellation."""
    await misbehave_async("swallow")
    return "cured"
