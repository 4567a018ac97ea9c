"""Any chat template: what `apply_chat_template` writes, without its overhead and without a tokenizer (`JinjaSource`);
and with one, a chat format whose bridges are checked by prefix, at token level (`JinjaTemplate`).

A bridge is what the template itself writes after a stand-in reply for the actual new messages, cut at the added token
that ends replies, or at the one that begins the next message where replies have no end of their own. It is used only
once `check.check_bridge` has found, for messages of these kinds, that the template writes exactly that after the real
conversation, and that it shows the conversation as before.

A template that writes no added token after a reply has no bridge (a merge of the tokenizer could cross the cut). Every
turn then begins a branch, which is as exact and costs O(conversation).

A quoted text (tokenizer.py) has marks in the tokens that it spells, so `content.endswith("/nothink")` would be false of
a text that ends in `/nothink` where that is an added token. A template that is given quoted texts works out tests,
lengths and cuts on the text before quoting, and keeps the marks in what it writes (`compile_quoted`). A text in which a
replacement forms a token is quoted, too.

Invariant: no token that a quoted text spells is written without its mark. What is not seen through here (a filter that
counts characters, say) is done to the quoted text; `JinjaSource.text` finds that the result differs, and refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import structlog
from jinja2 import Template, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import RenderError
from engine.schemas.model import ModelSpec
from engine.tokens.bridge.keys import TemplateKeys, looks, read_template
from engine.tokens.bridge.kinds import ASSISTANT, SYSTEM, TOOL, USER, View, mark, probe, probe_call
from engine.tokens.bridge.wrapper import Bridge
from engine.tokens.jinja import FORMATS, compile_template, make_environment
from engine.tokens.template import ChatTemplate
from engine.tokens.tokenizer import MARK, FastTokenizer, Quoting, texts_in, unquote, with_texts

log = structlog.get_logger(__name__)

_QUESTION: View = {"role": "user", "content": "Q"}
_STAND_IN = 0
"""Index of the stand-in's mark."""
_UNITS = re.compile(f"{MARK}{MARK}|[^{MARK}]{MARK}?|{MARK}", re.DOTALL)
"""A character of the text before quoting, with the mark that follows it."""
_TESTS = ("equalto", "eq", "==", "ne", "!=", "in", "gt", "lt", "ge", "le", "greaterthan", "lessthan", "divisibleby")
_LISTS = ("split", "rsplit", "partition", "rpartition", "splitlines")
_TOLD = (
    "startswith",
    "endswith",
    "find",
    "rfind",
    "index",
    "rindex",
    "count",
    "isdigit",
    "isupper",
    "islower",
    "isalpha",
    "isalnum",
    "isspace",
    "isnumeric",
    "isdecimal",
    "istitle",
)


def _marked(value: Any) -> bool:
    return isinstance(value, str) and MARK in value


def plain(value: Any) -> Any:
    """A text before quoting; anything else as it is."""
    return unquote(value) if isinstance(value, str) else value


def _units(text: str) -> list[str]:
    return [unit for unit in _UNITS.findall(text) if unit != MARK]


def cut(value: Any, *ends: int | None) -> Any:
    """`value[start:stop:step]`"""
    return "".join(_units(value)[slice(*ends)]) if _marked(value) else value[slice(*ends)]


def truncate(
    value: Any, length: int = 255, killwords: bool = False, end: str = "...", leeway: int | None = None
) -> Any:
    """The filter `truncate`; jinja2 looks for a leeway of 5 in its environment's policies."""
    text, leeway = plain(value), 5 if leeway is None else leeway
    if len(text) <= length + leeway:
        return value
    shown = text[: length - len(end)]
    return cut(value, None, len(shown if killwords else shown.rsplit(" ", 1)[0])) + end


def characters(value: Any) -> Any:
    """What a loop goes through: characters with their marks."""
    return _units(value) if _marked(value) else value


def _pieces(quoted: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """What a method that takes a text apart gives for the text before quoting, with the marks."""
    text, units = unquote(quoted), _units(quoted)
    marked, at = [], 0
    pieces = getattr(text, name)(*map(plain, args), **kwargs)
    for piece in pieces:
        at = text.index(piece, at)
        marked.append("".join(units[at : at + len(piece)]))
        at += len(piece)
    return type(pieces)(marked)


def _trimmed(quoted: str, name: str, *args: Any) -> str:
    """What a method that trims a text gives for the text before quoting, with the marks."""
    text, units = unquote(quoted), _units(quoted)
    trimmed = getattr(text, name)(*map(plain, args))
    start = 0
    if name == "strip":  # what is before begins with none of its characters
        start = text.index(trimmed)
    elif name in ("lstrip", "removeprefix"):
        start = len(text) - len(trimmed)
    return "".join(units[start : start + len(trimmed)])


def _replaced(quoting: Quoting, quoted: str, old: str, new: str, count: int = -1) -> str:
    """`replace`. Added tokens that the replacement forms are quoted."""
    pieces = _pieces(quoted, "split", old, count) if plain(old) else [quoted]
    return quoting.quote_new(new.join(pieces), quoted)


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _see_through(tree: nodes.Template) -> None:
    """Wrap what a template looks at."""
    for node in list(tree.find_all(nodes.Node)):
        match node:
            case nodes.Compare():
                node.expr = _filtered(node.expr, "plain")
                for operand in node.ops:
                    operand.expr = _filtered(operand.expr, "plain")
            case nodes.Test() if node.name in _TESTS:
                node.node = _filtered(node.node, "plain")
            case nodes.Filter(node=nodes.Expr() as text, name="length" | "count" | "wordcount" | "int" | "float"):
                node.node = _filtered(text, "plain")
            case nodes.Filter(node=nodes.Expr() as text, name="list" | "first" | "last"):
                node.node = _filtered(text, "characters")
            case nodes.Getitem(arg=nodes.Slice() as part):  # slices do not go through the environment
                ends = [nodes.Const(None) if end is None else end for end in (part.start, part.stop, part.step)]
                node.node, node.arg = _filtered(node.node, "cut", *ends), nodes.Slice(None, None, None)
            case nodes.For():
                node.iter = _filtered(node.iter, "characters")


@lru_cache(maxsize=64)
def compile_quoted(source: str, quoting: Quoting) -> Template:
    """A chat template for quoted texts, ready to be rendered.

    Args:
        source: Its source, which is valid.
        quoting: The quoting of its tokenizer.
    """
    base = make_environment()

    class SeenThrough(type(base)):  # type: ignore[misc]
        """The environment of chat templates, in which methods of quoted texts see through the marks."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            """`obj.attribute`"""
            if (
                not isinstance(obj, str)
                or not (MARK in obj or attribute == "replace")
                or attribute.startswith("_")
                or attribute in FORMATS
                or not hasattr(str, attribute)
            ):
                return super().getattr(obj, attribute)
            if attribute in _TOLD:
                return getattr(unquote(obj), attribute)
            if attribute in _LISTS:
                return partial(_pieces, obj, attribute)
            if attribute in ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"):
                return partial(_trimmed, obj, attribute)
            return partial(_replaced, quoting, obj) if attribute == "replace" else getattr(obj, attribute)

        def getitem(self, obj: Any, argument: Any) -> Any:
            """`obj[argument]`"""
            if _marked(obj) and isinstance(argument, int):
                units = _units(obj)
                return (
                    units[argument] if -len(units) <= argument < len(units) else self.undefined(obj=obj, name=argument)
                )
            return super().getitem(obj, argument)

    environment: ImmutableSandboxedEnvironment = SeenThrough(
        trim_blocks=True, lstrip_blocks=True, extensions=list(base.extensions)
    )
    environment.filters.update(base.filters)
    environment.globals.update(base.globals)
    changes: dict[str, Callable[..., Any]] = {
        "plain": plain,
        "characters": characters,
        "cut": cut,
        "trim": lambda value, chars=None: environment.getattr(value if isinstance(value, str) else str(value), "strip")(
            chars
        ),
        "truncate": truncate,
        "replace": lambda value, *args: _replaced(quoting, value if isinstance(value, str) else str(value), *args),
    }
    environment.filters.update(changes)
    tree = environment.parse(source)
    _see_through(tree)
    tree.set_environment(environment)
    return environment.from_string(tree)


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
        try:
            self._compiled = [compile_template(text) for text in self.sources]
        except Exception as error:
            raise RenderError(f"the chat template is not valid Jinja: {error or type(error).__name__}") from error
        self._in_parts = False
        """Contents must be lists of parts: templates of vision-language models may iterate over them."""
        self.quoting: Quoting | None = None
        """How texts are quoted that spell tokens, which are tested and cut as they were before quoting; None where the
        tokenizer is not known."""
        self.reasoning_key = "reasoning_content"
        """What the template calls a reply's reasoning."""
        question: list[View] = [{"role": "user", "content": mark(0)}]
        if not self._shows(question):
            self._in_parts = True  # unless it writes the list as Python does
            self._in_parts = self._shows(question) and "'text'" not in self.text(question, None)
        reply = {"role": "assistant", "content": "", "reasoning_content": mark(0)}
        caller = [_QUESTION, {**reply, "tool_calls": [probe_call(1, 0)]}, probe(TOOL, 1, str)]
        for key in ("reasoning_content", "thinking", "reasoning"):
            self.reasoning_key = key
            if self._shows([_QUESTION, {**reply, "content": "A"}]) or self._shows(caller):
                break
        else:
            self.reasoning_key = "reasoning_content"

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

    def text(self, views: Sequence[View], tools: list[View] | None) -> str:
        """What the template writes, generation prompt included.

        Raises:
            RenderError: The template refuses these messages.
        """
        if self._in_parts:
            views = [
                {**view, "content": [{"type": "text", "text": view["content"]}]}
                if isinstance(view["content"], str)
                else view
                for view in views
            ]
        if self.reasoning_key != "reasoning_content":
            views = [
                {**view, self.reasoning_key: view["reasoning_content"]} if "reasoning_content" in view else view
                for view in views
            ]
        written = self._render(self._compiled[-1 if tools else 0], views, tools)
        if self.quoting is not None and (MARK in written or self.keys.reads):
            written = self._seen_through(views, tools, written)
        if _ESCAPED_MARK in written:
            raise RenderError(
                "text in the conversation spells a special token, and the chat template escapes it (\\ufdd0), so that "
                "it cannot be encoded as plain text; set `model.allow_special: true` if such text may become special "
                "tokens"
            )
        return written

    def _render(self, template: Template, views: Sequence[View], tools: list[View] | None) -> str:
        try:
            return template.render(
                messages=views, tools=tools, documents=None, add_generation_prompt=True, **self._variables
            )
        except Exception as error:
            advice = ""
            if any(view["role"] == "tool" for view in views):
                advice = ". If it knows no tool messages, set model.tool_role: user"
            if any(view["role"] == "system" for view in views[1:]):
                advice += (
                    ". If it wants no system message after the first message, set model.hidden_roles: [system] to "
                    "leave them out"
                )
            raise RenderError(f"the chat template refuses these messages: {str(error).rstrip('.')}{advice}") from error

    def _seen_through(self, views: Sequence[View], tools: list[View] | None, written: str) -> str:
        """What the template writes when it tests and cuts texts as they were before quoting, quoted as `written` is.

        The model's own replies stay quoted for its tests: text that only spells a marker of reasoning does not end
        reasoning.

        Raises:
            RenderError: The template does to texts what cannot be done to quoted ones.
        """
        assert self.quoting is not None
        marked = any(MARK in text for view in views if view["role"] != "assistant" for text in texts_in(view))
        if not marked and not self.keys.replaces:
            return written
        source = self.sources[-1 if tools else 0]
        used = set("".join(texts_in(views)))
        hidden = next((chr(code) for code in range(0xFDD1, 0xFDF0) if chr(code) not in used), "")
        quoted = [
            with_texts(view, lambda text: text.replace(MARK, hidden)) if view["role"] == "assistant" else view
            for view in views
        ]
        shown = self._render(compile_quoted(source, self.quoting), quoted, tools)
        wanted = written
        if marked:
            plain = [view if view["role"] == "assistant" else with_texts(view, unquote) for view in quoted]
            wanted = self._render(self._compiled[-1 if tools else 0], plain, tools)
        if unquote(shown).replace(hidden, MARK) != (wanted.replace(hidden, MARK) if marked else unquote(written)):
            raise RenderError(
                "text in the conversation spells a special token, and the chat template cuts or tests this text in a "
                "way that quoted text does not allow; set `model.allow_special: true` if such text may become special "
                "tokens"
            )
        return shown.replace(hidden, MARK)

    def _shows(self, views: list[View]) -> bool:
        try:
            return mark(0) in self.text(views, None)
        except RenderError:
            return False


class JinjaTemplate(ChatTemplate):
    """The generic format: the tokenizer's own chat template, or the spec's.

    Args:
        tokenizer: The tokenizer.
        source: The chat template.
        spec: The spec's `model`.
        vocab_size: One past the largest id of the model.
        context: The largest number of tokens that the model attends to; None where nothing says so.
        eos: Ids that end a reply, besides those that the template shows.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        source: JinjaSource,
        spec: ModelSpec,
        *,
        vocab_size: int,
        context: int | None,
        eos: Sequence[int] = (),
    ) -> None:
        super().__init__("template", tokenizer, spec, vocab_size=vocab_size, context=context)
        self.source = source
        """What writes conversations as the template does, without the tokenizer."""
        source.quoting = tokenizer.quoting
        self.looked, self.inspected, self.sought = looks(source.keys, "".join(source.sources))
        self.bridges.keys, self.bridges.whole = source.keys, next(iter(source.keys.whole_because), None)
        self.close_id, openers, self._ends = find_ends(self)
        stops = [self.close_id, *eos, tokenizer.eos_token_id, *openers]
        self.stop_token_ids = list(dict.fromkeys(id_ for id_ in stops if id_ is not None))
        self._find_abilities()
        self.shows_reasoning = self.knows_reasoning
        """The template shows reasoning. `knows_reasoning` is also true where only replies have it."""
        if not self._ends:
            log.warning("no_bridge", format=self.name, why="the template writes no added token after a reply")

    def text(self, views: Sequence[View], tools: list[View] | None) -> str:
        """See `ChatTemplate.text`."""
        return self.source.text(views, tools)

    def unchecked_bridge(self, reply: View, new: Sequence[View], tools: list[View] | None) -> Bridge | None:
        """See `ChatTemplate.unchecked_bridge`: O(new), one pass of the template and one of the tokenizer.

        Raises:
            RenderError: the template writes no added token after a reply.
        """
        if not self._ends:
            raise RenderError("the template writes no added token after a reply")
        stand_in, end = stand_in_for(reply)
        written = self.source.text([_QUESTION, stand_in, *new], tools)
        after = written.find(end)
        ends = {*self._ends, *self.stops}
        starts = [at for token in ends if (at := written.find(token, after + len(end))) >= 0]
        if after < 0 or not starts:
            return None
        ids = self.fast.encode(written[min(starts) :])
        if not ids or self.decode(ids[:1]) not in ends:
            return None
        return Bridge([], ids) if self.close_id is None else Bridge(ids[:1], ids[1:])


def find_ends(template: ChatTemplate) -> tuple[int | None, list[int], list[str]]:
    """How a format ends replies, found by rendering probes.

    Returns:
        The added token that ends every reply. Where there is none, the added tokens that begin what follows, which the
        model samples to end its reply. And the added tokens that were found after a reply, as text.

    Raises:
        RenderError: The template refuses a conversation that a user begins.
    """
    asked, reply = probe(USER, 1, str), probe(ASSISTANT, _STAND_IN, str)
    after_replies: dict[str, None] = {}
    rests: list[str] = []
    for new in ([], [asked], [probe(TOOL, 1, str)], [probe(SYSTEM, 1, str)]):
        try:
            _, _, rest = template.text([_QUESTION, reply, *new], None).partition(mark(_STAND_IN))
        except RenderError:
            continue
        rests.append(rest)
        if rest := rest.lstrip():
            after_replies[
                max((token for token in template.fast.added if rest.startswith(token)), key=len, default="")
            ] = None
    tokens = [token for token in after_replies if token]
    if len(after_replies) == 1 and tokens:
        return template.fast.added[tokens[0]], [], tokens
    endless = rests[:1] == [template.text([asked], None).partition(mark(1))[2]]
    return None, [template.fast.added[token] for token in tokens] if endless else [], tokens


def stand_in_for(reply: View) -> tuple[View, str]:
    """A reply that calls the same tools by the same ids, and the mark that it ends with."""
    stand_in: View = {"role": "assistant", "content": mark(_STAND_IN)}
    calls = reply.get("tool_calls")
    if not calls:
        return stand_in, mark(_STAND_IN)
    marked = [probe_call(_STAND_IN, number, call["function"]["name"], call["id"]) for number, call in enumerate(calls)]
    return {**stand_in, "tool_calls": marked}, marked[-1]["function"]["arguments"]["x"]
