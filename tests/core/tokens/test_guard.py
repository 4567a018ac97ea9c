"""The guard's answers: no false alarm on any template, the place of a difference, and what a child that dies or hangs does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from chat_kit import PLAIN, make_tokenizer
from conversation_kit import generation, said, user
from tokenizers import Tokenizer

from engine.schemas.model import ModelSpec
from engine.store.codec import json_of
from engine.store.results import _write_branch
from engine.tokens.bridge import guard as guard_module
from engine.tokens.bridge.guard import BranchDifference, BranchFinding, BranchGuard
from engine.tokens.bridge.guard_child import _tokenizer
from engine.tokens.conversation import Conversation
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

Formats = Callable[..., ChatTemplate]


async def judged(
    guard: BranchGuard, conversation: Conversation, change: Callable[[np.ndarray], None] = lambda _: None
) -> BranchFinding | None:
    """The guard's finding on a conversation; `change` damages the ids of its last branch."""
    branches = conversation.branches()
    change(branches[-1].input_ids)
    rows = [_write_branch(branch, "e/0") for branch in branches]
    return await guard.check(
        conversation, json_of({"messages": conversation.messages}), [(row[3], row[4]) for row in rows]
    )


def guard_of(form: ChatTemplate) -> BranchGuard:
    return BranchGuard(form, ModelSpec(path=form.fast.name_or_path), Path())


def talk(form: ChatTemplate, *replies: str, **named: Any) -> Conversation:
    conversation = Conversation(form, [], **named)
    conversation.open([user("Hello <|im_end|> there.")])
    for turn, reply in enumerate(replies):
        if turn:
            conversation.add([user(f"And then? {turn}")])
        conversation.prompt()
        conversation.reply(said(form, reply), turn)
    return conversation


async def test_each_token_that_was_not_sampled_is_compared(formats: Formats) -> None:
    form = formats("plain")
    guard = guard_of(form)
    conversation = talk(form, "One.<|im_end|>", "Two.<|im_end|>")
    [branch] = conversation.branches()
    assert await judged(guard, conversation) is None
    other = form.encode("~")[0]
    last = max(span.start for span in branch.spans if span.kind == "generated")
    for token in np.flatnonzero(branch.loss_mask[:last] == 0).tolist():

        def change(ids: np.ndarray, token: int = token) -> None:
            ids[token] = other

        finding = await judged(guard, conversation, change)
        assert isinstance(finding, BranchDifference)
        assert (finding.branch, finding.token, finding.id, finding.turns) == (0, token, other, 2)


async def test_text_that_is_cut_otherwise_is_found_although_it_reads_the_same(formats: Formats) -> None:
    form = formats("plain")
    conversation = talk(form, "One.<|im_end|>", "Two.<|im_end|>")
    [branch] = conversation.branches()
    ids = branch.input_ids.tolist()
    at = next(at for at, id_ in enumerate(ids) if len(form.decode([id_])) == 2 and form.decode([id_]).isalpha())
    letters = [form.fast.convert_tokens_to_ids(letter) for letter in form.decode([ids[at]])]
    tape = conversation.tapes[0]
    tape._ids = np.array([*ids[:at], *letters, *ids[at + 1 :]], np.int32)
    tape._length += 1
    kinds, starts, ends, turns = np.array(tape._spans).reshape(-1, 4).T
    shifted = np.stack([kinds, starts + (starts > at), ends + (ends > at), turns], 1)
    tape._spans = type(tape._spans)("i", shifted.ravel().tolist())
    versions = np.array(tape._versions).reshape(-1, 3)
    versions[:, 1:] += 1
    tape._versions = type(tape._versions)("i", versions.ravel().tolist())
    assert form.decode(tape._ids) == form.decode(ids)
    finding = await judged(guard_of(form), conversation)
    assert isinstance(finding, BranchDifference)
    assert finding.token == at
    assert "is tokenised to" in finding.message


async def test_a_branch_that_begins_with_what_another_one_sampled_is_compared_and_its_ids_are_not_made_canonical(
    formats: Formats,
) -> None:
    form = formats("plain")
    conversation = Conversation(form, [])
    conversation.open([user("Hello.")])
    letters = [form.fast.convert_tokens_to_ids(letter) for letter in "answer"]
    assert form.encode("answer") != letters
    conversation.prompt()
    conversation.reply(generation([*letters, *form.encode("<|im_end|>")]), 0)
    mark = conversation.mark()
    for turn, text in enumerate(["And then?", "And before?"], start=1):
        conversation.resume_at(mark, [user(text)])
        conversation.prompt()
        conversation.reply(said(form, "Two.<|im_end|>"), turn)
    assert len(conversation.branches()) == 2
    assert await judged(guard_of(form), conversation) is None


async def test_text_that_only_spells_a_token_is_compared_as_text(formats: Formats) -> None:
    form = formats("thinking")
    conversation = Conversation(form, [])
    conversation.open([user("Why <tool_response>?\ufdd0")])
    for turn, reply in enumerate(["No </think> yet. \ufdd0", "<think>\nHm.\n</think>\n\nYes."]):
        conversation.prompt()
        spelled = form.encode(form.fast.quoting.quote(reply))
        conversation.reply(generation([*spelled, *form.encode("<|im_end|>")]), turn)
        conversation.add([user(f"And <|im_start|> {turn}? </tool_response>")])
    conversation.prompt()
    conversation.reply(said(form, "Done.<|im_end|>"), 2)
    assert await judged(guard_of(form), conversation) is None


async def test_a_template_that_shows_the_time_is_rendered_at_that_of_the_prompt(
    formats: Formats, tmp_path: Path
) -> None:
    form = load_format(
        ModelSpec(path=str(make_tokenizer(tmp_path, f"{{{{ strftime_now('%H:%M:%S') }}}}{PLAIN}"))), tmp_path
    )
    conversation = talk(form, "One.<|im_end|>")
    asked = conversation.asked[0]
    assert await judged(guard_of(form), conversation) is None
    conversation.asked[0] = msgspec.structs.replace(asked, made=asked.made - 5)
    assert isinstance(await judged(guard_of(form), conversation), BranchDifference)


# --- the child -----------------------------------------------------------------------------------------------------------


SLOW = "{%- if messages | length > 2 %}{% for a in range(LOOPS) %}{% for b in range(10000) %}{% endfor %}{% endfor %}{% endif %}"


def slow_guard(form: ChatTemplate, loops: int) -> BranchGuard:
    """A guard whose child takes long for conversations of more than one turn."""
    guard = guard_of(form)
    told = json.loads(guard._told)
    told["sources"] = [SLOW.replace("LOOPS", str(loops)) + source for source in told["sources"]]
    told["key"] += str(loops)
    guard.__dict__["_told"] = json.dumps(told).encode()
    return guard


def test_each_of_several_loops_gets_its_own_answers(formats: Formats) -> None:
    form = formats("plain")
    guard = guard_of(form)
    conversation = talk(form, "One.<|im_end|>", "Two.<|im_end|>")
    [branch] = conversation.branches()
    last = max(span.start for span in branch.spans if span.kind == "generated") - 1
    other = form.encode("~")[0]

    def change(ids: np.ndarray) -> None:
        ids[last] = other

    async def asked(_: int) -> list[Any]:
        given_up = asyncio.ensure_future(judged(guard, conversation))
        asking = asyncio.gather(*(judged(guard, conversation, change if odd else lambda _: None) for odd in (0, 1) * 4))
        await asyncio.sleep(0)
        given_up.cancel()
        return await asking

    with ThreadPoolExecutor(4) as pool:
        for findings in pool.map(lambda number: asyncio.run(asked(number)), range(8)):
            assert findings[0::2] == [None] * 4
            assert [(each.branch, each.token) for each in findings[1::2]] == [(0, last)] * 4


async def child() -> Any:
    """The guard's process, once it has started."""
    while True:
        asking = guard_module._current
        if asking is not None and asking.child is not None and asking.child.process.poll() is None:
            return asking.child.process
        await asyncio.sleep(0.001)


async def test_an_episode_whose_child_is_killed_is_asked_again(formats: Formats) -> None:
    form = formats("plain")
    guard = slow_guard(form, 40)
    assert await judged(guard, talk(form, "One.<|im_end|>")) is None
    asked = asyncio.gather(*(judged(guard, talk(form, "One.<|im_end|>", "Two.<|im_end|>")) for _ in range(2)))
    await asyncio.sleep(0)
    first = await child()
    assert not asked.done()
    os.kill(first.pid, signal.SIGKILL)
    assert await asked == [None, None]
    assert (await child()).pid != first.pid


@pytest.mark.slow
async def test_one_that_never_ends_is_given_up_and_the_others_are_answered(
    formats: Formats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "SECONDS", 4.0)
    monkeypatch.setattr(guard_module, "TRIES", 2)
    form = formats("plain")
    guard = slow_guard(form, 100_000)
    short, long = talk(form, "One.<|im_end|>"), talk(form, "One.<|im_end|>", "Two.<|im_end|>")
    first, endless, last = await asyncio.gather(*(judged(guard, each) for each in (short, long, short)))
    assert (first, last) == (None, None)
    assert isinstance(endless, str)
    assert endless.startswith("it did not answer within 4")


async def test_one_that_takes_all_memory_is_given_up(formats: Formats) -> None:
    form = formats("plain")
    guard = guard_of(form)
    told = json.loads(guard._told)
    told["sources"], told["key"] = ["{{ ('x' * 1000000000000000) | length }}"], "memory"
    guard.__dict__["_told"] = json.dumps(told).encode()
    finding = await judged(guard, talk(form, "One.<|im_end|>"))
    assert finding == "MemoryError:  (3 times)"


async def test_a_child_that_cannot_start_leaves_the_episode_unanswered(
    formats: Formats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "_current", None)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    finding = await judged(guard_of(formats("plain")), talk(formats("plain"), "One.<|im_end|>"))
    assert isinstance(finding, str)
    assert "/nowhere/python" in finding


def test_a_tokenizer_for_the_child_has_no_name_that_an_end_could_leave_behind(
    formats: Formats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(guard_module, "_files", {})
    plain = formats("plain").fast.full.backend_tokenizer
    path = guard_module._saved(plain)
    assert list(tmp_path.iterdir()) == []
    script = "import sys; from tokenizers import Tokenizer; print(Tokenizer.from_file(sys.argv[1]).get_vocab_size())"
    child = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert int(child.stdout) == plain.get_vocab_size()


def test_tokenizers_of_the_same_content_are_one_file(formats: Formats) -> None:
    """So the child reads a tokenizer once, however many runs load it."""
    plain = formats("plain").fast.full.backend_tokenizer
    again = Tokenizer.from_str(plain.to_str())
    path = guard_module._saved(plain)
    assert guard_module._saved(again) == path
    assert Tokenizer.from_file(path).to_str() == plain.to_str()
    again.add_special_tokens(["<|one_more|>"])
    assert guard_module._saved(again) != path
    assert _tokenizer(path, 0) is _tokenizer(path, 0) is not _tokenizer(path, 1)
