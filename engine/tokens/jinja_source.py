"""A chat template, compiled once: what `apply_chat_template` writes, without its overhead and without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import Template

from engine.errors import RenderError
from engine.tokens.bridge.keys import TemplateKeys, read_template
from engine.tokens.bridge.kinds import TOOL, View, mark, probe, probe_call
from engine.tokens.jinja import compile_template
from engine.tokens.quoted_jinja import compile_quoted
from engine.tokens.tokenizer import MARK, Quoting, unquote

_QUESTION: View = {"role": "user", "content": "Q"}
_ESCAPED_MARK = ascii(MARK)[1:-1]


class JinjaSource:
    """Writes conversations as one chat template does.

    Args:
        source: The template, in Jinja.
        variables: What it is rendered with besides messages and tools: named special tokens, `template_kwargs`.
        tools_source: The template for conversations with tools, where the tokenizer has another one for them.

    Raises:
        RenderError: The source is not valid Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], tools_source: str | None = None) -> None:
        self.sources = list(dict.fromkeys([source, tools_source or source]))
        """Its Jinja source: one, or a second one for conversations with tools."""
        self._variables = dict(variables)
        self._compiled = [_compile(text) for text in self.sources]
        self._in_parts = False
        self.quoting: Quoting | None = None
        """How texts are quoted that spell tokens; None where the tokenizer is not known."""
        self._reads = False
        self.reasoning_key = "reasoning_content"
        """What the template calls a reply's reasoning."""
        self._in_parts = self._wants_parts()
        self.reasoning_key = self._find_reasoning_key()

    @property
    def facts(self) -> dict[str, Any]:
        """What another process needs to render conversations as this template does; JSON values."""
        return {
            "sources": self.sources,
            "variables": self._variables,
            "in_parts": self._in_parts,
            "reasoning_key": self.reasoning_key,
        }

    @cached_property
    def keys(self) -> TemplateKeys:
        """What it tests and changes of a conversation."""
        return read_template(self.sources, self._variables, self._in_parts)

    def see_through(self, quoting: Quoting) -> None:
        """Test and cut quoted texts as they were before quoting."""
        self.quoting, self._reads = quoting, self.keys.reads

    def text(self, views: Sequence[View], tools: list[View] | None) -> str:
        """What the template writes, generation prompt included.

        Raises:
            RenderError: The template refuses these messages.
        """
        if self._in_parts:
            views = [_in_parts(view) for view in views]
        if self.reasoning_key != "reasoning_content":
            views = [
                {**view, self.reasoning_key: view["reasoning_content"]} if "reasoning_content" in view else view
                for view in views
            ]
        written = self._render(self._compiled[-1 if tools else 0], views, tools)
        if self.quoting is not None and (MARK in written or self._reads):
            written = self._seen_through(views, tools, written)
        if _ESCAPED_MARK in written:
            raise RenderError(
                "text in the conversation spells a special token, and the chat template escapes it (\\ufdd0), so that it cannot be "
                "encoded as plain text; set `model.allow_special: true` if such text may become special tokens"
            )
        return written

    def _render(self, template: Template, views: Sequence[View], tools: list[View] | None) -> str:
        try:
            return template.render(
                messages=views, tools=tools, documents=None, add_generation_prompt=True, **self._variables
            )
        except Exception as error:
            raise RenderError(
                f"the chat template refuses these messages: {str(error).rstrip('.')}{_advice(views)}"
            ) from error

    def _seen_through(self, views: Sequence[View], tools: list[View] | None, written: str) -> str:
        """What the template writes when it tests and cuts texts as they were before quoting, quoted as `written` is.

        The model's own replies stay quoted for its tests: text that only spells a marker of reasoning does not end reasoning.

        Raises:
            RenderError: The template does to texts what cannot be done to quoted ones.
        """
        assert self.quoting is not None
        marked = any(view["role"] != "assistant" and _has_mark(view) for view in views)
        if not marked and not self.keys.replaces:
            return written
        source = self.sources[-1 if tools else 0]
        hidden = next((chr(code) for code in range(0xFDD1, 0xFDF0) if not _has_mark(views, chr(code))), "")
        quoted = [_replaced(view, MARK, hidden) if view["role"] == "assistant" else view for view in views]
        shown = self._render(compile_quoted(source, self.quoting), quoted, tools)
        wanted = written
        if marked:
            plain = [view if view["role"] == "assistant" else _replaced(view) for view in quoted]
            wanted = self._render(self._compiled[-1 if tools else 0], plain, tools)
        if unquote(shown).replace(hidden, MARK) != (wanted.replace(hidden, MARK) if marked else unquote(written)):
            raise RenderError(
                "text in the conversation spells a special token, and the chat template cuts or tests this text in a way that quoted "
                "text does not allow; set `model.allow_special: true` if such text may become special tokens"
            )
        return shown.replace(hidden, MARK)

    def _wants_parts(self) -> bool:
        """Whether contents must be lists of parts: templates of vision-language models may iterate over them."""
        question: list[View] = [{"role": "user", "content": mark(0)}]
        shown = [self._shows(question)]
        self._in_parts = True
        shown.append(self._shows(question))
        return shown == [False, True] and "'text'" not in self.text(question, None)  # a list, written as Python does

    def _find_reasoning_key(self) -> str:
        for key in ("reasoning_content", "thinking", "reasoning"):
            self.reasoning_key = key
            reply = {"role": "assistant", "content": "", "reasoning_content": mark(0)}
            caller = {**reply, "tool_calls": [probe_call(1, 0)]}
            if self._shows([_QUESTION, {**reply, "content": "A"}]) or self._shows(
                [_QUESTION, caller, probe(TOOL, 1, str)]
            ):
                return key
        return "reasoning_content"

    def _shows(self, views: list[View]) -> bool:
        try:
            return mark(0) in self.text(views, None)
        except RenderError:
            return False


def _compile(source: str) -> Template:
    try:
        return compile_template(source)
    except Exception as error:
        raise RenderError(f"the chat template is not valid Jinja: {error or type(error).__name__}") from error


def _in_parts(view: View) -> View:
    content = view["content"]
    return {**view, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else view


def _has_mark(value: Any, mark: str = MARK) -> bool:
    """Whether a text, or JSON of texts, contains a character."""
    if isinstance(value, str):
        return mark in value
    if isinstance(value, dict):
        return any(_has_mark(item, mark) for item in value.values())
    return isinstance(value, list | tuple) and any(_has_mark(item, mark) for item in value)


def _replaced(value: Any, mark: str = "", by: str = "") -> Any:
    """A text, or JSON of texts, with one character in place of another; before quoting, without these."""
    if isinstance(value, str):
        return value.replace(mark, by) if mark else unquote(value)
    if isinstance(value, dict):
        return {_replaced(key, mark, by): _replaced(item, mark, by) for key, item in value.items()}
    return [_replaced(item, mark, by) for item in value] if isinstance(value, list) else value


def _advice(views: Sequence[View]) -> str:
    advice = ""
    if any(view["role"] == "tool" for view in views):
        advice = ". If it knows no tool messages, set model.tool_role: user"
    if any(view["role"] == "system" for view in views[1:]):
        advice += ". If it wants no system message after the first message, set model.hidden_roles: [system] to leave them out"
    return advice
