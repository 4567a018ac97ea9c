"""Nothing that was sampled is lost: it is in the message, or it is a marker, or a call that was read; and the next branch shows it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from chat_kit import THINKING, make_tokenizer
from conversation_kit import generation, user
from exactness import all_cases, cases, load_case
from slow_cases import slow_but
from test_families import FAMILIES

from engine.schemas.message import MalformedCall, ToolCall
from engine.schemas.model import ModelSpec
from engine.tokens.choosing import TOOL, written
from engine.tokens.conversation import Conversation
from engine.tokens.loading import load_format
from engine.tokens.reply_parser import ParsedReply
from engine.tokens.template import ChatTemplate

SECTIONS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
)
MARKERS = ("<think>", "</think>", *SECTIONS)
"""What marks structure. One of each may be missing in the message."""


class Piece(NamedTuple):
    """A part of a reply."""

    text: str
    word: str = ""
    """A word of it that occurs nowhere else."""


HEADS = [
    Piece(""),
    Piece("<think>\nWhy one.\n</think>\n\n"),
    Piece("<think>\nWhy two.\n\n"),
    Piece("Early.\n<think>Why three.</think>"),
    Piece("Why four.\n</think>\n\n"),
    Piece("<think><think>Why five.</think>"),
    Piece("<think>a</think>b</think>"),
    Piece("<think>\n\n</think>\n\n"),
    Piece("<think>"),
    Piece("<think>Why six <tool_call>\n</think>"),
    Piece("So:<|im_end|> more "),
]
"""Beginnings of replies: reasoning that is closed, open, empty, cut by markers."""
TAILS = ("", "w", "c", "m", "u", "wc", "cw", "cc", "cwc", "cm", "mc", "wmw", "cu", "wcwmw", "mwm")
"""What follows: words, calls, malformed and unclosed calls."""


def _call(form: ChatTemplate, word: str) -> str | None:
    """A call as a model writes it; None where this format has none."""
    function = {"name": "probe_tool", "arguments": {"text": word}}
    call = {"type": "function", "id": "functions.probe_tool:0", "function": function}
    shown = written(form, {"role": "assistant", "content": "", "tool_calls": [call]})
    if shown is not None:
        return re.sub(r"^\s*(<think>)?\s*</think>\s*", "", shown[1]).strip()
    return form.call_format.write("", [("probe_tool", {"text": word})]) if form.call_format is not None else None


def _malformed(call: str) -> str:
    for part in ("{" if '<|"|>' in call else '"', "=", "probe_tool"):
        if part in call:
            return call.replace(part, "", 1)
    raise AssertionError(call)


def plans(form: ChatTemplate) -> Iterator[list[Piece]]:
    """Replies, as the pieces of each."""
    calls = _call(form, "K") is not None and not form.unread_calls
    for head, tail in product(HEADS, TAILS if calls else TAILS[:2]):
        pieces = [head]
        for number, kind in enumerate(tail):
            word = f"Kq{number}z"
            if kind == "w":
                pieces.append(Piece(f"{word} is so.", word))
                continue
            call = _call(form, word) or ""
            text = {"c": call, "m": _malformed(call), "u": call[: call.index(word) + len(word)]}[kind]
            pieces.append(Piece(text, word))
        yield pieces


def bare(text: str) -> str:
    return "".join(text.split())


def check(form: ChatTemplate, pieces: list[Piece]) -> None:
    text = "\n".join(piece.text for piece in pieces)
    conversation = Conversation(form, [] if form.unread_calls else [TOOL])
    conversation.open([user("Q1?")])
    conversation.prompt()
    ids = form.encode(text)
    reply = conversation.reply(generation([*ids, form.stop_token_ids[0]]), 0)
    _check_message(bare(form.decode(ids)), pieces, reply)
    branches = len(conversation.tapes)
    conversation.add([user("Q2?")])
    shown = form.decode(conversation.prompt()).partition("Q1?")[2].rpartition("Q2?")[0]
    if len(conversation.tapes) > branches:
        _check_branch(bare(shown), pieces, reply)


def _check_message(rest: str, pieces: list[Piece], reply: ParsedReply) -> None:
    """The sampled text, without white space, is the content, the reasoning, the calls that were read, and markers."""
    left = list(pieces)
    malformed = any(isinstance(attempt, MalformedCall) for attempt in reply.attempts)
    for attempt in reply.attempts:
        if isinstance(attempt, ToolCall) and not malformed:
            if attempt.name != "probe_tool":  # all up to the arguments is its name
                assert bare(attempt.name) in rest
                return
            (piece,) = [piece for piece in left if attempt.arguments == {"text": piece.word}]
            left.remove(piece)
            assert bare(piece.text) in rest
            rest = rest.replace(bare(piece.text), "", 1)
    found = Counter(bare(reply.content) + bare(reply.reasoning or ""))
    texts = {rest}
    for marker in MARKERS:
        texts |= {text.replace(marker, "", 1) for text in texts}
    assert found in [Counter(text) for text in texts], (rest, reply)


def _check_branch(shown: str, pieces: list[Piece], reply: ParsedReply) -> None:
    """What no template takes for reasoning is shown: all after the last marker that closes it, and all calls."""
    text = "\n".join(piece.text for piece in pieces)
    seen = text.rpartition("</think>")[2]
    if "</think>" not in text and reply.reasoning is not None:
        first = next((piece.text for piece in pieces[1:] if len(piece.text) > len("Kq0z is so.")), None)
        seen = text[text.index(first) :] if reply.attempts and first else ""
    for piece in pieces:
        assert not piece.word or piece.word not in seen or piece.word in shown, (piece, shown)
    if any(isinstance(attempt, MalformedCall) for attempt in reply.attempts):
        assert bare(seen) in shown, (seen, shown)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ChatTemplate]:
    made: dict[str, ChatTemplate] = {}

    def get(name: str) -> ChatTemplate:
        if name not in made:
            made[name] = load_case(cases()[name], tmp_path_factory.mktemp("case"), make_tokenizer)
        return made[name]

    return get


SHIPPED = [name for name in cases() if name != "gptoss"]


@pytest.mark.parametrize("name", slow_but(SHIPPED, "qwen3", "qwen3_5_think", "glm4moe", "lfm2_2_5"))
def test_all_that_was_sampled_is_in_the_message_and_in_the_next_branch(
    load: Callable[[str], ChatTemplate], name: str
) -> None:
    form = load(name)
    for pieces in [*plans(form)][::8]:
        check(form, pieces)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_that_was_sampled_is_kept_by_every_template_at_hand(tmp_path: Path) -> None:
    (tmp_path / "trl").mkdir()
    for number, (name, folder) in enumerate(all_cases(tmp_path / "trl").items()):
        if "gptoss" not in name:
            (tmp_path / str(number)).mkdir()
            form = load_case(folder, tmp_path / str(number), make_tokenizer)
            for pieces in [*plans(form)][::5]:
                check(form, pieces)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_all_that_was_sampled_is_kept_by_every_family(name: str, tmp_path: Path) -> None:
    extra, eos = FAMILIES[name]
    path = make_tokenizer(tmp_path, THINKING, extra, eos)
    form = load_format(ModelSpec(path=str(path), renderer=name), Path())
    for pieces in plans(form):
        check(form, pieces)


WHY = "<|channel|>analysis<|message|>Why one.<|end|>"
SAID = "<|channel|>commentary<|message|>I look.<|end|>"
GOOD = '<|channel|>commentary to=functions.probe_tool <|constrain|>json<|message|>{"text": "Ka"}<|call|>'
BAD = '<|channel|>commentary to=functions.probe_tool <|constrain|>json<|message|>{text": "Kb"}<|call|>'
OTHER = "<|channel|>sideways<|message|>Aside.<|end|>"


@pytest.mark.parametrize(
    ("blocks", "reasoning", "content", "calls"),
    [
        (["No channel at all."], None, "No channel at all.", ["-"]),
        (["", "So:", SAID], None, "So:\nI look.", ["-"]),
        ([WHY, OTHER], "Why one.", f"<|start|>assistant{OTHER}", ["-"]),
        ([SAID, GOOD], None, "I look.", ["Ka"]),
        ([WHY, GOOD, "<|channel|>final<|message|>After."], "Why one.", "After.", ["Ka"]),
        ([WHY, SAID, BAD], "Why one.", f"I look.\n<|start|>assistant{BAD}".removesuffix("<|call|>"), [None]),
        ([BAD, GOOD], None, f"{BAD}\n<|start|>assistant{GOOD}".removesuffix("<|call|>"), [None, "Ka"]),
        ([WHY, "<|channel|>fin"], "Why one.", "<|start|>assistant<|channel|>fin", ["-"]),
    ],
)
def test_blocks_of_harmony_that_are_in_no_known_channel_are_content(
    load: Callable[[str], ChatTemplate], blocks: list[str], reasoning: str | None, content: str, calls: list[str | None]
) -> None:
    form = load("gptoss")
    conversation = Conversation(form, [TOOL])
    conversation.open([user("Q1?")])
    conversation.prompt()
    reply = conversation.reply(generation(form.encode("<|start|>assistant".join(blocks))), 0)
    read = [attempt.arguments["text"] if isinstance(attempt, ToolCall) else None for attempt in reply.attempts]
    assert (reply.reasoning, reply.content, read or ["-"]) == (reasoning, content, calls)
    conversation.add([user("Q2?")])
    assert bare(content) in bare(form.decode(conversation.prompt()))
