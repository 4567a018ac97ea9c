"""Known model families, through the library `renderers`: hand-written renderers that parse replies by token.

Invariant: a family is used only where it is proved to be the model's own. `auto` takes one if, for a battery of
conversations with and without tools, its ids equal those of the tokenizer's chat template; else the generic format
serves. A family that the spec names is taken at its word, and must itself hold what proof.py asks of a bridge.

`bridge_to_next_turn` copies the whole context. It is handed a short tail instead: a reply's last token after a
fixed prompt. For messages of each kind, the proof compares its answer with that for the whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import RenderError
from engine.made import maker
from engine.tokens.format import ChatFormat, Parsed, log, probe_tool
from engine.tokens.hermes import Read, hermes_of
from engine.tokens.proof import (
    ASSISTANT,
    CALLS,
    PICTURED,
    REASONS,
    STYLES,
    SYSTEM,
    TOOL,
    USER,
    Extension,
    View,
    probe,
)
from engine.tokens.tape import IntVector
from engine.tokens.template import ChatTemplate
from engine.tokens.tokenizer import FastTokenizer
from engine.tokens.toolcalls import Unreadable, as_arguments, call_parser, checked_call
from schemas.episode import ModelSpec
from schemas.message import MalformedCall, ToolCall

_make_call = maker(ToolCall)

_QWEN, _GLM, _DEEPSEEK, _EOS = "<tool_response>", "[gMASK]", "<｜begin▁of▁sentence｜>", "〈|EOS|〉"
_MARKS = {
    "qwen3": _QWEN,
    "qwen3-vl": _QWEN,
    "qwen3.5": _QWEN,
    "qwen3.6": _QWEN,
    "qwen3.8": _QWEN,
    "prime-qwen3": _QWEN,
    "nemotron-3": _QWEN,
    "nemotron-3-ultra": _QWEN,
    "nemotron-3.5": _QWEN,
    "llama-3": "<|eom_id|>",
    "gemma4": "<|turn>",
    "gpt-oss": "<|channel|>",
    "glm-4.5": _GLM,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.3": _GLM,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v4": _DEEPSEEK,
    "kimi-k2": "<|im_user|>",
    "kimi-k2.5": "<|im_user|>",
    "minimax-m2": "]~!b[",
    "hy3": "<｜hy_begin_of_sentence:opensource｜>",
    "inkling": "<|message_user|>",
    "laguna-xs.2": _EOS,
    "laguna-m.1": _EOS,
    "laguna-xs-2.1": _EOS,
    "laguna-s-2.1": _EOS,
}
"""Families that `auto` tries, each with a token that it cannot do without: the library takes a second to import, and
some families fetch a vocabulary, so they are not even begun for other tokenizers. Only the battery decides."""

_SPOKEN = ASSISTANT
_REASONED = ASSISTANT + REASONS
_CALLED = ASSISTANT + CALLS
_REASONED_CALL = ASSISTANT + REASONS + CALLS
_CALLED_TWICE = ASSISTANT + 2 * CALLS

_BATTERY: tuple[tuple[int, ...], ...] = (
    (USER,),
    (SYSTEM, USER),
    (USER, _SPOKEN, USER),
    (SYSTEM, USER, _SPOKEN, USER),
    (USER, _REASONED, USER),
    (USER, _REASONED, USER, _REASONED, USER),
    (USER, _CALLED, TOOL),
    (USER, _CALLED, TOOL, _SPOKEN, USER),
    (SYSTEM, USER, _CALLED, TOOL, _CALLED, TOOL),
    (USER, _REASONED_CALL, TOOL),
    (USER, _REASONED_CALL, TOOL, _REASONED, USER),
    (USER, _REASONED_CALL, TOOL, _REASONED_CALL, TOOL, _REASONED, USER, _SPOKEN, USER),
    (USER, _CALLED_TWICE, TOOL, TOOL),
    (SYSTEM, USER, _SPOKEN, USER, _REASONED_CALL, TOOL, USER),
)
_SEEN: tuple[tuple[int, ...], ...] = (
    (PICTURED + USER,),
    (SYSTEM, PICTURED + 3 + USER, _SPOKEN, USER),
    (USER, _SPOKEN, PICTURED + 6 + USER),
    (PICTURED + USER, _CALLED, PICTURED + 3 + TOOL),
    (PICTURED + 3 + USER, _CALLED, PICTURED + 6 + TOOL, _SPOKEN, PICTURED + USER),
)
"""Beside the battery, for models that see."""
_ENOUGH = 16
"""Fewest renders that must have been compared (a template may refuse some of the battery)."""

_PROBLEMS = {
    "invalid_json": "Its arguments are not valid JSON.",
    "unclosed_block": "It was begun but never finished: its closing tag is missing.",
    "missing_name": "It does not say which tool to call.",
    "malformed_structure": "It is not in the form that tool calls have.",
}


def family_format(
    tokenizer: FastTokenizer,
    spec: ModelSpec,
    base: Path,
    *,
    vocab_size: int,
    context: int | None,
    sees: bool = False,
) -> FamilyFormat | None:
    """The family that `model.renderer` names or, for `auto`, the one that is proved to be this tokenizer's.

    `sees`: it must show images as the chat template does, too.

    Returns:
        None where `auto` finds none: the generic format is to be used.

    Raises:
        RenderError: The family that is named does not exist, or does not fit the tokenizer or `template_kwargs`.
    """
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "context": context}
    if spec.renderer != "auto":
        known = sorted(set(_registry()) - {"default"})
        if spec.renderer not in known:
            raise RenderError(
                f"model.renderer: {spec.renderer!r} is unknown; write auto, template or {', '.join(known)}"
            )
        try:
            return FamilyFormat(spec.renderer, tokenizer, spec, base, **sizes)
        except (AssertionError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise RenderError(f"model.renderer: {spec.renderer} does not fit this model: {error}") from error
    if not tokenizer.full.chat_template:
        return None
    template = ChatTemplate(tokenizer, spec.template_kwargs)
    for name in (name for name, token in _MARKS.items() if token in tokenizer.added):
        try:
            renderer = _renderer(name, tokenizer, spec)
        except Exception:  # noqa: BLE001 - each family refuses foreign tokenizers in its own way
            continue
        if _agrees(renderer, template, tokenizer, sees):
            log.debug("family_proved", family=name)
            return FamilyFormat(name, tokenizer, spec, base, **sizes)
    return None


def _registry() -> dict[str, Any]:
    """The library's families, by name."""
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    return dict(RENDERER_REGISTRY)


def _renderer(name: str, tokenizer: FastTokenizer, spec: ModelSpec, *, keep: bool = False) -> Any:
    """A renderer of the family; `keep`: one whose bridges go on whatever the template does to old reasoning."""
    from renderers.base import merge_chat_template_kwargs
    from renderers.configs import config_from_name

    config: Any = merge_chat_template_kwargs(config_from_name(name), spec.template_kwargs)
    if keep:
        stated = {field: getattr(config, field) for field in config.model_fields_set}
        config = type(config)(**{**stated, "thinking_retention": "all"})
    renderer = _registry()[name](tokenizer, config)
    if hasattr(renderer, "_processor"):
        renderer._processor = _OnePlaceholder()
    return renderer


class _OnePlaceholder:
    """Stands where a family's renderer expects a processor: every image is one placeholder.

    The renderer then writes an image as the chat template does, with one marker, which the model's own processor
    expands later (see vision.py): it is neither asked twice, nor is a size worked out in two places.
    """

    merge_size = 1

    @property
    def image_processor(self) -> _OnePlaceholder:
        """Itself."""
        return self

    def __call__(self, **_: Any) -> dict[str, Any]:
        """A grid of one."""
        return {"pixel_values": np.zeros((1, 1), np.float32), "image_grid_thw": np.ones((1, 3), np.int64)}


@cache
def _blank() -> Any:
    """What the renderer is shown for every image."""
    from PIL import Image

    return Image.new("RGB", (1, 1))


def _shown(views: Sequence[View]) -> list[View]:
    """Messages as `renderers` reads them: with an image in each image part."""
    return [
        {**view, "content": [{**part, "image": _blank()} if part["type"] == "image" else part for part in content]}
        if isinstance(content := view["content"], list)
        else view
        for view in views
    ]


def _battery(sees: bool) -> Iterator[tuple[list[View], list[View] | None]]:
    for kinds in (*_BATTERY, *(_SEEN if sees else ())):
        for style in STYLES:
            views = [probe(kind, index, style) for index, kind in enumerate(kinds)]
            for tools in (None, [probe_tool()]):
                yield views, tools


def _agrees(renderer: Any, template: ChatTemplate, tokenizer: FastTokenizer, sees: bool) -> bool:
    """Whether a renderer's ids are the chat template's for the whole battery."""
    compared = 0
    for views, tools in _battery(sees):
        try:
            wanted = tokenizer.encode(template.text(views, tools))
        except RenderError:
            continue
        try:
            found = renderer.render_ids(_shown(views), tools=tools, add_generation_prompt=True)
        except Exception:  # noqa: BLE001 - whatever it raises, it is not what the template does
            return False
        if found != wanted:
            return False
        compared += 1
    return compared >= _ENOUGH


class FamilyFormat(ChatFormat):
    """A family of `renderers`."""

    free_markup = True

    def __init__(
        self,
        name: str,
        tokenizer: FastTokenizer,
        spec: ModelSpec,
        base: Path,
        *,
        vocab_size: int,
        context: int | None,
    ) -> None:
        super().__init__(name, tokenizer, spec, vocab_size=vocab_size, context=context)
        self._renderer = _renderer(name, tokenizer, spec)
        try:
            self._bridger = _renderer(name, tokenizer, spec, keep=True)
        except ValueError:  # template_kwargs say already what is kept
            self._bridger = self._renderer
        self.stop_token_ids = list(self._renderer.get_stop_token_ids())
        self._ends_reasoning = _first_id(self._renderer, "_think_end", "_channel_end")
        self._tail = self.render_views([{"role": "user", "content": "Q"}], None)
        self._filler = tokenizer.encode("x")[:1]
        self._hermes = hermes_of(self._renderer, tokenizer)
        self._look()
        if spec.tool_calls != "auto":
            self.parser = call_parser(spec.tool_calls, base)
            if not self._writes_calls_as(self.parser):
                self.calls_shown = 0

    @property
    def think_end_id(self) -> int | None:
        """The token that ends reasoning, where it is one."""
        return self._ends_reasoning

    def render_views(self, views: Sequence[View], tools: list[View] | None) -> list[int]:
        """See `ChatFormat.render`."""
        try:
            return list(self._renderer.render_ids(_shown(views), tools=tools, add_generation_prompt=True))
        except Exception as error:
            raise RenderError(f"the renderer {self.name!r} refuses these messages: {error}") from error

    def extension(
        self, reply: View, new: Sequence[View], tools: list[View] | None, last: int | None
    ) -> Extension | None:
        """See `ChatFormat.extension`."""
        closed = last in self.stop_set
        # Its reasoning is over, whatever the prompt opened; a cut in the middle of it is closed by `bridge`.
        ended = [] if self._ends_reasoning is None else [self._ends_reasoning]
        said = [*ended, last] if closed else [*ended, *self._filler]
        rest = self._after(self._tail, said, new, tools)
        if rest is None:
            return None
        if closed or not rest or rest[0] not in self.stop_set:
            return Extension([], rest)
        return Extension(rest[:1], rest[1:])

    def check(self, before: list[int], reply: list[int], new: Sequence[View], tools: list[View] | None) -> str:
        """The short tail must give what the whole conversation gives."""
        short = self.extension({}, new, tools, reply[-1] if reply else None)
        whole = self._after(before, reply, new, tools)
        if short is None or whole != [*short.closing, *short.bridge]:
            return "the family's bridge depends on more than the new messages"
        return ""

    def _after(
        self, before: Sequence[int], said: Sequence[int | None], new: Sequence[View], tools: list[View] | None
    ) -> list[int] | None:
        """What `bridge_to_next_turn` adds; None where it refuses."""
        try:
            found = self._bridger.bridge_to_next_turn(list(before), list(said), _shown(new), tools=tools)
        except Exception as error:
            raise RenderError(f"the renderer {self.name!r} refuses these messages: {error}") from error
        if found is None:
            return None
        cut = len(before) + len(said)
        ids: list[int] = found.token_ids
        return ids[cut:] if ids[:cut] == [*before, *said] else None

    def parse(self, ids: IntVector, *, before: IntVector, turn: int, tools: Sequence[View] = ()) -> Parsed:
        """See `ChatFormat.parse`: by the family's own grammar, over tokens."""
        if self.parser is not None:
            return super().parse(ids, before=before, turn=turn, tools=tools)
        found = self._read(ids, before.tolist(), tools)
        thinking = found.reasoning_complete is False
        attempts = [_attempt(call, f"call_{turn}_{index}") for index, call in enumerate(found.tool_calls)]
        if not attempts:
            return Parsed(found.content, found.reasoning_content, [], found.content, thinking, True)
        said: list[int] = ids.tolist()
        if said[-1] in self.stop_set:
            said.pop()
        read = MalformedCall not in map(type, attempts)
        as_calls = read and (len(attempts) == 1 or self.calls_shown > 1) and not self._said_more(said, found.tool_calls)
        body = found.content if as_calls else _after_reasoning(self.decode(said), found)
        return Parsed(found.content if read else body, found.reasoning_content, attempts, body, thinking, as_calls)

    def _read(self, ids: IntVector, before: list[int], tools: Sequence[View]) -> Read | Any:
        """A reply as the library reads it."""
        found = self._hermes.read(ids, before) if self._hermes is not None else None
        if found is not None:
            return found
        try:
            return self._renderer.parse_response(ids.tolist(), tools=list(tools) or None, prompt_ids=before)
        except Exception as error:
            raise RenderError(f"the renderer {self.name!r} cannot read a reply: {error}") from error

    def _said_more(self, said: list[int], calls: list[Any]) -> bool:
        """Whether there is text between or behind the calls, which the parser leaves out."""
        spans = [call.token_span for call in calls]
        if None in spans:
            return False
        after = spans[0][1]
        for start, end in [*spans[1:], (len(said), 0)]:
            if after < start and self.decode(said[after:start]).strip():
                return True
            after = end
        return False


def _first_id(renderer: Any, *names: str) -> int | None:
    for name in names:
        found = getattr(renderer, name, None)
        if isinstance(found, int):
            return found
    return None


def _after_reasoning(text: str, found: Any) -> str:
    """What was written behind the reasoning, calls included."""
    if found.reasoning_content is None:
        return text
    _, closing, body = text.partition("</think>")
    if closing:
        return body.lstrip("\n")
    return "\n".join([found.content, *(call.raw for call in found.tool_calls)]).strip()


def _attempt(call: Any, id_: str) -> ToolCall | MalformedCall:
    status = str(call.status)
    if not isinstance(call.name, str | None):
        status = "missing_name"
    if status in ("ok", "unknown_tool") and call.name:
        try:
            return checked_call(_make_call, id_, call.name, as_arguments(call.arguments or {}))
        except Unreadable as problem:
            return MalformedCall(raw=call.raw, problem=str(problem))
    return MalformedCall(raw=call.raw, problem=_PROBLEMS.get(status, f"It could not be read ({status})."))
