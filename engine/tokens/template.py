"""Any chat template: a bridge that is proved by prefix, at token level.

Invariant: a bridge is made of what the template itself writes after a stand-in reply for the actual new messages,
cut at the added token that ends replies, or at the one that begins the next message where replies have no end of their own.
It is used only once `proof.prove` has found, for messages of these kinds, that the template writes exactly that after the
real conversation, and that it shows the conversation as before.

A template that writes no added token after a reply has no bridge (a merge could cross the cut): every turn then begins
a branch, which is as exact and costs O(conversation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import RenderError
from engine.schemas.model import ModelSpec
from engine.tokens.format import ChatFormat, log
from engine.tokens.jinja import looked_for
from engine.tokens.literal import MARK
from engine.tokens.proof import ASSISTANT, MARKERS, SYSTEM, TOOL, USER, Extension, View, mark, probe, probe_call
from engine.tokens.tokenizer import FastTokenizer

_ASKED: View = {"role": "user", "content": "Q"}
_WITH_AND_WITHOUT: tuple[list[Any] | None, ...] = (None, [{}])
_ESCAPED_MARK = ascii(MARK)[1:-1]
_STAND_IN = 0
"""Index of the stand-in's mark."""


class ChatTemplate:
    """A tokenizer's chat template, compiled once: what `apply_chat_template` writes, without its overhead."""

    def __init__(self, tokenizer: FastTokenizer, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer.full
        self._kwargs = {**tokenizer.full.special_tokens_map, **kwargs}
        self._compiled: dict[bool, Any] = {}
        self._in_parts = False
        self.reasoning_key = "reasoning_content"
        self._in_parts = self._wants_parts()
        self.reasoning_key = self._find_reasoning_key()
        """What the template calls a reply's reasoning."""

    def _find_reasoning_key(self) -> str:
        for key in ("reasoning_content", "thinking", "reasoning"):
            self.reasoning_key = key
            thought = {"role": "assistant", "content": "", "reasoning_content": mark(_STAND_IN)}
            called = {**thought, "tool_calls": [probe_call(1, 0)]}
            if self._shows([_ASKED, {**thought, "content": "A"}]) or self._shows([_ASKED, called, probe(TOOL, 1, str)]):
                return key
        return "reasoning_content"

    def _wants_parts(self) -> bool:
        """Whether contents must be lists of parts: templates of vision-language models may iterate over them."""
        asked: list[View] = [{"role": "user", "content": mark(_STAND_IN)}]
        shown = [self._shows(asked)]
        self._in_parts = True
        shown.append(self._shows(asked))
        return shown == [False, True]

    def _shows(self, views: list[View]) -> bool:
        try:
            return mark(_STAND_IN) in self.text(views, None)
        except RenderError:
            return False

    def text(self, views: Sequence[View], tools: list[View] | None) -> str:
        """What the template writes, generation prompt included.

        Raises:
            RenderError: It refuses.
        """
        if self._in_parts:
            views = [_parted(view) for view in views]
        if self.reasoning_key != "reasoning_content":
            views = [
                {**view, self.reasoning_key: view["reasoning_content"]} if "reasoning_content" in view else view
                for view in views
            ]
        try:
            written: str = self._for(bool(tools)).render(
                messages=views, tools=tools, documents=None, add_generation_prompt=True, **self._kwargs
            )
        except Exception as error:
            raise RenderError(f"the chat template refuses these messages: {error}{_advice(views)}") from error
        if _ESCAPED_MARK in written:
            raise RenderError(
                "text in the conversation spells a special token, and the chat template escapes it (\\ufdd0), so that it cannot be "
                "encoded as plain text; set `model.allow_special: true` if such text may become special tokens"
            )
        return written

    @property
    def sources(self) -> list[str]:
        """Its Jinja source: one, or another for conversations with tools."""
        found = [self._tokenizer.get_chat_template(None, tools=tools) for tools in _WITH_AND_WITHOUT]
        return list(dict.fromkeys(source for source in found if source))

    def _for(self, with_tools: bool) -> Any:
        """The compiled template; a tokenizer may have another one for conversations with tools."""
        found = self._compiled.get(with_tools)
        if found is None:
            from engine.tokens.jinja import compile_template

            source = self._tokenizer.get_chat_template(None, tools=[{}] if with_tools else None)
            found = self._compiled[with_tools] = compile_template(source)
        return found


class TemplateFormat(ChatFormat):
    """The generic format: the tokenizer's own chat template, or the spec's."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        spec: ModelSpec,
        *,
        vocab_size: int,
        context: int | None,
        eos: Sequence[int] = (),
    ) -> None:
        super().__init__("template", tokenizer, spec, vocab_size=vocab_size, context=context)
        if not tokenizer.full.chat_template:
            raise RenderError(
                f"the tokenizer of {spec.path!r} has no chat template; name a Jinja file in model.chat_template"
            )
        self._template = ChatTemplate(tokenizer, spec.template_kwargs)
        self.sources = self._template.sources
        """The template's Jinja source: one, or another for conversations with tools."""
        source = "".join(self.sources)
        self.markers = tuple(marker for marker in MARKERS if marker in source)
        self._special = looked_for(self.sources, self.markers)
        self._ends = find_ends(self)
        self.close_id = self._ends.close
        stops = [self.close_id, *eos, tokenizer.eos_token_id, *self._ends.openers]
        self.stop_token_ids = list(dict.fromkeys(id_ for id_ in stops if id_ is not None))
        self._look()
        self.shows_reasoning = self.knows_reasoning
        """The template shows reasoning; `knows_reasoning` may say more, where replies have it anyway."""
        if not self._ends.tokens:
            log.warning("no_bridge", format=self.name, why="the template writes no added token after a reply")

    def text(self, views: Sequence[View], tools: list[View] | None) -> str:
        """See `ChatFormat.text`."""
        return self._template.text(views, tools)

    def render_views(self, views: Sequence[View], tools: list[View] | None) -> list[int]:
        """See `ChatFormat.render`."""
        return self.fast.encode(self._template.text(views, tools))

    def extension(self, reply: View, new: Sequence[View], tools: list[View] | None) -> Extension | None:
        """See `ChatFormat.extension`: O(new), one pass of the template and one of the tokenizer."""
        if not self._ends.tokens:
            raise RenderError("the template writes no added token after a reply")
        stand_in, end = stand_in_for(reply)
        written = self._template.text([_ASKED, stand_in, *new], tools)
        after = written.find(end)
        ends = {*self._ends.tokens, *self.stops}
        found = [at for token in ends if (at := written.find(token, after + len(end))) >= 0]
        if after < 0 or not found:
            return None
        ids = self.fast.encode(written[min(found) :])
        if not ids or self.decode(ids[:1]) not in ends:
            return None
        return Extension([], ids) if self.close_id is None else Extension(ids[:1], ids[1:])


class Ends(NamedTuple):
    """How a template ends replies."""

    close: int | None
    """The added token that ends every reply."""
    openers: list[int]
    """Where replies have no end: the added tokens that begin what follows one. The model samples them to end its reply."""
    tokens: list[str]
    """The added tokens that were found behind a reply, as text."""


def find_ends(form: ChatFormat) -> Ends:
    """How a format ends replies, by probes."""
    asked, reply = probe(USER, 1, str), probe(ASSISTANT, _STAND_IN, str)
    found: dict[str, None] = {}
    rests: list[str] = []
    for new in ([], [asked], [probe(TOOL, 1, str)], [probe(SYSTEM, 1, str)]):
        try:
            _, _, rest = form.text([_ASKED, reply, *new], None).partition(mark(_STAND_IN))
        except RenderError:
            continue
        rests.append(rest)
        if rest := rest.lstrip():
            found[max((token for token in form.fast.added if rest.startswith(token)), key=len, default="")] = None
    tokens = [token for token in found if token]
    if len(found) == 1 and tokens:
        return Ends(form.fast.added[tokens[0]], [], tokens)
    endless = rests[:1] == [form.text([asked], None).partition(mark(1))[2]]
    return Ends(None, [form.fast.added[token] for token in tokens] if endless else [], tokens)


_PLAIN_STAND_IN: View = {"role": "assistant", "content": mark(_STAND_IN)}


def stand_in_for(reply: View) -> tuple[View, str]:
    """A reply that calls the same tools by the same ids, and the mark that it ends with."""
    calls = reply.get("tool_calls")
    if not calls:
        return _PLAIN_STAND_IN, mark(_STAND_IN)
    marked = [probe_call(_STAND_IN, number, call["function"]["name"], call["id"]) for number, call in enumerate(calls)]
    return {**_PLAIN_STAND_IN, "tool_calls": marked}, marked[-1]["function"]["arguments"]["x"]


def _parted(view: View) -> View:
    content = view["content"]
    return {**view, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else view


def _advice(views: Sequence[View]) -> str:
    if any(view["role"] == "tool" for view in views):
        return ". If it knows no tool messages, set model.tool_role: user"
    return ""
