"""Long texts of an environment: tokenised beside the event loop, and refused by their length where they cannot fit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import code_for_tests as spec_code
import pytest
from slow_cases import slow_after, slow_but
from transformers import AutoTokenizer

from engine.actions.generate import LONG_TEXT
from engine.runner.replay import Replayer
from engine.tokens.tokenizer import FastTokenizer

WORDS = "the quick brown fox "


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(characters, whether on the main thread) of each long text that is tokenised."""
    found: list[tuple[int, bool]] = []
    encode = FastTokenizer._encode

    def noted(self: FastTokenizer, text: str) -> list[int]:
        if len(text) > LONG_TEXT:
            found.append((len(text), threading.current_thread() is threading.main_thread()))
        return encode(self, text)

    monkeypatch.setattr(FastTokenizer, "_encode", noted)
    return found


def telling(make_spec: Any, characters: int, **changes: Any) -> Any:
    call = {"tool_calls": [{"name": "tell", "arguments": {"characters": characters}}]}
    tools = [{"use": "code_for_tests:tell"}]
    model = {"context": changes.pop("context", 1_000_000)}
    return make_spec([call, "It is 41.", "It is 42."], tools=tools, model=model, **changes)


@pytest.mark.parametrize("characters", slow_but([LONG_TEXT + 1, 1_000_000], LONG_TEXT + 1))
async def test_a_long_text_is_tokenised_in_another_thread(make_spec, run_spec, encoded, characters) -> None:
    ran = await run_spec(telling(make_spec, characters))
    assert ran.only.outcome.solved
    assert encoded
    assert not any(main for _, main in encoded)
    [branch] = ran.only.branches
    assert (WORDS * (characters // 20 + 1))[:characters].strip() in ran.template.decode(branch.input_ids)


async def test_a_short_text_is_tokenised_where_it_stands(make_spec, run_spec, encoded) -> None:
    ran = await run_spec(telling(make_spec, 1_000))
    assert ran.only.outcome.solved
    assert encoded == []


@pytest.mark.parametrize(
    ("limit", "changes"), [("context", {"context": 2_000}), ("episode_tokens", {"limits": {"episode_tokens": 2_000}})]
)
async def test_a_text_that_cannot_fit_is_not_tokenised(make_spec, run_spec, encoded, limit, changes) -> None:
    ran = await run_spec(telling(make_spec, 1_000_000, **changes))
    assert (ran.only.outcome.limit, ran.only.outcome.failure) == (limit, None)
    assert encoded == []
    assert len(ran.only.turns) == 1
    assert spec_code.CALLS["tell"] == 1


async def test_replays_of_both_are_the_same(make_spec, run_spec) -> None:
    for changes in ({}, {"context": 2_000}):
        ran = await run_spec(telling(make_spec, 200_000, name=f"of{len(changes)}", **changes))
        replayer = Replayer(ran.loaded, ran.template, ran.store)
        task = ran.store.task(ran.only.task_id)
        assert (await replayer.check(ran.only, task)).difference is None
        replayer.close()


@pytest.mark.parametrize(
    "text",
    slow_after(2, ["a" * 200_000, WORDS * 10_000, "naïve café — 東京 🙂 " * 9_000, " " * 150_000 + "x\n\n" * 20_000]),
)
def test_long_texts_have_the_ids_that_the_tokenizer_gives(tiny_tokenizer_dir: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    assert FastTokenizer(tokenizer).encode(text) == tokenizer.encode(text, add_special_tokens=False)
