"""Environments of slime's multi-turn rollout (`env_*.py`), unchanged.

    environment:
      adapter: slime
      use: slime/examples/geo3k_vlm_multi_turn/env_geo3k.py:build_env
      with: {args: {max_turns: 3}, path: [slime]}

The functions are called in the order of slime's own loop (examples/geo3k_vlm_multi_turn/rollout.py, commit
624b824a898a):
`build_env(sample=, args=)`, `reset()`, then for each reply `step(text)`, `format_observation(observation)` unless it is
done, and `close()`.

slime's loop trains on the reward of `--custom-rm-path` and not on what `step` says. Here the number in the
observation's field `tool_score` is the reward of the turn, and `rewards.scorer` may grade the last reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from engine.errors import AdapterError
from engine.plugins.adapters.base import (
    add_to_path,
    facts_of,
    field_of,
    load_target,
    message_of_chat,
    parts_of,
    reward_of,
    stepped,
)
from engine.schemas.environment import EpisodeView, Reset, Step, Task


def load(use: str, base: str = ".", path: Sequence[str] = (), **_: Any) -> Any:
    """Load what all environments of this process share. The arguments are those of `SlimeEnvironment`."""
    add_to_path(path, base)
    return load_target(use, base)


class SlimeEnvironment:
    """One episode of a slime environment.

    Args:
        use: `path/env.py:build_env`, or `package.module:build_env`.
        base: The spec's folder.
        args: What the environment reads of slime's arguments, as `--custom-config-path` gives them.
        label: The task's field that becomes `sample.label`; dotted.
        metadata: The task's field that becomes `sample.metadata`; dotted. Left out, the whole row.
        path: Folders to put on the import path, such as slime's own; relative to the spec.
        reward: The observation's field with the turn's reward; empty: steps have no reward.

    Raises:
        AdapterError: `use` names no function, or a folder of `path` is not there.
    """

    events = ("continue", "done", "truncated")

    def __init__(
        self,
        use: str,
        base: str = ".",
        args: Mapping[str, Any] | None = None,
        label: str = "label",
        metadata: str | None = None,
        path: Sequence[str] = (),
        reward: str = "tool_score",
    ) -> None:
        self._build = load(use, base, path)
        if not callable(self._build):
            raise AdapterError(f"`{use}` is not a function; name the file's `build_env`")
        self._args = SimpleNamespace(**dict(args or {}))
        self._label, self._metadata, self._reward = label, metadata, reward
        self._env: Any = None

    def reset(self, task: Task, seed: int) -> Reset:
        """Build the environment and reset it. slime gives it no seed.

        Raises:
            AdapterError: it did not answer (observation, info).
        """
        metadata = dict(task.fields) if self._metadata is None else field_of(task.fields, self._metadata)
        sample = SimpleNamespace(
            label=field_of(task.fields, self._label),
            metadata=metadata or {},
            prompt=task.fields.get("prompt", ""),
            index=task.index,
            group_index=task.index,
            response="",
            reward=None,
        )
        try:
            self._env = self._build(sample=sample, args=self._args)
        except TypeError:
            self._env = self._build(sample, self._args)  # as slime does
        who = self._who("reset")
        observation, info = parts_of(self._env.reset(), "(observation, info)", who)
        # slime's own loop never shows the first observation, which may be empty.
        shows = bool(observation) and bool(observation.get("obs_str") or observation.get("multi_modal_data"))
        return Reset(messages=[self._shown(observation)] if shows else [], facts=facts_of(info, who))

    def step(self, view: EpisodeView) -> Step:
        """What the environment says to the newest reply, as it was sampled.

        Raises:
            AdapterError: it did not answer (observation, done, info), or gave a reward that is no number.
        """
        who = self._who("step")
        if view.finish == "length":  # slime's own loop ends the episode, without a step
            return stepped(messages=[], reward=None, cause="", over=True, truncated=True)
        observation, done, info = parts_of(self._env.step(view.written), "(observation, done, info)", who)
        if not isinstance(observation, Mapping):
            raise AdapterError(f"{who} gave an observation of type {type(observation).__name__}; it must be a mapping")
        earned = observation.get(self._reward) if self._reward else None
        return stepped(
            messages=[] if done else [self._shown(observation)],
            reward=None if earned is None else reward_of(earned, who),
            cause=f"{type(self._env).__name__}: {self._reward}",
            over=bool(done),
            facts=facts_of(info, who),
        )

    def close(self) -> None:
        """Close the environment, where it was built."""
        if self._env is not None:
            self._env.close()

    def _shown(self, observation: Mapping[str, Any]) -> Any:
        return message_of_chat(self._env.format_observation(observation), self._who("format_observation"))

    def _who(self, method: str) -> str:
        return f"{type(self._env).__name__}.{method}"
