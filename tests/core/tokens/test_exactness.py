"""The prompt is what the template renders, or a branch begins: every scenario on every chat template at hand.

A folder with a template in `tests/data/templates` (or under EPISODE_ENGINE_TEMPLATES) is one more case. `-m slow` runs the
cases that the default run leaves out, and the templates that `trl` ships and the real tokenizers under EPISODE_ENGINE_TOKENIZERS.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chat_kit import make_tokenizer
from conversation_kit import to_the_end
from exactness import Player, aligned, all_cases, cases, load_case, play
from exactness_scenarios import SCENARIOS, Said
from slow_cases import slow_but

from engine.errors import RenderError
from engine.schemas.message import Message, ToolCall
from engine.tokens.bridge.wrapper import remainder
from engine.tokens.choosing import TOOL
from engine.tokens.conversation import Conversation
from engine.tokens.template import ChatTemplate

Load = Callable[[str], ChatTemplate]
ASKED = [Message(role="user", content="How warm is it?")]
AGAIN = [Message(role="user", content="And then?")]
THOUGHT = "<think>\nHm.\n</think>\n\nYes."


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    made: dict[str, ChatTemplate] = {}

    def get(name: str) -> ChatTemplate:
        if name not in made:
            made[name] = load_case(cases()[name], tmp_path_factory.mktemp("case"), make_tokenizer)
        return made[name]

    return get


@pytest.mark.parametrize("name", slow_but(cases(), "gemma3"))
def test_every_prompt_is_the_templates_or_begins_a_branch(load: Load, name: str) -> None:
    form = load(name)
    for scenario in SCENARIOS:
        for number, result in enumerate(play(form, scenario)):
            assert result.verdict != "WRONG", f"{scenario} {number}: {result.why}"
            assert not result.needless, f"{scenario} {number}: {result.needless}"
            assert result.verdict != "branched" or result.why


@pytest.mark.parametrize("name", slow_but(cases(), "gemma3"))
def test_rendering_the_whole_conversation_comes_to_the_same(load: Load, name: str) -> None:
    form = load(name)
    try:
        by_probes = [play(form, scenario) for scenario in SCENARIOS]
        form.bridges.whole = "a test"
        by_whole = [play(form, scenario) for scenario in SCENARIOS]
    finally:
        form.bridges.whole = None
    assert [[(each.verdict, each.needless) for each in results] for results in by_whole] == [
        [(each.verdict, each.needless) for each in results] for results in by_probes
    ]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_prompt_is_the_templates_or_begins_a_branch_on_all_that_is_here(tmp_path: Path) -> None:
    (tmp_path / "trl").mkdir()
    found = {name: folder for name, folder in all_cases(tmp_path / "trl").items() if name not in cases()}
    if not found:
        pytest.skip("NOT CHECKED: neither trl nor EPISODE_ENGINE_TOKENIZERS is here")
    wrong = {}
    for number, (name, folder) in enumerate(found.items()):
        try:
            form = load_case(folder, tmp_path / str(number), make_tokenizer)
        except RenderError as error:
            wrong[name] = [str(error)]
            continue
        for scenario in SCENARIOS:
            bad = [result.why for result in play(form, scenario) if result.verdict == "WRONG"]
            if bad:
                wrong[f"{name}: {scenario}"] = bad
    assert wrong == {}


def played(form: ChatTemplate, said: Said, tools: bool = False) -> tuple[str, str, Conversation]:
    """The verdict on one reply that a user answers, why, and the conversation."""
    player = Player(form, tools)
    result = player.play([ASKED, said, AGAIN])
    return result.verdict, result.why, player.conversation


@pytest.mark.parametrize(
    ("name", "said", "verdict"),
    [
        # Qwen3 drops empty thoughts when a user speaks, and the others keep what they were given.
        ("qwen3", Said(raw="<think>\n\n</think>\n\nYes."), "branched"),
        ("qwen3", Said(raw=THOUGHT), "branched"),
        ("qwen3_instruct_2507", Said(raw="<think>\n\n</think>\n\nYes."), "exact"),
        ("qwen3_instruct_2507", Said(raw=THOUGHT), "exact"),
        ("gemma3", Said(raw=THOUGHT), "exact"),
        ("llama3_2", Said(raw=THOUGHT), "exact"),
        # Cut replies and stop strings.
        ("qwen3", Said("It is 42", end="none"), "exact"),
        ("glm4moe", Said("It is 42", end="none"), "branched"),
        ("gemma3", Said("It is 42\n", end="none"), "spaced"),
        # Another end token.
        ("qwen3", Said("It is 42.", end="other"), "branched"),
        ("llama3_2", Said("It is 42.", end="other"), "branched"),
        # Markers in odd places.
        ("qwen3_instruct_2507", Said(raw="<think>a</think>b</think>c"), "exact"),
        ("gemma3", Said(raw="a</think>b</think>c"), "exact"),
    ],
)
def test_what_goes_on_and_what_begins_a_branch(load: Load, name: str, said: Said, verdict: str) -> None:
    found, why, _ = played(load(name), said)
    assert found == verdict, why


def test_a_reply_cut_in_its_thoughts_is_closed_as_the_template_closes_them(load: Load) -> None:
    form = load("qwen3")
    player = Player(form, tools=True)
    results = [Message(role="tool", content="12 °C", name="probe_tool", tool_call_id="call_0_0")]
    result = player.play([ASKED, Said(raw="<think>\nHm", end="none"), results])
    assert result.verdict == "exact", result.why
    (row,) = to_the_end(player.conversation)
    (closing,) = [span for span in row.spans if span.kind == "closing"]
    assert form.decode(row.input_ids[closing.start : closing.end]) == "\n</think>\n\n<|im_end|>"
    assert row.loss_mask[closing.start : closing.end].sum() == 0


def test_a_template_without_an_end_token_gets_none(load: Load) -> None:
    """GLM's replies end where the next message begins: nothing is put between a cut reply and it."""
    form = load("glm4moe")
    found, why, conversation = played(form, Said("It is 42.", end="none"))
    assert found in ("exact", "branched"), why
    assert "<|endoftext|>" not in form.decode(conversation.prompt())


def test_the_branchs_reason_quotes_what_differs(load: Load) -> None:
    _, why, _ = played(load("qwen3"), Said(raw="<think>\n\n</think>\n\nYes."))
    assert why == r"the template writes 'Yes.<|im_end|>' where the reply has '<think>\n\n</think>\n\nYes.<|im_end|>'"
    _, why, _ = played(load("qwen3"), Said("Yes.", end="other"))
    assert why == "the reply ended with '<|endoftext|>', where the template writes '<|im_end|>'"


@pytest.mark.parametrize(
    ("name", "reader"),
    [("qwen3", "qwen3"), ("qwen3_5_think", "qwen3.5"), ("glm4moe", "glm-4.5"), ("llama3_2", "llama-3")],
)
def test_calls_are_read_as_the_template_writes_them(load: Load, name: str, reader: str) -> None:
    form = load(name)
    assert form.reader is not None
    assert form.reader.name == reader
    assert form.unread_calls == ""


def test_calls_of_a_prompt_are_shown_or_refused(load: Load) -> None:
    called = Message(
        role="assistant",
        content="",
        tool_calls=[ToolCall(id="call_9_0", name="probe_tool", arguments={"text": "Rome"})],
    )
    for name in ("qwen3", "glm4moe", "llama3_2", "lfm2_v2"):
        form = load(name)
        assert "Rome" in form.decode(form.render([ASKED[0], called, *AGAIN], [TOOL])), name
    with pytest.raises(RenderError, match="does not show tool calls: they would be lost"):
        load("gemma3").render([ASKED[0], called, *AGAIN], [TOOL])


@pytest.mark.parametrize(
    ("said", "shown", "rest"),
    [
        ("42<e>", "42<e>", ""),
        ("42", "42<e>", "<e>"),
        ("42\n", "42<e>", "<e>"),
        ("<t>\nHm", "<t>\nHm\n</t>\n\n<e>", "\n</t>\n\n<e>"),
        ("<t>\nHm\n", "<t>\nHm\n</t>\n\n<e>", "</t>\n\n<e>"),
        ("<t>\nHm\n\n", "<t>\nHm\n</t>\n\n<e>", "</t>\n\n<e>"),
        ('{"x":1}<e>', '{"x": 1}<e>', ""),
        ("<t></t>42<e>", "42<e>", None),
        ("42<o>", "42<e>", None),
        ("42", "", None),
        ("", "<e>", "<e>"),
    ],
)
def test_the_remainder_is_what_the_template_writes_beyond_what_was_sampled(
    said: str, shown: str, rest: str | None
) -> None:
    assert remainder(said, shown) == rest


def test_the_oracle_finds_a_tape_that_the_template_does_not_write() -> None:
    tape = [(False, "<u>Q<a>"), (True, "<t>\n\n</t>\n\nYes.<e>"), (False, "\n<u>")]
    assert aligned(tape, "<u>Q<a><t>\n\n</t>\n\nYes.<e>\n<u>") == 0
    assert aligned(tape, "<u>Q<a><t></t>Yes.<e>\n<u>") is not None
    assert aligned(tape, "<u>Q<a>Yes.<e>\n<u>") is None
    assert aligned([(False, "<u>Q<a> ")], "<u>Q<a>\n") is None
