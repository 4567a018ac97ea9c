"""Tasks whose prompt leaves no room for a turn: refused, or left out and counted, before the run (`tasks.overlong`)."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from engine.errors import EngineError, SpecError
from engine.schemas.message import Message, TextPart
from engine.spec.conversation import conversation_of, tools_of
from engine.spec.diagnostic import Diagnostic
from engine.spec.entry import load_entry
from engine.spec.signature import shape_of
from engine.spec.template import fill, fill_words, found_image, image_folders
from engine.store.columns import json_text
from engine.tokens.images import DIGEST, digest_of, read_reference

if TYPE_CHECKING:
    from engine.schemas.environment import Task
    from engine.spec.load import LoadedSpec
    from engine.spec.mix import TaskList
    from engine.tokens.format import ChatFormat

log = structlog.get_logger(__name__)

PER_MESSAGE = 16
"""Tokens that a template may put around a message, for the bound that spares most rows the tokenizer."""


def fitting_tasks(tasks: TaskList, loaded: LoadedSpec, form: ChatFormat) -> TaskList:
    """The tasks whose prompt, with a turn of `limits.turn_tokens`, fits `limits.episode_tokens` and the model's context.

    Counted are the prompt of the spec or the row, its images (other than URLs), and the schemas of its tools: of the row, or of
    the spec's functions. What an environment's `reset` adds is not known here.

    Raises:
        SpecError: `tasks.overlong: error`, and a prompt is too long; or all of them are.
    """
    spec = loaded.spec
    bounds = [most for most in (spec.limits.episode_tokens, spec.model.context, form.context) if most is not None]
    if spec.tasks.overlong is None or not bounds:
        return tasks
    room = min(bounds) - spec.limits.turn_tokens
    prompts = _Prompts(loaded, form)
    kept: list[int] = []
    first = ""
    for index, task in enumerate(tasks):
        tokens = prompts.tokens(task, room)
        if tokens <= room:
            kept.append(index)
        elif not first:
            first = f"the first is row {task.index + 1} with {tokens} tokens"
    count = len(tasks) - len(kept)
    if not count:
        return tasks
    words = (
        f"{count} of {len(tasks)} tasks have a prompt that leaves no room for a turn of {spec.limits.turn_tokens} within "
        f"{min(bounds)} tokens; {first}"
    )
    if spec.tasks.overlong == "error" or not kept:
        fix = "set `tasks.overlong: drop`, or allow more tokens"
        origin = loaded.origin(("tasks", "overlong"))
        raise SpecError([Diagnostic("tasks.overlong", "error", words, fix, origin, ("tasks", "overlong"))])
    log.warning("tasks are left out", reason=words)
    return tasks.chosen(np.array(kept, np.int64))


class _Prompts:
    """Counts the tokens of prompts."""

    def __init__(self, loaded: LoadedSpec, form: ChatFormat) -> None:
        self._spec = loaded.spec
        self._base = loaded.base
        self._form = form
        self._tools = _schemas(loaded)
        self._around: tuple[str, int | None] = ("", None)
        """The newest tools as JSON, and `_tokens_around` of them: most rows have the same tools."""
        self._folders = image_folders(loaded.spec.tasks.files, loaded.base)

    def tokens(self, task: Task, room: int) -> int:
        """The length of a task's prompt; an upper bound of it where that is at most `room`."""
        messages = self._messages(task)
        source = self._spec.conversation
        own = tools_of(task.fields, source) if source is not None else None
        tools = self._tools if own is None else own
        if all(isinstance(message.content, str) and not message.tool_calls for message in messages):
            text = sum(len(message.text.encode()) + PER_MESSAGE for message in messages)  # a token is at least one byte
            around = self._tokens_around(tools)
            if around is not None and text + around <= room:
                return text + around
        count = len(self._form.render(messages, tools or None))
        vision = self._form.vision
        for image in (image for message in messages for image in message.images):
            if vision is not None and not image.image.startswith(("http:", "https:", DIGEST)):
                data = read_reference(image, "spec")
                digest = digest_of(data)
                vision.bank.put(digest, data, image.mime or "application/octet-stream")
                count += len(vision.bank.picture(digest).ids) - 1  # one marker of it is counted already
        return count

    def _tokens_around(self, tools: list[dict[str, Any]]) -> int | None:
        """Tokens that the template writes besides the messages: tools, a default system message. None if that is not known."""
        key = json_text(tools)
        if key != self._around[0]:
            try:
                count: int | None = len(self._form.render([Message(role="user", content="")], tools or None))
            except EngineError:
                count = None if tools else 0
            self._around = (key, count)
        return self._around[1]

    def _messages(self, task: Task) -> list[Message]:
        if self._spec.conversation is not None:
            return [self._located(message) for message in conversation_of(task.fields, self._spec.conversation)]
        return [
            Message(
                role=item.role,
                content=fill(item.content, task.fields)
                if isinstance(item.content, str)
                else fill_words(item.content, task.fields, self._base),
            )
            for item in self._spec.messages
        ]

    def _located(self, message: Message) -> Message:
        if isinstance(message.content, str):
            return message
        parts = [
            part
            if isinstance(part, TextPart)
            else part.model_copy(update={"image": found_image(part.image, self._folders)})
            for part in message.content
        ]
        return Message(role=message.role, content=parts, tool_calls=message.tool_calls)


def _schemas(loaded: LoadedSpec) -> list[dict[str, Any]]:
    """The schemas of the spec's functions that run in this process."""
    found = []
    for tool in loaded.spec.tools:
        if loaded.spec.isolation_of(tool.isolation).mode == "process":
            continue
        target = load_entry(str(tool.use), Path(loaded.base))
        if not inspect.isclass(target):
            found.append(shape_of(target, tool.name).schema)
    return found
