"""Replies from a script, tokenised by the real tokenizer: a dry run of episodes without a model.

A reply depends only on the episode's task, sample and turn, so a run can be resumed and repeated. As with a real
backend, it ends at the first stop token or stop string, and at `max_new_tokens`.

Tool calls are written as a model with the chat format would write them: the possible forms are tried in order, and a
form is used if the format's parser reads its tokens back as these calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.backends.backend import Backend
from engine.backends.registry import refuse_parameters
from engine.backends.stops import StopStrings
from engine.errors import BackendError, ContextOverflow, RenderError
from engine.schemas.backend import ScriptedBackendSpec
from engine.schemas.generation import FinishReason, GenerateRequest, Generation, VersionSpan
from engine.schemas.message import Message, ToolCall
from engine.schemas.script import Script, ScriptedReply
from engine.storable import words_of
from engine.tokens.bridge.kinds import View, mark
from engine.tokens.choosing import ASKED, TOOL, written
from engine.tokens.conversation import TAIL
from engine.tokens.toolcalls import FORMATS, Call, ToolCallFormat

if TYPE_CHECKING:
    from pathlib import Path

    from engine.schemas.backend import ScriptedBackendSpec
    from engine.spec.access import Access
    from engine.spec.document import Document
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate


class ScriptedBackend(Backend):
    """Replies with the texts of a `Script`.

    >>> backend = ScriptedBackend(Script.model_validate(["17 + 25 = 42", "<answer>42</answer>"]), chat_format)
    """

    declared = ScriptedBackendSpec

    def __init__(self, script: Script, format: ChatTemplate, *, latency: float = 0.0) -> None:
        """
        Args:
            script: The replies.
            format: The model's chat format, whose context limits prompts.
            latency: Seconds before each reply.
        """
        self._script = script
        self._format = format
        self._latency = latency
        self._ids: dict[int, np.ndarray] = {}
        self._ends: dict[tuple[Any, ...], tuple[int, FinishReason]] = {}
        self._attempts: Counter[tuple[str, int]] = Counter()
        self._cases = {
            (task, case.sample): (rank, case.replies)
            for rank, case in reversed(list(enumerate(script.cases)))
            for task in case.tasks
        }
        """(task, sample) -> position of the first case that names it, and its replies."""
        self._counts: Counter[str] = Counter()
        self.context = format.context

    @classmethod
    def open(cls, spec: ScriptedBackendSpec, format: ChatTemplate, loaded: LoadedSpec) -> ScriptedBackend:
        """Read the script that a spec names or holds.

        Raises:
            SpecError: The script is invalid; with file, line and column.
            BackendError: The spec's sampling sets a parameter that a script cannot follow.
        """
        from engine.spec.document import Document

        refuse_parameters(spec, loaded.spec.sampling)
        where = ("backend", "replies")
        if isinstance(spec.replies, str):
            script = read_script(loaded.resolve(spec.replies, where))
        else:
            origins, keys = (
                {path[2:]: origin for path, origin in places.items() if path[:2] == where}
                for places in (loaded.origins, loaded.key_origins)
            )
            script = _valid(Document(data=spec.replies, origins=origins, key_origins=keys))
        return cls(script, format, latency=spec.latency)

    async def start(self) -> None:
        """Tokenise every reply, so that a reply that cannot be tokenised is found before the run.

        Raises:
            BackendError: Kind `script_error`.
        """
        for reply in [*self._script.replies, *(reply for case in self._script.cases for reply in case.replies)]:
            self._tokens(reply)

    async def generate(self, request: GenerateRequest) -> Generation:
        """The scripted reply of this turn.

        Raises:
            ContextOverflow: The prompt leaves no room for one token.
            BackendError: The script has an `error` here (kind `scripted_error`), or no reply (kind `script_exhausted`).
        """
        began = time.perf_counter()
        self._counts["requests"] += 1
        reply = self._reply(request)
        if wait := self._latency + reply.delay:
            await asyncio.sleep(wait)
        if reply.error is not None:
            tried = (request.episode_id, request.turn)
            if reply.times is None or self._attempts[tried] < reply.times:
                self._attempts[tried] += 1
                self._counts["errors"] += 1
                raise BackendError(reply.error, kind="scripted_error", retryable=reply.retryable)
        length = len(request.input_ids)
        if self._format.context is not None and length + 1 > self._format.context:
            raise ContextOverflow(f"the prompt has {length} tokens; the model attends to {self._format.context}")
        ids = self._tokens(reply)
        end, finish = self._end(reply, ids, request)
        if end > request.max_new_tokens:
            end, finish = request.max_new_tokens, FinishReason(type="length")
        self._counts["tokens"] += end
        return Generation(
            output_ids=ids[:end],
            logprobs=np.full(end, reply.logprob, dtype=np.float32),
            finish=finish,
            versions=[VersionSpan(version=0, start=0, end=end)],
            prompt_tokens=length,
            seconds=time.perf_counter() - began,
        )

    def release(self, episode_id: str) -> None:
        """Drop the counts of failed tries of an episode that has ended."""
        for key in [key for key in self._attempts if key[0] == episode_id]:
            del self._attempts[key]

    def stats(self) -> dict[str, Any]:
        """`requests`, `tokens` and `errors` so far."""
        return {name: self._counts[name] for name in ("requests", "tokens", "errors")}

    def _reply(self, request: GenerateRequest) -> ScriptedReply:
        task, _, sample = request.episode_id.rpartition("/")  # the first case that names the episode has its replies
        keys = [(task, int(sample)), (task, None)] if sample.isdecimal() else []
        named = [self._cases[key] for key in keys if key in self._cases]
        replies = min(named, key=lambda case: case[0])[1] if named else self._script.replies
        turn = request.turn
        if turn < len(replies):
            return replies[turn]
        if self._script.exhausted == "error" or not replies:
            raise BackendError(
                f"the script has {len(replies)} replies for episode {request.episode_id!r}, and none for its turn "
                f"{turn}: write one more, or set `exhausted: cycle` or `exhausted: last`",
                kind="script_exhausted",
            )
        return replies[turn % len(replies)] if self._script.exhausted == "cycle" else replies[-1]

    def _tokens(self, reply: ScriptedReply) -> np.ndarray:
        """The reply's ids, int32 [tokens]; computed once."""
        ids = self._ids.get(id(reply))
        if ids is None:
            ids = self._ids[id(reply)] = np.asarray(write_reply(self._format, reply), dtype=np.int32)
        return ids

    def _end(self, reply: ScriptedReply, ids: np.ndarray, request: GenerateRequest) -> tuple[int, FinishReason]:
        """Number of tokens of a reply, and its finish reason, before `max_new_tokens` is applied."""
        stop = request.sampling.stop
        stop_ids = [] if request.sampling.ignore_eos else request.stop_token_ids
        key = (id(reply), tuple(stop), tuple(stop_ids))
        if key in self._ends:
            return self._ends[key]
        sampled = ids.tolist()
        ending = frozenset(stop_ids)
        met = next((index for index, token in enumerate(sampled) if token in ending), None)
        end = len(sampled) if met is None else met + 1
        string = StopStrings(self._format.decode, stop).first(sampled[:end]) if stop else None
        if met is not None and (string is None or string[0] >= end):
            ending_of_reply = end, FinishReason(type="stop", matched=sampled[met])
        elif string is not None:
            ending_of_reply = string[0], FinishReason(type="stop", matched=string[1])
        else:
            message = "the script sets `finish: abort`" if reply.finish == "abort" else None
            ending_of_reply = len(ids), FinishReason(type=reply.finish, message=message)
        self._ends[key] = ending_of_reply
        return ending_of_reply


def write_reply(format: ChatTemplate, reply: ScriptedReply) -> list[int]:
    """The ids of a scripted reply, with the stop token if it ends by one.

    Raises:
        BackendError: Kind `script_error`: an id is not in the vocabulary, or the calls cannot be written in the format.
    """
    if reply.tokens is not None:
        bad = [token for token in reply.tokens if not 0 <= token < format.vocab_size]
        if bad:
            raise BackendError(
                f"the script's token {bad[0]} is not in the vocabulary [0, {format.vocab_size})",
                kind="script_error",
            )
        return reply.tokens
    if reply.tool_calls:
        ids = write_calls(format, reply.text, [(call.name, call.arguments) for call in reply.tool_calls])
    else:
        ids = list(format.encode(reply.text))
    return [*ids, format.stop_token_ids[0]] if reply.finish == "stop" else ids


def read_script(path: Path, access: Access | None = None) -> Script:
    """Read a script's file: a mapping, in the same way as a spec, or a plain list of replies or cases.

    Raises:
        SpecError: It is invalid; with the place of each mistake.
    """
    from engine.spec.access import Access
    from engine.spec.document import flatten
    from engine.spec.load import load_document
    from engine.spec.resolve import MAX_BYTES
    from engine.spec.text.tree import Place, Sequence, parse

    if path.is_file():
        data = (access or Access()).read(path, MAX_BYTES) or b""
        tree, problems = parse(data.decode("utf-8"), Place(str(path)))
        if isinstance(tree, Sequence) and not problems:
            return _valid(flatten(tree))
    return load_document(path, Script, access)[0]


def _valid(document: Document) -> Script:
    """Validate a script.

    Raises:
        SpecError: It is invalid; with the place of each mistake.
    """
    from engine.errors import SpecError
    from engine.spec.document import validate

    script, problems = validate(document, Script)
    if script is None:
        raise SpecError(problems)
    return script


_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def write_calls(format: ChatTemplate, text: str, calls: Sequence[Call]) -> list[int]:
    """Ids of an assistant turn with `text` and `calls`, without its stop token. Special tokens in the text are tokens.

    Raises:
        BackendError: Kind `script_error`: the parser reads no form back as this text and these calls, or the format's
            `write` failed.
    """
    tools = []
    for name, arguments in calls:
        properties = {key: {"type": _TYPES.get(type(value), "string")} for key, value in arguments.items()}
        parameters = {"type": "object", "properties": properties}
        tools.append({"type": "function", "function": {"name": name, "description": name, "parameters": parameters}})
    try:
        prompt = format.render([Message(role="user", content="?")], tools)[-TAIL:]
    except RenderError:
        prompt = []
    content, reasoning, said = _parsed(format, format.encode(text), prompt, tools)
    marked = bool(format.fast.quoting.spans(text)) or "<think>" in text or "</think>" in text
    if not marked:  # where the prompt opens reasoning, the text does not belong to it
        content, reasoning = text.strip(), ""
    for ids in _candidates(format, text, content, reasoning, calls, marked=marked):
        if _parsed(format, ids, prompt, tools) == (content, reasoning, [*said, *calls]):
            return ids
    raise BackendError(
        f"the calls {[name for name, _ in calls]} cannot be written in the format {format.name!r}: "
        "write the reply's `text` as the model would",
        kind="script_error",
    )


def _parsed(
    format: ChatTemplate, ids: list[int], prompt: list[int], tools: list[dict[str, Any]]
) -> tuple[str, str, list[Call | None]]:
    """Content, reasoning and calls that the format's parser reads; None for a call that is malformed."""
    ended = np.asarray([*ids, format.stop_token_ids[0]], dtype=np.int32)
    reply = format.replies.parse(ended, before=np.asarray(prompt, dtype=np.int32), turn=0, tools=tools)
    calls = [(call.name, call.arguments) if isinstance(call, ToolCall) else None for call in reply.attempts]
    return reply.content.strip(), (reply.reasoning or "").strip(), calls


def _candidates(
    format: ChatTemplate, text: str, content: str, reasoning: str, calls: Sequence[Call], *, marked: bool
) -> Iterator[list[int]]:
    """Yield the calls as the chat template writes them, then as the call format or all built-in formats do.

    A text with markers (`marked`) is kept as it is. Another one is the content of a reply that the template writes.
    """
    ways = (_after_text, _by_template) if marked else (_by_template, _after_text)
    for way in ways if format.calls_shown else ():
        if (reply := way(format, text, content, reasoning, calls)) is not None:
            yield format.encode(reply)
    readers = [format.call_format] if format.call_format is not None else [kind() for kind in FORMATS.values()]
    for reader in readers:
        yield format.encode(_written(reader, text, calls))


def _written(format: ToolCallFormat, text: str, calls: Sequence[Call]) -> str:
    name = type(format).__name__
    try:
        written = format.write(text, calls)
    except Exception as error:
        raise BackendError(f"{name}.write raised {words_of(error)}", kind="script_error") from error
    if not isinstance(written, str):
        raise BackendError(f"{name}.write returned {type(written).__name__}, not str", kind="script_error")
    return written


def _by_template(format: ChatTemplate, text: str, content: str, reasoning: str, calls: Sequence[Call]) -> str | None:
    """The whole reply as the chat template writes it after the generation prompt; None where it shows no such reply."""
    shown = _shown(format, {"content": content if reasoning else text, "reasoning_content": reasoning}, calls)
    if shown is None:
        return None
    before, reply = shown
    opened = format.text([ASKED], [TOOL]).removeprefix(before)
    if reply.startswith(opened):
        return reply.removeprefix(opened)
    opened, reply = opened.strip(), reply.lstrip()  # white space after the marker of reasoning may differ in a prompt
    return reply.removeprefix(opened) if reply.startswith(opened) else None


def _after_text(format: ChatTemplate, text: str, content: str, reasoning: str, calls: Sequence[Call]) -> str | None:
    """The text as it is, and the calls as the chat template writes them after such a text."""
    said = mark(0) + text[len(text.rstrip()) :] if content else ""
    shown = _shown(format, {"content": said, "reasoning_content": mark(1) if reasoning else ""}, calls)
    if shown is None:
        return None
    after = shown[1]
    for part in (mark(0), mark(1), "</think>"):
        after = after.rpartition(part)[2]
    spans = format.fast.quoting.spans(after)
    if spans and spans[0][0] == 0 and text.rstrip().endswith(after[: spans[0][1]]):
        after = after[spans[0][1] :]
    return text.rstrip() + (after if text.strip() else after.lstrip())


def _shown(format: ChatTemplate, parts: View, calls: Sequence[Call]) -> tuple[str, str] | None:
    """What the template writes before a reply of these parts, and for it."""
    made = [ToolCall(id=f"call_0_{place}", name=name, arguments=given) for place, (name, given) in enumerate(calls)]
    try:
        view = format.views.of(Message(role="assistant", content="", tool_calls=made))
    except RenderError:
        return None
    return written(format, {**view, **{key: part for key, part in parts.items() if part or key == "content"}})
