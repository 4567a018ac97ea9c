"""`limits.episode_tokens` is met to the token: a reply is cut where the branch has that many, closing tokens counted."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.actions.action import bounds_of
from engine.actions.generate import GenerateAction
from engine.schemas.generation import FinishReason, Generation, SamplingParams
from engine.schemas.limits import LimitsSpec
from engine.schemas.message import Message
from engine.schemas.model import ModelSpec
from engine.tokens.conversation import Conversation
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate


@pytest.fixture(scope="module")
def form(tiny_tokenizer_dir: Any) -> ChatTemplate:
    return load_format(ModelSpec(path=str(tiny_tokenizer_dir)), tiny_tokenizer_dir)


def said(form: ChatTemplate, sampled: list[int], most: int) -> Generation:
    """A backend's reply: `sampled`, cut after `most` tokens."""
    ids = np.array(sampled[:most], np.int32)
    finish = FinishReason(type="stop") if len(sampled) <= most else FinishReason(type="length")
    return Generation.read(
        {"output_ids": ids, "logprobs": np.zeros(len(ids), np.float32), "finish": finish, "prompt_tokens": 0}
    )


def action_of(form: ChatTemplate, limits: LimitsSpec) -> GenerateAction:
    action = GenerateAction.__new__(GenerateAction)
    spec: Any = SimpleNamespace(limits=limits, model=SimpleNamespace(context=None))
    action._most, action.bounds = limits.turn_tokens, bounds_of(action.name, spec)
    action._longest_prompt = inf if limits.episode_tokens is None else limits.episode_tokens
    action._sampling, action._stop, action._banned, action._adapter = SamplingParams(), [], [], None
    action._asks_experts = action._sends_messages = False
    return action


def play(form: ChatTemplate, replies: list[int], turn_tokens: int, limit: int | None) -> Iterator[tuple[int, int, str]]:
    """(tokens before the reply, tokens behind it, how it ended) of each turn, until `limit` says that there is no room."""
    action = action_of(form, LimitsSpec(turn_tokens=turn_tokens, episode_tokens=limit, assistant_turns=None))
    conversation = Conversation(form, [])
    conversation.open([Message(role="user", content="What is 17 plus 25?")])
    word = form.encode(" 17")[0]
    for turn, length in enumerate(replies):
        episode: Any = SimpleNamespace(id="t/0", turn=turn - 1, conversation=conversation, turn_seed=lambda turn: turn)
        before = len(conversation.prompt())
        if action.limit(episode) is not None:
            assert action.limit(episode) == ("episode_tokens", before)
            return
        room = action._request(episode, conversation, turn, {}).max_new_tokens
        generation = said(form, [*[word] * length, form.stop_token_ids[0]], room)
        conversation.reply(generation, turn)
        yield before, conversation.length, generation.finish.type
        conversation.add([Message(role="user", content="And then?")])


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    replies=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    turn_tokens=st.integers(1, 45),
    off=st.integers(-45, 3),
)
def test_a_branch_is_cut_at_exactly_its_limit(
    form: ChatTemplate, replies: list[int], turn_tokens: int, off: int
) -> None:
    """Every turn ends where it would without the limit, or at the limit's last token, whichever comes first."""
    free = list(play(form, replies, turn_tokens, None))
    limit = max(1, free[-1][1] + off)
    expected = [
        (before, min(end, limit), finish if end <= limit else "length")
        for before, end, finish in free
        if before < limit
    ]
    cut = next((at for at, (_, end, finish) in enumerate(expected) if end == limit and finish == "length"), None)
    found = list(play(form, replies, turn_tokens, limit))
    assert found[: len(expected)] == expected
    assert len(found) == len(expected)
    assert all(end <= limit for _, end, _ in found)
    if cut is not None:
        assert cut == len(found) - 1  # the closing token and the next message have no room


def test_the_closing_token_of_a_cut_reply_takes_its_place(form: ChatTemplate) -> None:
    """The third reply has what prompt, replies, closing tokens and messages have left: one less for each closing token."""
    ((_, first, _), (second, *_)) = list(play(form, [9, 9], 4, None))[:2]
    between = second - first
    whole = list(play(form, [3, 3], 45, None))
    assert between == whole[1][0] - whole[0][1] + 1  # `<|im_end|>`, which the cut reply did not sample
