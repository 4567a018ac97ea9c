"""verl's interactions as simulated users: the same classes, the same YAML, the same rows.

    user:
      use: engine.plugins.adapters.verl.interactions:Interactions
      effects: replayable
      with: {config: interaction_config.yaml}

An interaction is a class with `start_interaction`, `generate_response`, `calculate_score` and `finalize_interaction`;
one object of it serves all episodes of a run, which it tells apart by `instance_id` (here the episode's id). Written
from verl's documented interface (https://verl.readthedocs.io, "Interaction System"); nothing of verl need be installed.

Differences that matter:
- `finalize_interaction` is always called, also when the episode failed or ran out of something.
- The score of a turn is a reward of the turn that earned it, named `interaction`, and really used.
- What an interaction raises is the user's failure: the episode does not train, and no other is disturbed.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import yaml

from engine.errors import AdapterError
from engine.plugins.adapters.base import field_of, library, parts_of
from engine.plugins.adapters.verl.modules import verl_importable
from engine.schemas.environment import EpisodeView, Reset, Task, UserTurn
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from engine.spec.code.entry import load_entry

REWARD = "interaction"
"""Name of the reward that a turn's score becomes."""
PLACES = ("interaction_kwargs", "extra_info.interaction_kwargs")
"""Where a row of verl's may have its interaction's arguments."""

_objects: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bytes, Any]] = weakref.WeakKeyDictionary()


class Interactions:
    """A user that asks one of verl's interactions. One object an episode; the interaction itself is shared by the run.

    Args:
        config: verl's `interaction_config_path`: a YAML file with `interaction: [{name, class_name, config}]`. A
            relative one is looked for beside the spec, then where the engine was started.
        interaction: The same list, written into the spec.
        kwargs: The task's field with the interaction's arguments, `name` among them; dotted. Left out:
            `interaction_kwargs`, then `extra_info.interaction_kwargs`.
        solved_at: Score from which a turn that ends the conversation counts as solved.
    """

    def __init__(
        self,
        config: str | None = None,
        interaction: Sequence[Mapping[str, Any]] | None = None,
        kwargs: str | None = None,
        solved_at: float = 1.0,
    ) -> None:
        if (config is None) == (interaction is None):
            raise ValueError("give `config` (verl's interaction YAML) or `interaction` (its list), not both")
        declared = tuple(interaction or ()) if config is None else entries(_find(config), "interaction")
        self._declared = {name_of(item): item for item in declared}
        if len(self._declared) != len(declared):
            raise ValueError("two interactions have the same name; give each its own `name`")
        if not declared:
            raise ValueError("there is no interaction: write `interaction: [{name: …, class_name: …, config: {…}}]`")
        self._places = (kwargs,) if kwargs is not None else PLACES
        self._solved_at = solved_at
        self._begun: tuple[Any, str] | None = None
        """The interaction and the episode's id in it, once it was told of the episode."""
        self._kwargs: dict[str, Any] = {}

    async def respond(self, view: EpisodeView) -> UserTurn:
        """What the interaction says to the newest reply."""
        interaction, instance = self._begun or await self._begin(view)
        messages = [as_chat(message) for message in view.messages]
        who = type(interaction).__name__
        answer = await _awaited(interaction.generate_response(instance, messages, **self._kwargs))
        form = "(terminate, text, score, extra)"
        terminate, text, score, extra = parts_of(answer, form, f"{who}.generate_response", TypeError)
        if score is None:
            score = await _awaited(_called(interaction.calculate_score, instance, self._kwargs))
        value = None if score is None else float(score)
        cause = f"{who} at the end" if terminate else who
        return UserTurn(
            content=text or "",
            satisfied=bool(terminate),
            solved=bool(terminate) and value is not None and value >= self._solved_at,
            rewards=[] if value is None else [RewardEvent(turn="last", name=REWARD, value=value, cause=cause)],
            facts=dict(extra or {}),
        )

    async def _begin(self, view: EpisodeView) -> tuple[Any, str]:
        """Choose the task's interaction, and tell it that the episode begins. Returns it and the episode's id in it."""
        values = (field_of(view.task.fields, place) for place in self._places)
        kwargs: Mapping[str, Any] = next((value for value in values if isinstance(value, Mapping)), {})
        self._kwargs = {str(key): item for key, item in kwargs.items() if item is not None or key == "name"}
        name = self._kwargs.get("name")
        if name is None and len(self._declared) == 1:
            (name,) = self._declared
        if name not in self._declared:
            raise ValueError(
                f"task {view.task.id!r} names the interaction {name!r} (`{self._places[0]}.name`); the YAML has "
                f"{', '.join(self._declared)}"
            )
        item = self._declared[name]
        config = {**(item.get("config") or {}), "name": name_of(item)}
        interaction = one_of_loop(item, lambda: interaction_class(str(item["class_name"]))(config=config))
        self._begun = (interaction, view.episode_id)  # from here on it is finalized, even where starting fails
        instance = await _awaited(interaction.start_interaction(view.episode_id, **self._kwargs))
        if isinstance(instance, str) and instance:
            self._begun = (interaction, instance)
        return self._begun

    async def close(self) -> None:
        """`finalize_interaction`, for every episode that the interaction was told of."""
        if self._begun is not None:
            interaction, instance = self._begun
            self._begun = None
            await _awaited(_called(interaction.finalize_interaction, instance, self._kwargs))


class Prompt:
    """An environment that begins with a row's own messages, as verl's data has them.

    Args:
        field: The task's field with the messages: `[{role, content}, …]`.
    """

    def __init__(self, field: str = "prompt") -> None:
        self._field = field

    def reset(self, task: Task, seed: int) -> Reset:
        """The row's messages."""
        rows = task.fields.get(self._field)
        if not isinstance(rows, list | tuple) or not rows:
            raise ValueError(f"task {task.id!r}: the field {self._field!r} must be a list of messages")
        return Reset(messages=[Message(role=row["role"], content=row["content"]) for row in rows])


def as_chat(message: Message) -> dict[str, Any]:
    """A message as verl's interactions are given it: role and content."""
    content = message.content
    return {
        "role": message.role,
        "content": content if isinstance(content, str) else [part.model_dump() for part in content],
    }


def name_of(item: Mapping[str, Any]) -> str:
    """An interaction's name: its own, or its class's as verl makes it (`Gsm8kInteraction` -> `gsm8k`)."""
    if "class_name" not in item:
        raise ValueError(f"an interaction needs `class_name`: {dict(item)!r}")
    plain = str(item["class_name"]).replace(":", ".").rpartition(".")[2]
    return str(item.get("name") or plain.removesuffix("Interaction").lower())


def _find(config: str) -> Path:
    """The YAML file; the spec's folder is on the import path."""
    named = Path(config).expanduser()
    places = [named] if named.is_absolute() else [*(Path(folder) / named for folder in sys.path), Path.cwd() / named]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"the interaction file `{config}` is neither beside the spec nor in {Path.cwd()}")
    return file


_entries: dict[tuple[Path, str, int], tuple[dict[str, Any], ...]] = {}
"""The lists that were read, by file, key and the file's time."""


def entries(file: Path, key: str) -> tuple[dict[str, Any], ...]:
    """The list of an interaction or tool YAML, read once for all episodes.

    Raises:
        AdapterError: it has no such list.
    """
    place = (file, key, file.stat().st_mtime_ns)
    if place in _entries:
        return _entries[place]
    text = file.read_text(encoding="utf-8")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise AdapterError(f"`{file.name}` is no YAML: {error}") from None
    if "${" in text:
        config = library("verl", "omegaconf").OmegaConf
        data = config.to_container(config.create(data), resolve=True)
    listed = data.get(key) if isinstance(data, dict) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(item, dict) for item in listed):
        raise AdapterError(f"`{file.name}`: write `{key}: [{{class_name: …, config: {{…}}}}]`")
    return _entries.setdefault(place, tuple(listed))


def one_of_loop(item: Any, make: Callable[[], Any]) -> Any:
    """The process's one object of an entry: made once in each event loop."""
    objects = _objects.setdefault(asyncio.get_running_loop(), {})
    key = orjson.dumps(item, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str)
    if key not in objects:
        objects[key] = make()
    return objects[key]


def interaction_class(name: str) -> Any:
    """`package.module.Class`, as verl writes it, or `package.module:Class`.

    Raises:
        EntryError: it cannot be imported.
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    with verl_importable():
        return load_entry(f"{module}:{attribute}", None)


def _called(method: Any, instance: str, kwargs: Mapping[str, Any]) -> Any:
    """A method that may take the instance, or (as in verl's own base class) nothing."""
    for named in (kwargs, {}):
        try:
            inspect.signature(method).bind(instance, **named)
        except TypeError:
            continue
        return method(instance, **named)
    return method()


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
