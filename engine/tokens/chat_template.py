"""A chat template, compiled once: what `apply_chat_template` writes, without its overhead and without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import RenderError
from engine.tokens.literal import MARK
from engine.tokens.proof import TOOL, View, mark, probe, probe_call

_QUESTION: View = {"role": "user", "content": "Q"}
_ESCAPED_MARK = ascii(MARK)[1:-1]


class ChatTemplate:
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
        template = self._compiled[-1 if tools else 0]
        try:
            written: str = template.render(
                messages=views, tools=tools, documents=None, add_generation_prompt=True, **self._variables
            )
        except Exception as error:
            raise RenderError(
                f"the chat template refuses these messages: {str(error).rstrip('.')}{_advice(views)}"
            ) from error
        if _ESCAPED_MARK in written:
            raise RenderError(
                "text in the conversation spells a special token, and the chat template escapes it (\\ufdd0), so that it cannot be "
                "encoded as plain text; set `model.allow_special: true` if such text may become special tokens"
            )
        return written

    def _wants_parts(self) -> bool:
        """Whether contents must be lists of parts: templates of vision-language models may iterate over them."""
        question: list[View] = [{"role": "user", "content": mark(0)}]
        shown = [self._shows(question)]
        self._in_parts = True
        shown.append(self._shows(question))
        return shown == [False, True]

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


def _compile(source: str) -> Any:
    from engine.fast.jinja import compile_template

    try:
        return compile_template(source)
    except Exception as error:
        raise RenderError(f"the chat template is not valid Jinja: {error or type(error).__name__}") from error


def _in_parts(view: View) -> View:
    content = view["content"]
    return {**view, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else view


def _advice(views: Sequence[View]) -> str:
    advice = ""
    if any(view["role"] == "tool" for view in views):
        advice = ". If it knows no tool messages, set model.tool_role: user"
    if any(view["role"] == "system" for view in views[1:]):
        advice += ". If it wants no system message after the first message, set model.hidden_roles: [system] to leave them out"
    return advice
