"""`limits.tool_result_tokens`: what is short is unchanged, and what is long has at most so many tokens, mark included."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from ended_runs import run_to_end
from written_specs import save_spec, scripted_spec

from engine.actions.record_filters import TextCutter
from engine.errors import EngineError
from engine.schemas.environment import Reset, Step, UserTurn
from engine.schemas.journal import ResetRecord, StepRecord, ToolsRecord, UserRecord
from engine.schemas.limits import LimitsSpec
from engine.schemas.message import ImagePart, Message, TextPart, ToolResult
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

PIECES = ["word ", "ünïcode ", "图像", "    ", "\n\n", "<|im_end|>", '{"a": 1}', "xyz", "😀", "0123456789"]


@pytest.fixture(scope="module")
def form(tiny_tokenizer_dir: Path) -> ChatTemplate:
    return load_format(ModelSpec(path=str(tiny_tokenizer_dir)), Path())


def cutter(form: ChatTemplate, most: int, keep: str = "both", mark: str = "[{{characters}} cut]") -> TextCutter:
    given = {"tool_result_tokens": most, "tool_result_keep": keep, "tool_result_mark": mark}
    return TextCutter(LimitsSpec.model_validate(given), form)


def count(form: ChatTemplate, text: str) -> int:
    return len(form.encode(form.fast.quoting.quote(text)))


@pytest.mark.parametrize("keep", ["start", "end", "both"])
def test_any_text_fits_and_says_how_much_is_left_out(form: ChatTemplate, keep: str) -> None:
    draw = random.Random(keep)
    for _ in range(60):
        text = "".join(draw.choices(PIECES, k=draw.randint(0, 120)))
        most = draw.randint(40, 120)
        shown = cutter(form, most, keep).content(text)
        if count(form, text) <= most:
            assert shown == text
            continue
        assert count(form, shown) <= most
        head, _, rest = shown.partition("[")
        if "{" in text or "[" in head:
            continue
        left_out, _, tail = rest.partition(" cut]")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert int(left_out) == len(text) - len(head) - len(tail)
        assert (keep == "end") <= (head == "")
        assert (keep == "start") <= (tail == "")


def test_as_much_as_fits_is_shown(form: ChatTemplate) -> None:
    text = "no " * 500
    shown = cutter(form, 100, "start", "…").content(text)
    assert shown.endswith("…")
    assert count(form, shown) <= 100 < count(form, text[: len(shown) + 5] + "…")


def test_a_huge_text_is_not_tokenised_whole(form: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    encode = form.encode
    monkeypatch.setattr(form, "encode", lambda text: lengths.append(len(text)) or encode(text))
    shown = cutter(form, 50).content("word " * 4_000_000)
    assert count(form, shown) <= 50
    assert max(lengths) <= 50 * form.fast.longest + 60


def test_half_a_character_is_left_to_the_record(form: ChatTemplate) -> None:
    text = "\ud800" * 500
    assert cutter(form, 40).content(text) == text


def test_every_kind_of_record(form: ChatTemplate) -> None:
    long = "no " * 500
    cut: Any = cutter(form, 50)
    short = cut.content(long)
    assert short != long
    image = ImagePart(image="sha256:00")
    result = ToolResult(call_id="a", name="t", content=long)
    parts: Any = [TextPart(text=long), image, TextPart(text="end")]
    assert cut.cut(ToolsRecord(results=[result])).results[0].content == short
    assert cut.cut(UserRecord(turn=UserTurn(content=long))).turn.content == short
    said = [Message(role="user", content=long)]
    assert cut.cut(StepRecord(step=Step(event="x", messages=said))).step.messages[0].content == short
    found = cut.cut(ResetRecord(reset=Reset(messages=said), prompt=said))
    assert found.reset.messages[0].content == short
    assert found.prompt == said  # the spec's own words are not cut
    (first, shown, last) = (
        cut.cut(ToolsRecord(results=[ToolResult(call_id="a", name="t", content=parts)])).results[0].content
    )
    assert shown is image
    assert count(form, first.text + last.text) <= 50
    assert last.text.endswith("end")
    fine = ToolsRecord(results=[ToolResult(call_id="a", name="t", content="short")])
    assert cut.cut(fine) is fine


def test_a_mark_that_does_not_fit_is_refused(form: ChatTemplate) -> None:
    with pytest.raises(
        EngineError, match=r"`limits\.tool_result_mark` has more than `limits\.tool_result_tokens: 5` tokens"
    ):
        cutter(form, 5)


async def test_an_episode_records_what_was_shown(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:

    (tmp_path / "long_tool.py").write_text("def read(n: int) -> str:\n    return 'no ' * n\n")
    call: dict[str, Any] = {"tool_calls": [{"name": "read", "arguments": {"n": 5_000}}]}
    spec = {
        **scripted_spec("long", tiny_tokenizer_dir, [call, "done"], [{"id": "a"}], ask="Read."),
        "tools": [{"use": "long_tool:read"}],
        "machine": "tools",
        "limits": {"tool_result_tokens": 60, "tool_result_keep": "start"},
    }
    ran = await run_to_end(save_spec(tmp_path / "long.yaml", spec), tmp_path / "runs")
    trajectory, form = ran.only, ran.template
    journal = ran.store.journal("a/0")
    ran.store.close()
    assert trajectory.outcome.failure is None
    shown = trajectory.messages[2].text
    assert shown.startswith("no no no")
    assert shown.endswith("characters left out …]\n")
    assert count(form, shown) <= 60
    assert [entry.record.results[0].content for entry in journal if entry.record.kind == "tools"] == [shown]  # type: ignore[attr-defined]
