"""Environments of SkyRL-gym, unchanged: registered ids and own classes.

    environment:
      adapter: skyrl_gym
      use: gsm8k_multi_turn
      with: {extras: {max_turns: 3}}

The methods are called in the order of SkyRL's own loop (skyrl/train/generators/skyrl_gym_generator.py):
`make(id, env_config=, extras=)`, `init(prompt)`, then `step(text)` for each reply, `get_metrics()` and `close()`.

A `postprocessed_action` would replace text that the model sampled, so that its tokens were no longer those that were
sampled. It is recorded as a fact and changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import AdapterError
from engine.plugins.adapters.base import (
    add_to_path,
    facts_of,
    field_of,
    library,
    load_target,
    messages_of_chat,
    parts_of,
    reward_of,
    stepped,
)
from engine.schemas.environment import EpisodeView, Reset, Step, Task

NAME = "skyrl_gym"


def load(use: str, base: str = ".", path: Sequence[str] = (), modules: Sequence[str] = (), **_: Any) -> Any:
    """Load what all environments of this process share. The arguments are those of `SkyRLEnvironment`."""
    add_to_path(path, base)
    gym = library(NAME, "skyrl_gym")
    for module in modules:
        library(NAME, module)
    if ":" in use:
        load_target(use, base)
    return gym


class SkyRLEnvironment:
    """One episode of a SkyRL-gym environment.

    Args:
        use: A registered id, or the class of an environment.
        base: The spec's folder.
        env_config: The environment's settings, as SkyRL's `environment.skyrl_gym.<id>`; keys are read as attributes
            too.
        extras: Added to the row's fields, which SkyRL calls `env_extras`; SkyRL itself adds `max_turns`.
        prompt: The task's field with the first messages, which `init` is given; dotted. Without it, `init` is given
            none, and the spec's `prompt` begins the episode.
        modules: Modules to import first, because they register ids.
        path: Folders to put on the import path; relative to the spec.

    Raises:
        AdapterError: SkyRL-gym is not installed, or a folder of `path` is not there.
    """

    events = ("continue", "done", "truncated")

    def __init__(
        self,
        use: str,
        base: str = ".",
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        prompt: str = "prompt",
        modules: Sequence[str] = (),
        path: Sequence[str] = (),
    ) -> None:
        self._gym = load(use, base, path, modules)
        self._use, self._base, self._prompt = use, base, prompt
        self._config, self._extras = dict(env_config or {}), dict(extras or {})
        self._env: Any = None

    def reset(self, task: Task, seed: int) -> Reset:
        """Make the environment and give it the prompt. SkyRL-gym gives it no seed.

        Raises:
            AdapterError: `init` did not answer (conversation, info).
        """
        config = library(NAME, "omegaconf").OmegaConf.create(self._config)
        extras = copy.deepcopy({**task.fields, **self._extras})  # a group's episodes share the row
        if ":" in self._use:
            self._env = load_target(self._use, self._base)(env_config=config, extras=extras)
        else:
            self._env = self._gym.make(self._use, env_config=config, extras=extras)
        who = self._who("init")
        answer = self._env.init(field_of(extras, self._prompt) or [])
        conversation, info = parts_of(answer, "(conversation, info)", who)
        return Reset(messages=messages_of_chat(conversation, who, prompt=True), facts=facts_of(info, who))

    def step(self, view: EpisodeView) -> Step:
        """What the environment says to the newest reply, as it was sampled.

        Raises:
            AdapterError: it answered in another form, or gave a reward that is no number.
        """
        who = self._who("step")
        answer = self._env.step(view.written)
        if not isinstance(answer, Mapping) or not {"observations", "reward", "done"} <= answer.keys():
            raise AdapterError(f"{who} must return observations, reward, done and metadata, not {answer!r:.120}")
        facts = facts_of(answer.get("metadata"), who)
        if answer.get("postprocessed_action") is not None:
            facts["postprocessed_action"] = str(answer["postprocessed_action"])
        facts["metrics"] = facts_of(self._env.get_metrics(), self._who("get_metrics"))
        return stepped(
            messages=messages_of_chat(answer["observations"] or [], who),
            reward=reward_of(answer["reward"], who),
            cause=who,
            over=bool(answer["done"]),
            facts=facts,
        )

    def close(self) -> None:
        """Close the environment, where it was made."""
        if self._env is not None:
            self._env.close()

    def _who(self, method: str) -> str:
        return f"{type(self._env).__name__}.{method}"
