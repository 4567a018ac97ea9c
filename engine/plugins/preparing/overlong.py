"""Tasks whose prompt leaves no room for a turn: refused, or left out and counted, before the run (`tasks.overlong`).

Prompts that are surely short enough are not tokenised: a token is at least one byte. The others are tokenised in parts,
in several processes where that takes long, and their lengths are kept on disk (see `jobs.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from engine.actions.calling.code_call import is_async
from engine.actions.spec_code import first_messages
from engine.errors import EngineError, SpecError
from engine.plugins.preparing.jobs import (
    ALONE,
    Job,
    PreparedCache,
    digest_of_files,
    digest_of_parts,
    prepare,
    rendering_digest,
)
from engine.schemas.message import ImagePart, Message, TextPart
from engine.schemas.model import ModelSpec
from engine.spec.code.entry import load_entry
from engine.spec.code.signature import shape_of
from engine.spec.conversation import tools_of
from engine.spec.template import image_folders
from engine.spec.text.diagnostic import Diagnostic
from engine.store.rows.columns import json_text
from engine.tokens.catalogue import prepared_folder
from engine.tokens.images import DIGEST, digest_of, read_reference
from engine.tokens.loading import load_format

if TYPE_CHECKING:
    from engine.schemas.environment import Task
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)

PER_MESSAGE = 16
"""Tokens that a template may put around a message, for the bound that spares most rows the tokenizer."""
PART_BYTES = 1 << 18
"""About the size of the prompts of one job, in bytes of text."""
_REMOTE = f"{__name__}:count_prompts"
_ANY_IMAGE = ImagePart(image=DIGEST)
"""Takes the place of images in jobs: a template writes the same marker for each."""


class PromptLengths:
    """Counts the tokens of the prompts of a spec's tasks.

    Args:
        loaded: The spec.
        template: Its model's chat format.
        processes: Number of worker processes. Default: `default_processes()`.
        alone: Seconds of work in this process before workers start.
    """

    def __init__(
        self, loaded: LoadedSpec, template: ChatTemplate, processes: int | None = None, alone: float = ALONE
    ) -> None:
        self._loaded = loaded
        self._spec = loaded.spec
        self._template = template
        self._processes = processes
        self._alone = alone
        tools = [tool for tool in loaded.spec.tools if loaded.spec.isolation_of(tool.isolation).mode == "thread"]
        targets = [(load_entry(str(tool.use), Path(loaded.base)), tool.name) for tool in tools]
        self._tools = [shape_of(target, name).schema for target, name in targets if not inspect.isclass(target)]
        """The schemas of the spec's functions that run in this process."""
        self._around: tuple[str, int | None] = ("", None)
        """The newest tools as JSON, and the tokens that the template writes besides the messages (tools, a default
        system message), None if that is not known: most rows have the same tools."""
        self._folders = image_folders(loaded.spec.tasks.files, loaded.base)

    def of(self, tasks: TaskList, room: int) -> np.ndarray:
        """The length of each task's prompt; an upper bound of it where that is at most `room`. int64 [tasks]

        Raises:
            RenderError: The chat template refuses a prompt.
            ImageError: An image of a prompt cannot be read.
        """
        lengths = np.zeros(len(tasks), np.int64)
        places: list[list[int]] = []
        counted = prepare(
            self._jobs(tasks, room, lengths, places),
            local=lambda prompts: [_length(self._template, *prompt) for prompt in prompts],
            remote=_REMOTE,
            common={"model": self._spec.model.model_dump(mode="json", by_alias=True), "base": str(self._loaded.base)},
            cache=PreparedCache(prepared_folder() / "prompts"),
            processes=self._processes,
            alone=self._alone,
        )
        for number, counts in enumerate(counted):
            lengths[places[number]] += counts
        return lengths

    def _jobs(self, tasks: TaskList, room: int, lengths: np.ndarray, places: list[list[int]]) -> Iterator[Job]:
        """The prompts to tokenise, in parts. Sets the lengths of the others, and the tokens of images; `places` gets
        each part's tasks."""
        part: list[list[Any]] = []
        mine: list[int] = []
        size = 0
        for index, task in enumerate(tasks):
            messages = [*first_messages(self._loaded, task.fields, self._folders), *self._opening(task)]
            source = self._spec.conversation
            row_tools = tools_of(task.fields, source) if source is not None else None
            tools = self._tools if row_tools is None else row_tools
            bound = self._bound(messages, tools)
            if bound is not None and bound <= room:
                lengths[index] = bound
                continue
            lengths[index] = sum(self._image_tokens(image) for message in messages for image in message.images)
            part.append([[_without_images(message).plain() for message in messages], tools or None])
            mine.append(index)
            size += sum(len(message.text) for message in messages)
            if size >= PART_BYTES:
                places.append(mine)
                yield digest_of_parts(self._inputs, json_text(part)), part
                part, mine, size = [], [], 0
        if part:
            places.append(mine)
            yield digest_of_parts(self._inputs, json_text(part)), part

    @cached_property
    def _inputs(self) -> str:
        """Digest of what lengths depend on besides messages and tools."""
        return digest_of_parts(rendering_digest(self._spec.model, self._loaded.base), digest_of_files([Path(__file__)]))

    def _opening(self, task: Task) -> list[Message]:
        """What a `pure` environment shows first; nothing where `reset` is async, or fails as its episode will."""
        if (environment := self._spec.opening_environment) is None:
            return []
        try:
            target = load_entry(environment.use, Path(self._loaded.base))
            waits = is_async(getattr(target, "reset", target))
            return [] if waits else list(target(**environment.with_).reset(task, 0).messages)
        except Exception:  # noqa: BLE001  (the code is the spec's)
            return []

    def _bound(self, messages: list[Message], tools: list[dict[str, Any]]) -> int | None:
        """An upper bound of a prompt's length; None if there is none without the tokenizer."""
        if not all(isinstance(message.content, str) and not message.tool_calls for message in messages):
            return None
        key = json_text(tools)
        if key != self._around[0]:
            try:
                count: int | None = len(self._template.render([Message(role="user", content="")], tools or None))
            except EngineError:
                count = None if tools else 0
            self._around = (key, count)
        around = self._around[1]
        return (
            None if around is None else around + sum(len(message.text.encode()) + PER_MESSAGE for message in messages)
        )

    def _image_tokens(self, image: ImagePart) -> int:
        """Tokens of an image besides its marker, which is counted with the text."""
        vision = self._template.vision
        if vision is None or image.image.startswith(("http:", "https:", DIGEST)):
            return 0
        data = read_reference(image, "spec")
        digest = digest_of(data)
        vision.bank.put(digest, data, image.mime or "application/octet-stream")
        return len(vision.bank.picture(digest).ids) - 1


def count_prompts(common: dict[str, Any], prompts: list[list[Any]]) -> list[int]:
    """The lengths of a part's prompts, in a worker process: see `PromptLengths`. Images count as one token."""
    template = _template(json_text(common["model"]), common["base"])
    return [_length(template, *prompt) for prompt in prompts]


def _length(template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> int:
    return len(template.render([Message.read(message) for message in messages], tools))


@lru_cache(maxsize=1)
def _template(model: str, base: str) -> ChatTemplate:
    return load_format(ModelSpec.model_validate_json(model), Path(base))


def _without_images(message: Message) -> Message:
    if isinstance(message.content, str):
        return message
    return replace(message, content=[part if isinstance(part, TextPart) else _ANY_IMAGE for part in message.content])


def without_overlong(tasks: TaskList, loaded: LoadedSpec, template: ChatTemplate) -> TaskList:
    """The tasks that fit. Raises: SpecError: none does."""
    fits, words = _measured(tasks, loaded, template)
    if not words:
        return tasks
    if not fits.any():
        raise _error(loaded, words)
    log.warning("tasks are left out", reason=words)
    return tasks.chosen(np.flatnonzero(fits))


def refuse_overlong(tasks: TaskList, loaded: LoadedSpec, template: ChatTemplate) -> TaskList:
    """All tasks. Raises: SpecError: one does not fit."""
    if words := _measured(tasks, loaded, template)[1]:
        raise _error(loaded, words)
    return tasks


def _error(loaded: LoadedSpec, words: str) -> SpecError:
    path = ("tasks", "overlong")
    fix = "set `tasks.overlong: drop`, or allow more tokens"
    return SpecError([Diagnostic("tasks.overlong", "error", words, fix, loaded.origin(path), path)])


def _measured(tasks: TaskList, loaded: LoadedSpec, template: ChatTemplate) -> tuple[np.ndarray, str]:
    """Which tasks have a prompt that, with a turn of `limits.turn_tokens`, fits `limits.episode_tokens` and the model's
    context; bool [tasks]. And what does not fit, in words; empty if all do.

    Counted are the prompt of the spec or the row, its images (other than URLs), the first messages of a `pure`
    environment, and the schemas of its tools: of the row, or of the spec's functions. What the `reset` of other
    environments adds is not known here.
    """
    spec = loaded.spec
    bounds = [most for most in (spec.limits.episode_tokens, spec.model.context, template.context) if most is not None]
    if not bounds:
        return np.ones(len(tasks), bool), ""
    room = min(bounds) - spec.limits.turn_tokens
    lengths = PromptLengths(loaded, template).of(tasks, room)
    long = np.flatnonzero(lengths > room)
    if not len(long):
        return lengths <= room, ""
    first = int(long[0])
    words = (
        f"{len(long)} of {len(tasks)} tasks have a prompt that leaves no room for a turn of {spec.limits.turn_tokens} "
        f"within {min(bounds)} tokens; the first is row {tasks[first].index + 1} with {lengths[first]} tokens"
    )
    return lengths <= room, words
