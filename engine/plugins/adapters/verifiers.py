"""Environments of verifiers before 0.4, unchanged: MultiTurnEnv, SingleTurnEnv, ToolEnv, StatefulToolEnv and their
rubrics.

    tasks: {source: python, use: "engine.plugins.adapters.verifiers:rows", with: {use: "env_sum:load_environment"}}
    environment: {adapter: verifiers, use: "env_sum:load_environment", with: {args: {max_turns: 3}}}
    machine: step

`use` is a function that returns the environment: `load_environment` of a package. The calls are those of the library's
own loop (`MultiTurnEnv.rollout`): `init_state`, `setup_state`, then `is_completed`, `get_prompt_messages` and
`add_model_response` for each reply, at the end `cleanup` and the rubric's `score_rollout`. No client of the library is
asked, so each token is the one that the engine sampled.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson

from engine.errors import AdapterError
from engine.logs import collected_logs
from engine.plugins.adapters.base import (
    add_to_path,
    library,
    load_target,
    part_of_chat,
    reward_of,
    stepped,
)
from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from engine.spec.code.signature import DescribedTool

NAME = "verifiers"
CUT = ("max_turns_reached", "timeout_reached", "max_total_completion_tokens_reached", "prompt_too_long")
"""The library's stop conditions that are limits."""


@lru_cache(maxsize=8)
def _loaded(use: str, base: str, args: bytes, variables: bytes) -> Any:
    """An environment, once in each process: the library lets all rollouts share it."""
    library(NAME, "verifiers.types")
    if threading.current_thread() is not threading.main_thread():
        raise AdapterError(
            "verifiers sets signal handlers, so it needs a process of its own: remove `isolation: thread`"
        )
    target, register, at_end = load_target(use, base), atexit.register, list[Any]()
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def noted(function: Any, *args: Any, **kwargs: Any) -> Any:
        at_end.append(function)
        return register(function, *args, **kwargs)

    atexit.register = noted  # type: ignore[assignment]  # its type has a parameter of its own
    try:
        of_v1 = isinstance(target, type) and not hasattr(target, "init_state")
        env = target if of_v1 else target(**orjson.loads(args))
    except Exception as error:
        for function in at_end:  # what was not built cannot be torn down
            atexit.unregister(function)
        key = re.search(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b", str(error))
        hint = f"; give it a variable by `with: {{env: {{{key[0]}: …}}}}`" if key else ""
        raise AdapterError(f"`{use}` could not be built: {type(error).__name__}: {error}{hint}") from error
    finally:
        atexit.register = register
        for number, handler in signals.items():
            signal.signal(number, handler)
    if not all(hasattr(env, name) for name in ("init_state", "is_completed", "get_prompt_messages", "rubric")):
        kind = env if isinstance(env, type) else type(env)
        words = "environments of v1 sample by themselves and may score the samples against each other (`finalize`)"
        raise AdapterError(f"`{use}` gave {kind.__name__}, which is no MultiTurnEnv of verifiers before 0.4; {words}")
    if in_groups := _group_rewards(env.rubric):
        words = (
            f"`{use}` rewards all samples of a task together, by {', '.join(in_groups)}; each episode is scored alone"
        )
        raise AdapterError(f"{words}: write it as a reward function of one completion, or leave it out of the rubric")
    return env


def _group_rewards(rubric: Any) -> list[str]:
    """What a rubric does with all samples of a task: reward functions over lists, its own `score_group`, advantages."""
    names = [f"`{getattr(function, '__name__', function)}`" for function in rubric._get_group_reward_funcs()]
    if not rubric.score_group.__module__.startswith("verifiers."):
        names.append(f"`{type(rubric).__name__}.score_group`")
    inner = [name for one in getattr(rubric, "rubrics", ()) for name in _group_rewards(one)]
    return names + inner or (["its advantages"] if rubric.has_advantages else [])


def load(use: str, base: str = ".", path: Sequence[str] = (), **settings: Any) -> Any:
    """The environment, which all rollouts of this process share. The arguments are those of `VerifiersEnvironment`."""
    add_to_path(path, base)
    args, variables = settings.get("args") or {}, settings.get("env") or {}
    os.environ.update(variables)
    return _loaded(use, base, orjson.dumps(args), orjson.dumps(variables))


def rows(
    use: str,
    base: str = ".",
    args: Mapping[str, Any] | None = None,
    evaluation: bool = False,
    path: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows for `tasks`: those of the environment's data set, with `prompt`, `answer`, `info`.

    Args:
        use: The function that returns the environment.
        base: What a path in `use` is relative to.
        args: Its keyword arguments.
        evaluation: Those of its evaluation data set.
        path: Folders to put on the import path.
        env: Environment variables that it reads.

    Raises:
        AdapterError: verifiers is not installed, or `use` names no environment.
    """
    before = {name: os.environ.get(name) for name in env or {}}
    try:
        loaded = load(use, base, path, args=args, env=env)
        dataset = loaded.get_eval_dataset() if evaluation else loaded.get_dataset()
    finally:  # this is the engine's process
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    yield from dataset


class VerifiersEnvironment:
    """One rollout of an environment of verifiers.

    Args:
        use: The function that returns the environment: `package.module:load_environment`,
            `path/file.py:load_environment`.
        base: The spec's folder.
        args: Its keyword arguments.
        path: Folders to put on the import path; relative to the spec.
        env: Environment variables that it reads, such as the key of a judge.

    Raises:
        AdapterError: verifiers is not installed, or `use` gave no environment that can be driven.
    """

    events = ("continue", "done", "truncated")

    def __init__(
        self,
        use: str,
        base: str = ".",
        args: Mapping[str, Any] | None = None,
        path: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._env = load(use, base, path, args=args, env=env)
        self._types = library(NAME, "verifiers.types")
        self._state: Any = None
        self._prompt: list[Any] = []
        self._clean = True

    def tools(self) -> list[DescribedTool]:
        """What the model is shown of the environment's tools. The environment calls them itself, in `step`."""

        def refuse(**_: Any) -> None:
            raise AdapterError("environments of verifiers call their tools themselves: write `machine: step`")

        return [
            DescribedTool(tool.name, tool.description, tool.parameters, refuse) for tool in self._env.tool_defs or []
        ]

    async def reset(self, task: Task, seed: int) -> Reset:
        """Begin a rollout with the row as its input; the library has no seed.

        Raises:
            AdapterError: the row has no prompt, or the rollout ended before the first reply.
        """
        if not task.fields.get("prompt"):
            raise AdapterError(f"the row of task `{task.id}` has no `prompt`; take the rows from `{__name__}:rows`")
        row = {"example_id": task.index, "answer": "", **task.fields}
        self._state = await self._env.init_state(row, _client(), "policy", {})
        names = [tool.name for tool in self._state["tool_defs"]]
        if names != [tool.name for tool in self._env.tool_defs or []]:
            raise AdapterError(f"the row of task `{task.id}` has tools of its own, which cannot be shown")
        self._clean = False
        changed = await self._env.setup_state(self._state)
        self._state = self._state if changed is None else changed
        if await self._env.is_completed(self._state):
            raise AdapterError(f"the rollout ended before the first reply: {self._state['stop_condition']}")
        self._prompt = list(await self._env.get_prompt_messages(self._state))
        return Reset(messages=[_message(message, {}) for message in self._prompt])

    async def step(self, view: EpisodeView) -> Step:
        """What the environment says to the newest reply.

        Raises:
            AdapterError: it changed messages that were said already, or set an error.
        """
        state, env = self._state, self._env
        await self._add(view)
        said: list[Any] = []
        while not await env.is_completed(state):
            before = [*self._prompt, *state["trajectory"][-1]["completion"]]
            prompt = list(await env.get_prompt_messages(state))
            if state.get("final_env_response") is not None:
                continue
            if prompt[: len(before)] != before:
                raise AdapterError(
                    "the environment changed messages that were said already; only new ones can be shown"
                )
            self._prompt, said = prompt, prompt[len(before) :]
            break
        if state.get("error") is not None:
            raise AdapterError(f"the environment set an error: {state['error']!r}")
        earned = state["trajectory"][-1]["reward"]
        names = {call.id: call.name for call in view.calls}
        return stepped(
            messages=[_message(message, names) for message in said],
            reward=None if earned is None else reward_of(earned, "the trajectory's step"),
            cause="trajectory step",
            over=bool(state["is_completed"]),
            truncated=bool(state["is_completed"]) and await self._cut(view),
            facts={"stop_condition": state.get("stop_condition")},
        )

    async def _cut(self, view: EpisodeView) -> bool:
        """Whether nothing but a limit ended the rollout. A SingleTurnEnv has no other end than its limit of one
        turn."""
        if self._state["stop_condition"] not in CUT or view.finish == "length":
            return self._state["stop_condition"] in CUT
        call = library(NAME, "verifiers.utils.async_utils").maybe_call_with_named_args
        others = [condition for condition in self._env._stop_conditions if condition.__name__ not in CUT]
        ended = [await call(condition, state=self._state, env=self._env) for condition in others]
        return not any(ended) and not isinstance(self._env, library(NAME, "verifiers").SingleTurnEnv)

    async def score(self, view: EpisodeView) -> list[RewardEvent]:
        """The rubric's reward, after the last turn. A reply that no step has seen is added first, as cut off.

        Raises:
            AdapterError: a reward function raised (the library itself would count it as 0), or the reward is no number.
        """
        if self._state is None:
            return []
        if view.turn >= len(self._state["trajectory"]):
            await self._add(view)
        await self.close()
        # The library's rubrics log a reward function that raises, and count it as 0.
        with collected_logs(NAME, logging.ERROR, alone=False) as errors:
            await self._env.rubric.score_rollout(self._state)
            await self._env.rubric.cleanup(self._state)
        if errors:
            raise AdapterError(f"the rubric failed: {errors[0]}")
        metrics = ", ".join(f"{name}={value:g}" for name, value in self._state["metrics"].items())
        return [RewardEvent(value=reward_of(self._state["reward"], "the rubric"), cause=f"rubric: {metrics}")]

    async def close(self) -> None:
        """Clean up the rollout, once."""
        if not self._clean:
            self._clean = True
            await self._env.cleanup(self._state)

    async def _add(self, view: EpisodeView) -> None:
        """Give the library the newest reply."""
        said = next(message for message in reversed(view.messages) if message.role == "assistant")
        types = self._types
        calls = [
            types.ToolCall(id=call.id, name=call.name, arguments=orjson.dumps(call.arguments).decode())
            for call in view.calls
        ]
        message = types.ResponseMessage(
            content=said.text,
            reasoning_content=said.reasoning,
            tool_calls=calls or None,
            finish_reason="length" if view.finish == "length" else "tool_calls" if calls else "stop",
            is_truncated=view.finish == "length",
        )
        response = types.Response(id=uuid.uuid4().hex, created=0, model="policy", message=message)
        await self._env.add_model_response(self._state, self._prompt, response)


@lru_cache(maxsize=1)
def _client() -> Any:
    """A client that samples nothing: the engine samples."""
    base = library(NAME, "verifiers.clients").Client

    async def refuse(*_: Any, **__: Any) -> Any:
        raise AdapterError("the environment asked the model by itself, which the engine does not serve")

    return type("NoClient", (base,), dict.fromkeys(base.__abstractmethods__, refuse))(None)


def _message(message: Any, names: Mapping[str, str]) -> Message:
    """A message of the library's."""
    role = message.role
    if role not in ("system", "user", "assistant", "tool"):
        raise AdapterError(f"a message of role `{role}` cannot be shown")
    content = message.content
    shown = content if isinstance(content, str) else [part_of_chat(part, NAME) for part in content or []]
    if role != "tool":
        return Message(role=role, content=shown)
    return Message(role="tool", content=shown, tool_call_id=message.tool_call_id, name=names.get(message.tool_call_id))
