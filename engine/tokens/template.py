"""Any chat template: a bridge that is proved by prefix, at token level.

Invariant: a bridge is made of what the template itself writes after a stand-in reply for the actual new messages,
cut at the added token that ends replies. It is used only once `proof.prove` has found, for messages of these kinds,
that the template writes exactly that after the real conversation, and that it shows the conversation as before.

A template that ends replies with no added token has no bridge (a merge could cross the cut): every turn then begins
a branch, which is as exact and costs O(conversation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import RenderError
from engine.tokens.format import ChatFormat, log
from engine.tokens.proof import ASSISTANT, USER, Extension, View, mark, probe, probe_call
from engine.tokens.tokenizer import FastTokenizer
from engine.tokens.toolcalls import call_parser
from schemas.episode import ModelSpec

_ASKED: View = {"role": "user", "content": "Q"}
_STAND_IN = 0
"""Index of the stand-in's mark."""


class ChatTemplate:
    """A tokenizer's chat template, compiled once: what `apply_chat_template` writes, without its overhead."""

    def __init__(self, tokenizer: FastTokenizer, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer.full
        self._kwargs = {**tokenizer.full.special_tokens_map, **kwargs}
        self._compiled: dict[bool, Any] = {}
        self._in_parts = False
        self._in_parts = self._wants_parts()

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
        try:
            written: str = self._for(bool(tools)).render(
                messages=views, tools=tools, documents=None, add_generation_prompt=True, **self._kwargs
            )
        except Exception as error:
            raise RenderError(f"the chat template refuses these messages: {error}{_advice(views)}") from error
        return written

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
        base: Path,
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
        self.close, self.close_id = self._find_close()
        ends = [self.close_id, *eos, tokenizer.eos_token_id]
        self.stop_token_ids = list(dict.fromkeys(id_ for id_ in ends if id_ is not None))
        self._look()
        self._choose_parser(spec, base)
        if self.close_id is None:
            log.warning("no_bridge", format=self.name, why="the template ends replies with no added token")

    def _choose_parser(self, spec: ModelSpec, base: Path) -> None:
        wanted = spec.tool_calls
        if wanted == "auto":
            wanted = "hermes" if self.knows_tools else "plain"
        self.parser = call_parser(wanted, base)
        if not self._writes_calls_as(self.parser):
            self.calls_shown = 0

    def render_views(self, views: Sequence[View], tools: list[View] | None) -> list[int]:
        """See `ChatFormat.render`."""
        return self.fast.encode(self._template.text(views, tools))

    def _find_close(self) -> tuple[str, int | None]:
        """The added token that the template writes after a reply, whatever follows it."""
        reply = probe(ASSISTANT, _STAND_IN, str)
        found: set[str] = set()
        for new in ([], [probe(USER, 1, str)]):
            try:
                _, _, rest = self._template.text([_ASKED, reply, *new], None).partition(mark(_STAND_IN))
            except RenderError:
                continue
            rest = rest.lstrip()
            found.add(max((token for token in self.fast.added if rest.startswith(token)), key=len, default=""))
        close = found.pop() if len(found) == 1 else ""
        return close, self.fast.added.get(close)

    def extension(
        self, reply: View, new: Sequence[View], tools: list[View] | None, last: int | None
    ) -> Extension | None:
        """See `ChatFormat.extension`: O(new), one pass of the template and one of the tokenizer."""
        if self.close_id is None:
            raise RenderError("the template has no token that ends a reply")
        stand_in, end = _stand_in(reply)
        written = self._template.text([_ASKED, stand_in, *new], tools)
        at = written.find(end)
        at = written.find(self.close, at + len(end)) if at >= 0 else -1
        if at < 0:
            return None
        ids = self.fast.encode(written[at:])
        if not ids or ids[0] != self.close_id:
            return None
        return Extension([] if last == self.close_id else ids[:1], ids[1:])


_PLAIN_STAND_IN: View = {"role": "assistant", "content": mark(_STAND_IN)}


def _stand_in(reply: View) -> tuple[View, str]:
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
