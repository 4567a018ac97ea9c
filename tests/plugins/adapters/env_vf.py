"""Environments in the form of verifiers: a guessing game, one with tools, and one with tools that keep state."""

from __future__ import annotations

import os
import time
from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"Guess a number below {n + 5}.", "answer": str(n)} for n in range(6)]


def fault_of(state: Any) -> str | None:
    """The fault that the row's `info` names."""
    info: dict[str, Any] = state.get("info") or {}
    return info.get("fault")


class Guess(vf.MultiTurnEnv):
    """Says higher or lower; the step of a near guess has a reward of its own. Fails as the row's `info` says."""

    async def setup_state(self, state: Any) -> Any:
        state["guesses"] = 0
        if fault_of(state) == "setup":
            raise RuntimeError("no rollout today")
        return state

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        fault = fault_of(state)
        if fault == "raise":
            raise RuntimeError("not today")
        if fault == "hang":
            time.sleep(3600)  # noqa: ASYNC251  (it blocks the loop on purpose)
        if fault == "exit":
            os._exit(3)
        if fault == "shape":
            return [{"role": "wizard", "content": 3}]
        if fault == "rewrite":
            state["trajectory"][-1]["prompt"] = []
        state["guesses"] += 1
        said, answer = int(messages[-1].content), int(state["answer"])
        if abs(said - answer) == 1:
            state["trajectory"][-1]["reward"] = 0.25
        if said == answer:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return []
        return [{"role": "user", "content": "Higher." if said < answer else "Lower."}]


def right(completion: Any, answer: str, state: Any) -> float:
    """Whether the last guess was right."""
    if fault_of(state) == "reward":
        raise ValueError("no reward today")
    guesses = [message.content for message in completion if message.role == "assistant"]
    return float(guesses[-1] == answer)


def few(state: Any) -> float:
    """Fewer guesses are better."""
    return 1.0 / (1 + state["guesses"])


def load_environment(max_turns: int = 4) -> vf.Environment:
    return Guess(dataset=Dataset.from_list(ROWS), max_turns=max_turns, rubric=vf.Rubric([right, few], [1.0, 0.5]))


async def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def load_tools(max_turns: int = 4) -> vf.Environment:
    async def exact(completion: Any, answer: str) -> float:
        return float(answer in str(completion[-1].content))

    return vf.ToolEnv(tools=[add], dataset=Dataset.from_list(ROWS), max_turns=max_turns, rubric=vf.Rubric([exact]))


class Purse(vf.StatefulToolEnv):
    """A purse: the tool's argument `purse` is filled in from the state."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_tool(self.put, args_to_skip=["purse"])

    async def setup_state(self, state: Any) -> Any:
        state["purse"] = []
        return state

    async def put(self, coin: int, purse: list) -> str:
        """Put a coin into the purse.

        Args:
            coin: Its value.
            purse: The purse.
        """
        purse.append(coin)
        return f"The purse holds {sum(purse)}."

    def update_tool_args(self, tool_name: str, tool_args: dict, messages: Any, state: Any, **kwargs: Any) -> dict:
        return {**tool_args, "purse": state["purse"]}


def load_purse(max_turns: int = 4) -> vf.Environment:
    def full(state: Any) -> float:
        return float(sum(state["purse"]))

    return Purse(dataset=Dataset.from_list(ROWS), max_turns=max_turns, rubric=vf.Rubric([full]))


def load_single() -> vf.Environment:
    def exact(completion: Any, answer: str) -> float:
        return float(completion[-1].content == answer)

    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric([exact]))


def ranks(completions: list) -> list[float]:
    """The reward of each sample beside the others."""
    return [0.0 for _ in completions]


class Pairs(vf.Rubric):
    """Compares samples in pairs."""

    async def score_group(self, states: list) -> None:
        await super().score_group(states)


class Advantages(vf.Rubric):
    """Gives advantages by itself."""

    has_advantages = True


def load_group(kind: str) -> vf.Environment:
    made = {
        "function": lambda: vf.Rubric([right, ranks]),
        "inner": lambda: vf.RubricGroup([vf.Rubric([right]), vf.Rubric([ranks])]),
        "method": lambda: Pairs([right]),
        "advantages": lambda: Advantages([right]),
    }
    return Guess(dataset=Dataset.from_list(ROWS), rubric=made[kind]())


def load_best_of_n() -> Any:
    from verifiers.v1.envs.best_of_n import BestOfNEnv

    return BestOfNEnv


def load_judged() -> vf.Environment:
    """The judge needs a key when it is made."""
    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.JudgeRubric())


def load_python() -> vf.Environment:
    return vf.PythonEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric([right]))
