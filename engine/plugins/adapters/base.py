"""What adapters share: finding what `use` names, importing a library, and turning its answers into the engine's.

An adapter is an environment like any other (`reset`, and `step` or `tools`, `score`, `close`). Its constructor has
`use`, `base` and the keys of the spec's `with`. One object serves one episode.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.errors import AdapterError
from engine.schemas.entry import ADAPTERS, TOOL_ADAPTERS
from engine.schemas.environment import Step
from engine.schemas.message import ContentPart, Message, Role, TextPart, image_part
from engine.schemas.reward import RewardEvent
from engine.spec.code.entry import load_entry
from engine.storable import refusal

_importing = threading.Lock()


def library(adapter: str, module: str) -> Any:
    """Import a module of an adapter's library.

    Raises:
        AdapterError: it is not installed; the message says what to install.
    """
    try:
        with _importing:
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != top:
            raise  # the library is there, and something that it needs is not: its own words name it
        facts = ADAPTERS.of_plugins().get(adapter) or TOOL_ADAPTERS.of_plugins()[adapter]
        raise AdapterError(f"the adapter `{adapter}` needs `{top}`: {facts.install}") from None


def load_target(use: str, base: str) -> Any:
    """What `use` names: `package.module:Name`, or `path/file.py:Name` with a path relative to the spec's folder.

    Raises:
        AdapterError: there is no such file or name.
        EntryError: the same for `package.module:Name`.
    """
    place, colon, name = use.rpartition(":")
    if not place.endswith(".py"):
        return load_entry(use, Path(base))
    file = (Path(base) / Path(place).expanduser()).resolve()
    if not colon or not name.isidentifier():
        raise AdapterError(f"`{use}` names no function or class; write `path/file.py:Name`")
    if not file.is_file():
        raise AdapterError(f"there is no file `{file}`; `use` is relative to the spec's folder")
    module = _module(file)
    if not hasattr(module, name):
        raise AdapterError(f"`{file.name}` has no `{name}`")
    return getattr(module, name)


def _module(file: Path) -> Any:
    """The module of a file, imported once in each process."""
    name = f"_file_{file.stem}_{blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    with _importing:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise AdapterError(f"`{file}` cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def add_to_path(folders: Iterable[str], base: str) -> None:
    """Put folders on the import path, first of all, as PYTHONPATH does; relative ones are relative to the spec's
    folder.

    Raises:
        AdapterError: one is not there.
    """
    for folder in reversed(list(folders)):
        place = (Path(base) / Path(folder).expanduser()).resolve()
        if not place.is_dir():
            raise AdapterError(f"there is no folder `{place}`, which `with.path` puts on the import path")
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
            importlib.invalidate_caches()


def field_of(fields: Mapping[str, Any], name: str | None) -> Any:
    """A task's field by dotted name; None where the task has none."""
    value: Any = fields
    for key in (name or "").split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def message_of_chat(message: Any, who: str, *, prompt: bool = False) -> Message:
    """One message of OpenAI's form: a string, or parts. In a prompt, worked examples have the role assistant.

    Raises:
        AdapterError: it has another form.
    """
    roles = ("system", "user", "tool", "assistant") if prompt else ("system", "user", "tool")
    if not isinstance(message, Mapping) or message.get("role") not in roles:
        raise AdapterError(f"{who} must give messages {{role: {' or '.join(roles)}; content}}, not {message!r:.120}")
    # what answers no call that the engine knows of is a user's
    role: Role = "user" if message["role"] == "tool" else message["role"]
    content = message.get("content", "")
    if isinstance(content, str):
        return Message(role=role, content=content)
    if not isinstance(content, Sequence):
        raise AdapterError(
            f"{who} gave a message with content of type {type(content).__name__}; it must be text or parts"
        )
    return Message(role=role, content=[part_of_chat(part, who) for part in content])


def messages_of_chat(messages: Any, who: str, *, prompt: bool = False) -> list[Message]:
    """A list of messages of OpenAI's form.

    Raises:
        AdapterError: it has another form.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise AdapterError(f"{who} must give a list of messages, not {messages!r:.120}")
    return [message_of_chat(message, who, prompt=prompt) for message in messages]


def part_of_chat(part: Any, who: str) -> ContentPart:
    """A part of a message of OpenAI's form, as a mapping or as an object of pydantic.

    Raises:
        AdapterError: it is neither text nor an image.
    """
    part = part.model_dump() if hasattr(part, "model_dump") else part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return TextPart(text=part.get("text") or "")
    if kind == "image":
        return image_part(part.get("image"))
    if kind == "image_url":
        url = part.get("image_url")
        return image_part(url.get("url") if isinstance(url, Mapping) else url)
    raise AdapterError(f"{who} gave a part of type {kind!r}; only text and images can be shown")


def reward_of(value: Any, who: str) -> float:
    """A reward as a finite number.

    Raises:
        AdapterError: it is none.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise AdapterError(f"{who} gave the reward {value!r:.120}, which is no finite number")
    return number


def parts_of(answer: Any, form: str, who: str, error: type[Exception] = AdapterError) -> Sequence[Any]:
    """The parts of what a method returned, which must have a form such as `(observation, info)`.

    Raises:
        AdapterError: it has another number of parts, or none.
    """
    if not isinstance(answer, tuple | list) or len(answer) != form.count(",") + 1:
        raise error(f"{who} must return {form}, not {answer!r:.120}")
    return answer


def facts_of(info: Any, who: str) -> dict[str, Any]:
    """What a library's `info` or `metadata` says and JSON can hold: for guards and for the trace. The rest is left out.

    Raises:
        AdapterError: it is not a mapping.
    """
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise AdapterError(f"{who} gave {info!r:.120} where a mapping of facts belongs")
    return {key: value for key, value in info.items() if isinstance(key, str) and refusal({key: value}) is None}


def stepped(
    *,
    messages: Sequence[Message],
    reward: float | None,
    cause: str,
    over: bool,
    truncated: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> Step:
    """A library's step as the engine's. Nothing is shown after the last one.

    `reward` is what the newest turn earned; `truncated`: a limit of the library's own ended the episode.
    """
    event = "truncated" if truncated else "done" if over else "continue"
    rewards = [] if reward is None else [RewardEvent(turn="last", value=reward, cause=cause)]
    ended = {"terminated": over and not truncated, "truncated": truncated}
    return Step(
        event=event,
        messages=list(messages) if event == "continue" else [],
        rewards=rewards,
        facts={**(facts or {}), **ended},
    )
