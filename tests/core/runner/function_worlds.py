"""One game in the four forms of `@environment`, with a tool, rewards of each turn and facts."""

from __future__ import annotations

import asyncio

from engine.environments.function import Answer, AsyncDialogue, Dialogue, End, Say, environment
from engine.schemas.environment import EpisodeView, Task, ToolReply

CLOSED: list[str] = []
"""Generators that were closed before their end."""


def peek(view: EpisodeView) -> ToolReply:
    """Look at the number of tries so far."""
    return ToolReply(content=f"{view.facts['tries']} tries", facts={"peeked": True})


def judge(task: Task, view: EpisodeView, bonus: float) -> tuple[bool, dict[str, float], dict[str, object]]:
    """Whether a reply is right, what it earns, and the facts afterwards."""
    right = str(task.fields["secret"]) in view.reply
    tries = int(view.facts["tries"]) + 1
    return right, {"won": 1.0 + bonus} if right else {"miss": -0.1, "late": -0.01 * tries}, {"tries": tries}


@environment(tools=[peek])
def generator(task: Task, seed: int, bonus: float = 0.0) -> Dialogue:
    """A generator: its local variables are its state."""
    mine = 0
    view = yield Say(f"Guess, {seed}.", facts={"tries": 0})
    try:
        while True:
            right, rewards, facts = judge(task, view, bonus)
            mine += 1
            assert facts["tries"] == mine
            if right:
                return End(rewards=rewards, solved=True, facts=facts)
            view = yield Say(f"Wrong, {mine}.", rewards=rewards, facts=facts)
    except GeneratorExit:
        CLOSED.append(task.id)
        raise


@environment(tools=[peek])
async def async_generator(task: Task, seed: int, bonus: float = 0.0) -> AsyncDialogue:
    """The same, asynchronous."""
    mine = 0
    view = yield Say(f"Guess, {seed}.", facts={"tries": 0})
    while True:
        await asyncio.sleep(0)
        right, rewards, facts = judge(task, view, bonus)
        mine += 1
        if right:
            yield End(rewards=rewards, solved=True, facts=facts)
        view = yield Say(f"Wrong, {mine}.", rewards=rewards, facts=facts)


@environment(tools=[peek])
def function(task: Task, seed: int, view: EpisodeView | None, bonus: float = 0.0) -> Answer:
    """A function: its state is in the facts."""
    if view is None:
        return Say(f"Guess, {seed}.", facts={"tries": 0})
    right, rewards, facts = judge(task, view, bonus)
    if right:
        return End(rewards=rewards, solved=True, facts=facts)
    return Say(f"Wrong, {facts['tries']}.", rewards=rewards, facts=facts)


@environment(tools=[peek])
async def async_function(task: Task, seed: int, view: EpisodeView | None, bonus: float = 0.0) -> Answer:
    """The same, asynchronous."""
    await asyncio.sleep(0)
    if view is None:
        return Say(f"Guess, {seed}.", facts={"tries": 0})
    right, rewards, facts = judge(task, view, bonus)
    if right:
        return End(rewards=rewards, solved=True, facts=facts)
    return Say(f"Wrong, {facts['tries']}.", rewards=rewards, facts=facts)
