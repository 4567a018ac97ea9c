"""Random conversations of several threads, played beside twins that reach the same state in a simpler way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from conversation_kit import TOOLS, to_the_end
from hypothesis import strategies as st

from engine.errors import BackendError, RenderError
from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.message import Message
from engine.schemas.trajectory import Branch
from engine.tokens.conversation import Conversation
from engine.tokens.template import ChatTemplate

OTHER_TOOLS: list[dict[str, Any]] = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": "estimate"}}]
SUMMARY = Message(role="user", content="What was said before, in short.")
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1 + 1"}}\n</tool_call>'


# --- plans -----------------------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    """A reply."""

    said: list[int] | str
    """Numbers that ids are made from; or the text."""
    stopped: bool
    """A token that ends replies is sampled after it."""
    in_text: bool
    """The backend gives text and no ids."""
    checked: bool
    """`check` is called before `reply`."""


class Turn(NamedTuple):
    """A prompt and its reply."""

    reply: Planned
    tries: int
    """So many prompts are taken back before."""
    changed: list[Message]
    """Messages that come between the prompt and its reply, after which it is asked anew."""
    refused: bool
    """What no waiting prompt allows is tried in vain."""


class Say(NamedTuple):
    """New messages."""

    messages: list[Message]
    waiting: bool
    """A prompt waits meanwhile, is asked for anew with them, and is taken back."""


class Resume(NamedTuple):
    """Go on after an earlier reply."""

    back: int
    """How many replies after it."""
    messages: list[Message]
    again: bool
    """Another reply to messages that followed it before, where some did."""
    other_tools: bool


class Begin(NamedTuple):
    """Begin another thread."""

    messages: list[Message]


class Show(NamedTuple):
    """Show the model another thread."""

    left_out: set[int]
    """Places of messages that are no longer shown."""
    summary: bool
    """A message stands for them."""


Step = Turn | Say | Resume | Begin | Show


def plans(roles: Sequence[str], texts: st.SearchStrategy[str], said: st.SearchStrategy[Any], *, exact: bool) -> Any:
    """Steps of random conversations.

    Args:
        roles: The roles of messages that are not sampled.
        texts: Their texts.
        said: What replies say, as `Planned.said`.
        exact: Each reply ends with its token, and is of a backend that gives ids.
    """
    new = st.lists(st.builds(lambda role, text: Message(role=role, content=text), st.sampled_from(roles), texts), min_size=1, max_size=2)  # fmt: skip
    injected = new | st.builds(
        lambda reply, after: [Message(role="assistant", content=reply), *after], st.sampled_from(["42.", "So."]), new
    )
    flag, rare = st.booleans(), st.sampled_from([False, False, False, True])
    reply = st.builds(Planned, said, st.just(True) if exact else flag, st.just(False) if exact else rare, flag)
    turn = st.builds(Turn, reply, st.integers(0, 2), st.just([]) if exact else st.just([]) | st.just([]) | new, rare)
    step = st.one_of(
        turn,
        st.builds(Say, new, flag),
        st.builds(Resume, st.integers(0, 4), new if exact else injected, flag, rare),
        st.builds(Begin, new if exact else injected),
        st.builds(Show, st.sets(st.integers(0, 5), max_size=4), flag),
    )
    # Most steps need a reply before them: pairs of a turn and anything else.
    return st.lists(st.tuples(turn, step), min_size=1, max_size=6).map(lambda pairs: [one for pair in pairs for one in pair])  # fmt: skip


# --- one conversation ------------------------------------------------------------------------------------------------


class Refused(NamedTuple):
    """A prompt that cannot be made."""

    why: str


class Told:
    """A conversation, and beside it the messages that it should have and show.

    Args:
        form: The chat format.
        history: What to do where the template rewrites history.
        tools: The tools.
        messages: The prompt's messages.
    """

    def __init__(
        self,
        form: ChatTemplate,
        history: Literal["branch", "keep"],
        tools: list[dict[str, Any]],
        messages: list[Message],
    ) -> None:
        self.conversation = Conversation(form, tools, history)
        self.conversation.open(messages)
        self.said = [*messages]
        self.shown = [*messages]
        self.numbers: list[int | None] = list(range(len(messages)))
        """By shown message: its number in `said`; None for one that stands for others or was not sampled here."""
        self.after: dict[int, tuple[Any, list[Message], list[int | None]]] = {}
        """By turn: the state directly after its reply."""

    def say(self, messages: list[Message]) -> None:
        self.conversation.add(messages)
        for message in messages:
            self._keep(message)

    def ask(self) -> list[int] | Refused:
        """The prompt. One that cannot be made is taken back."""
        try:
            prompt = self.conversation.prompt()
        except RenderError as error:
            self.conversation.take_back()
            return Refused(str(error))
        assert not prompt.flags.writeable
        assert self.conversation.prompt().tolist() == prompt.tolist()
        return prompt.tolist()

    def answer(self, generation: Generation, turn: int, checked: bool) -> tuple[Any, ...]:
        if checked:
            self.conversation.check(generation)
        reply = self.conversation.reply(generation, turn)
        self._keep(self.conversation.messages[-1])
        self.after[turn] = self.conversation.mark(), [*self.shown], [*self.numbers]
        return self.conversation.messages[-1], reply.attempts, reply.content

    def resume(self, turn: int | None, messages: list[Message], tools: list[dict[str, Any]], again: bool) -> None:
        mark, shown, numbers = (None, [], []) if turn is None else self.after[turn]
        self.conversation.resume_at(mark, messages, tools=tools, reason="resumed", again=again)
        self.shown, self.numbers = [*shown], [*numbers]
        for message in messages:
            if again or (message.role == "assistant" and self.after):
                self.shown.append(message)
                self.numbers.append(None)
            else:
                self._keep(message)

    def foretold(self, turn: int | None, messages: list[Message], tools: list[dict[str, Any]]) -> list[int] | Refused:
        """The prompt that `resume` leads to, which it does not need."""
        mark = None if turn is None else self.after[turn][0]
        try:
            return self.conversation.after(mark, messages, tools).prompt().tolist()
        except RenderError as error:
            return Refused(str(error))

    def show(self, thread: list[int | Message]) -> int | None:
        """Show other messages: places of those shown now, or messages that stand for others.

        Returns:
            How many tokens their prompt is said to have; None where the template refuses it.
        """
        shown = [self.shown[part] if isinstance(part, int) else part for part in thread]
        numbers = [self.numbers[part] if isinstance(part, int) else None for part in thread]
        try:
            tokens = self.conversation.measure([part if isinstance(part, Message) else self.conversation.thread.messages[part] for part in thread])  # fmt: skip
        except RenderError:
            tokens = None
        parts = [message if number is None else number for number, message in zip(numbers, shown, strict=True)]
        self.conversation.show(parts, "shortened", tokens or 0)
        self.shown, self.numbers = shown, numbers
        return tokens

    def visible(self) -> dict[str, Any]:
        """All that a conversation tells of itself."""
        conversation = self.conversation
        return {
            "length": conversation.length,
            "characters": conversation.characters,
            "rows": [row.json() for row in to_the_end(conversation)],
            "turns": [*conversation.turns],
            "tools": conversation.tools,
            "messages": [*conversation.messages],
            "shown": [*conversation.thread.messages],
            "written": conversation.written,
        }

    def check_messages(self) -> None:
        assert list(self.conversation.messages) == self.said
        assert list(self.conversation.thread.messages) == self.shown

    def _keep(self, message: Message) -> None:
        self.numbers.append(len(self.said))
        self.said.append(message)
        self.shown.append(message)


# --- a conversation and its twins ------------------------------------------------------------------------------------


class Sampled(NamedTuple):
    """A reply that was sampled."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    text: list[int]
    """Ids of its text, where the backend gave text alone."""


class Past(NamedTuple):
    """How a state is reached in a conversation of its own."""

    tools: list[dict[str, Any]]
    messages: list[Message]
    steps: tuple[tuple[str, tuple[Any, ...], Any], ...]
    """(method of `Told`, arguments, result)."""
    now: list[dict[str, Any]]
    """The tools in the end."""


class Play:
    """Plays a plan on three conversations, which must never differ.

    `main` does it all. `plain` never asks for a prompt that gets no reply, and tries nothing that is refused. `alone` has only the
    steps that lead to the present state: a new one is made at each return to an earlier reply.
    """

    def __init__(self, form: ChatTemplate, history: Literal["branch", "keep"], tools: list[dict[str, Any]], opening: list[Message]) -> None:  # fmt: skip
        self.template, self.history = form, history
        self.main, self.plain, self.alone = (Told(form, history, tools, opening) for _ in range(3))
        self.past = Past(tools, opening, (), tools)
        self.pasts: dict[int, Past] = {}
        """By turn: the past of its reply."""
        self.followed: dict[int, list[Message]] = {}
        """By turn: messages that followed its reply."""
        self.sampled: list[Sampled] = []
        self.asked: list[list[int]] = []
        """The prompts that were not taken back."""
        self.specials = sorted(form.tokenizer.get_added_vocab().values())
        self._measured: int | None = None
        """How many tokens the next prompt has, where that is known."""

    def play(self, steps: Sequence[Step]) -> None:
        for step in steps:
            getattr(self, f"_{type(step).__name__.lower()}")(step)
            self.check()
        self.attempt()
        if not isinstance(self._do("ask"), Refused):  # the last prompt gets no reply
            self.check_rows()

    def check(self) -> None:
        """All that holds between two steps, when no prompt waits."""
        _same(self.main.visible(), self.plain.visible())
        for told in (self.main, self.plain, self.alone):
            told.check_messages()
        assert self.main.conversation.length == self.alone.conversation.length
        self.check_rows()

    def check_rows(self) -> None:
        """Each sampled token is in one row; rows are what was asked and sampled."""
        rows, turns = to_the_end(self.main.conversation), self.main.conversation.turns
        assert len(turns) == len(self.sampled)
        assert [row.index for row in rows] == list(range(len(rows)))
        assert [bool(row.reason) for row in rows] == [at > 0 for at in range(len(rows))]
        covered = [np.zeros(len(row.input_ids), np.int32) for row in rows]
        for turn, (sampled, place) in enumerate(zip(self.sampled, turns, strict=True)):
            branch, start, end = place.branch, place.start, place.end
            having = [row.index for row in rows if turn in row.turn_ids]
            assert having == ([branch] if sampled.ids else [])
            row = rows[branch]
            assert [(span.start, span.end) for span in row.spans if span.turn == turn] == [(start, end)]
            assert row.input_ids[:end].tolist() == [*sampled.prompt, *sampled.ids]
            assert start == len(sampled.prompt)
            assert np.flatnonzero(row.turn_ids == turn).tolist() == list(range(start, end))
            assert row.logprobs[start:end].tolist() == sampled.logprobs
            assert row.weight_versions[start:end].tolist() == sampled.versions
            covered[branch][start:end] += 1
        known = {tuple(prompt) for prompt in self.asked}
        known |= {(*one.prompt, *one.ids, *one.text) for one in self.sampled}
        for row, mask in zip(rows, covered, strict=True):
            _check_row(row, mask)
            assert tuple(row.input_ids.tolist()) in known
            assert not self.sampled or any(span.turn >= 0 for span in row.spans)

    def attempt(self) -> list[int] | Refused:
        """Ask and take back; nothing has changed."""
        before = self.main.visible()
        asked = self.main.ask()
        self.main.conversation.take_back()
        _same(self.main.visible(), before)
        return asked

    def _do(self, method: str, *arguments: Any) -> Any:
        """Do the same on all three. They answer the same."""
        main, plain, alone = (getattr(told, method)(*arguments) for told in (self.main, self.plain, self.alone))
        assert main == plain
        assert main == alone
        if method == "ask" and not isinstance(main, Refused):
            self.asked.append(main)
            assert self._measured in (None, len(main))
        if method in ("ask", "say", "answer"):
            self._measured = None
        self.past = self.past._replace(steps=(*self.past.steps, (method, arguments, main)))
        return main

    # --- steps ---

    def _turn(self, step: Turn) -> None:
        for _ in range(step.tries):
            self.attempt()
        prompt = self._do("ask")
        if step.changed:
            self._do("say", step.changed)
            prompt = self._do("ask")
        if isinstance(prompt, Refused):
            return
        if step.refused:
            self._refuse()
        turn, (generation, versions) = len(self.sampled), self._generation(step.reply)
        text = self.template.encode(generation.text) if generation.text is not None else []
        self.sampled.append(
            Sampled(prompt, generation.output_ids.tolist(), generation.logprobs.tolist(), versions, text)
        )
        self._do("answer", generation, turn, step.reply.checked and not step.reply.in_text)
        self.pasts[turn] = self.past
        assert self.main.conversation.length == len(prompt) + len(generation.output_ids) + len(text)

    def _say(self, step: Say) -> None:
        if step.waiting:
            self.main.ask()
        self._do("say", step.messages)
        if step.waiting:
            self.main.ask()
            self.main.conversation.take_back()
        if self.sampled:
            self.followed[len(self.sampled) - 1] = step.messages

    def _resume(self, step: Resume) -> None:
        if not self.sampled:
            return
        turn = max(0, len(self.sampled) - 1 - step.back)
        past, again = self.pasts[turn], step.again and turn in self.followed
        messages = self.followed[turn] if again else step.messages
        tools = OTHER_TOOLS if step.other_tools and past.now else past.now
        self._go_to(turn, messages, tools, again)
        self.past, self.alone = past, self._replayed(past)
        if tools == past.now and not any(message.role == "assistant" for message in messages):
            self.alone.say(messages)
            self.past = past._replace(steps=(*past.steps, ("say", (messages,), None)))
        else:
            self.alone.resume(turn, messages, tools, False)
            resumed = ("resume", (turn, messages, tools, False), None)
            self.past = past._replace(steps=(*past.steps, resumed), now=tools)
        self.followed.setdefault(turn, messages)

    def _begin(self, step: Begin) -> None:
        tools = self.past.now
        self._go_to(None, step.messages, tools, False)
        self.past = Past(tools, step.messages, (), tools)
        self.alone = self._replayed(self.past)

    def _go_to(self, turn: int | None, messages: list[Message], tools: list[dict[str, Any]], again: bool) -> None:
        """Go on after another reply in `main` and `plain`: the next prompt is the one that was foretold."""
        before = self.main.visible()
        foretold = self.main.foretold(turn, messages, tools)
        _same(self.main.visible(), before)
        for told in (self.main, self.plain):
            told.resume(turn, messages, tools, again)
        self._measured = None
        assert self.attempt() == foretold

    def _show(self, step: Show) -> None:
        numbers = self.main.numbers
        thread: list[int | Message] = [
            place
            for place, number in enumerate(numbers)
            if number is not None and (place not in step.left_out or place == len(numbers) - 1)
        ]
        if step.summary or not thread:
            thread = [SUMMARY, *thread]
        self._measured = self._do("show", thread)

    def _replayed(self, past: Past) -> Told:
        """A conversation with this past alone. Each step has the result that it had."""
        told = Told(self.template, self.history, past.tools, past.messages)
        for method, arguments, result in past.steps:
            assert getattr(told, method)(*arguments) == result
        return told

    def _refuse(self) -> None:
        """While a prompt waits, nothing but its reply is taken."""
        conversation = self.main.conversation
        before = self.main.visible()
        with pytest.raises(ValueError, match="directly after a reply"):
            conversation.mark()
        with pytest.raises(ValueError, match="take_back"):
            conversation.resume_at(None, [SUMMARY])
        with pytest.raises(ValueError, match="take_back"):
            conversation.show([SUMMARY], "shortened", 1)
        for wrong in (_generation([self.template.vocab_size], [-1.0], []), _generation([1], [float("nan")], [])):
            with pytest.raises(BackendError):
                conversation.check(wrong)
            with pytest.raises(BackendError):
                conversation.reply(wrong, len(self.sampled))
        _same(self.main.visible(), before)

    def _generation(self, planned: Planned) -> tuple[Generation, list[int]]:
        """The reply, and each token's version."""
        if planned.in_text:
            text = planned.said if isinstance(planned.said, str) else "It is 42."
            return Generation(output_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), finish=FinishReason(type="stop"), text=text), []  # fmt: skip
        if isinstance(planned.said, str):
            ids = self.template.encode(planned.said)
        else:
            size, specials = self.template.vocab_size, self.specials
            ids = [specials[one // 4 % len(specials)] if one % 4 == 0 else one % size for one in planned.said]
        if planned.stopped:
            ids = [*ids, self.template.stop_token_ids[0]]
        turn = len(self.sampled)
        versions = [3 * turn + (at > len(ids) // 2) for at in range(len(ids))]
        return _generation(ids, [-0.125 * (at + 1) - turn for at in range(len(ids))], versions), versions


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two answers of `visible` are equal; compared name by name, for a short message."""
    for name, value in one.items():
        assert value == other[name], (name, value, other[name])


def _check_row(row: Branch, mask: np.ndarray) -> None:
    """A row is trained where `mask` is 1, and spans cover it."""
    assert row.loss_mask.tolist() == mask.tolist()
    for values, none in ((row.logprobs, 0.0), (row.weight_versions, -1), (row.turn_ids, -1)):
        assert len(values) == len(mask)
        assert set(values[mask == 0].tolist()) <= {none}
    assert [span.start for span in row.spans] == [0, *(span.end for span in row.spans[:-1])]
    assert row.spans[-1].end == len(mask)


def _generation(ids: list[int], logprobs: list[float], versions: list[int]) -> Generation:
    runs = [
        VersionSpan(
            version=version, start=versions.index(version), end=versions.index(version) + versions.count(version)
        )
        for version in dict.fromkeys(versions)
    ]
    return Generation(
        output_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        finish=FinishReason(type="stop"),
        versions=runs,
    )
