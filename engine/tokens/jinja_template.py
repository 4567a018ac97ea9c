"""Any chat template: a bridge that is checked by prefix, at token level.

Invariant: a bridge is what the template itself writes after a stand-in reply for the actual new messages, cut at the
added token that ends replies, or at the one that begins the next message where replies have no end of their own. It is
used only once `check.check_bridge` has found, for messages of these kinds, that the template writes exactly that after
the real conversation, and that it shows the conversation as before.

A template that writes no added token after a reply has no bridge (a merge of the tokenizer could cross the cut). Every
turn then begins a branch, which is as exact and costs O(conversation).
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from engine.errors import RenderError
from engine.schemas.model import ModelSpec
from engine.tokens.bridge.keys import looks
from engine.tokens.bridge.kinds import ASSISTANT, SYSTEM, TOOL, USER, View, mark, probe, probe_call
from engine.tokens.bridge.wrapper import Bridge
from engine.tokens.jinja_source import JinjaSource
from engine.tokens.template import ChatTemplate
from engine.tokens.tokenizer import FastTokenizer

log = structlog.get_logger(__name__)

_QUESTION: View = {"role": "user", "content": "Q"}
_STAND_IN = 0
"""Index of the stand-in's mark."""


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
        self.bridges.follow(source.keys)
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
