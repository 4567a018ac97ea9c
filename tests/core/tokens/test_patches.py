"""Patches of chat templates: each on every real template that it lists, judged by what `apply_chat_template` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_kit import make_tokenizer
from exactness import SHIPPED, Player, load_case, play
from exactness_scenarios import SCENARIOS, Said
from slow_cases import slow_but

from engine.errors import RenderError
from engine.schemas.message import Message
from engine.schemas.model import ModelSpec
from engine.tokens.bridge.check import check_bridge
from engine.tokens.bridge.kinds import ASSISTANT, USER
from engine.tokens.loading import load_format
from engine.tokens.patches import PATCHES, Patch, patched, patches_of, template_hash
from engine.tokens.template import ChatTemplate

DATA = SHIPPED.parent
FILES = [*SHIPPED.glob("*/chat_template.jinja"), *DATA.glob("patched_templates/*.jinja")]
SOURCES = {template_hash(file.read_text(encoding="utf-8")): file for file in FILES}
CASES = [(patch, hash_) for patch in PATCHES for hash_ in patch.hashes]
IDS = [f"{patch.name} {SOURCES[hash_].parent.name}/{SOURCES[hash_].stem}" for patch, hash_ in CASES]

ASKED = [Message(role="user", content="How warm is it?")]
AGAIN = [Message(role="user", content="And then?")]
WARM = Message(role="tool", content="20 °C", name="probe_tool", tool_call_id="call_0_0")
WARMER = Message(role="tool", content="21 °C", name="probe_tool", tool_call_id="call_1_0")
CALL = [{"text": "Paris"}]
THOUGHT = Said("Yes.", thoughts="Hm.")
SCRIPTS: dict[str, tuple[bool, list[Any]]] = {
    "a55ee1b1660128b7 keep-thinking": (False, [ASKED, THOUGHT, AGAIN, THOUGHT, AGAIN]),
    "87a2728cb8dc9fe4 keep-thinking": (False, [ASKED, THOUGHT, AGAIN, THOUGHT, AGAIN]),
    "a4aee8afcf2e0711 keep-thinking": (False, [ASKED, THOUGHT, AGAIN, THOUGHT, AGAIN]),
    "273d8e0e683b8850 keep-thinking": (False, [ASKED, Said("Yes."), AGAIN, Said("No."), AGAIN]),
    "44f815868bf02fa4 keep-thinking": (False, [ASKED, Said(raw="\n<think>Hm.</think>\nYes."), AGAIN]),
    "56a1447ad31926fd orphan-think": (False, [ASKED, Said(raw="Hm.\n</think>\n\nYes."), AGAIN, Said(raw="So.\n</think>\n\nNo."), AGAIN]),
    "563b1ce7d61d50a9 orphan-think": (False, [ASKED, Said(raw="Hm.\n</think>\n\nYes."), AGAIN, Said(raw="So.\n</think>\n\nNo."), AGAIN]),
    "563b1ce7d61d50a9 tool-calls": (True, [ASKED, Said(calls=CALL), [WARM], Said(calls=CALL), [WARMER]]),
}  # fmt: skip
"""By template and patch: a conversation that goes on with the patch, and does not without it."""


def load(hash_: str, folder: Path, **model: Any) -> ChatTemplate:
    case, made = folder / "case", folder / "made"
    case.mkdir(parents=True)
    made.mkdir()
    (case / "chat_template.jinja").write_text(SOURCES[hash_].read_text(encoding="utf-8"), encoding="utf-8")
    return load_case(case, made, make_tokenizer, **model)


@pytest.mark.parametrize(("patch", "hash_"), CASES, ids=IDS)
def test_a_patch_fits_each_template_that_it_lists(patch: Patch, hash_: str) -> None:
    source = SOURCES[hash_].read_text(encoding="utf-8")
    changed, names = patched(source, [patch.name])
    assert names == [patch.name]
    assert changed != source
    assert template_hash(changed) not in SOURCES
    assert patched(source, False) == (source, [])
    every = [each.name for each in patches_of(source)]
    assert len(set(every)) == len(every)
    assert patched(source, True)[1] == every


@pytest.mark.parametrize(
    "case",
    slow_but(SCRIPTS, "a55ee1b1660128b7 keep-thinking", "56a1447ad31926fd orphan-think", "563b1ce7d61d50a9 tool-calls"),
)
def test_a_conversation_goes_on_only_with_the_patch(case: str, tmp_path: Path) -> None:
    """As `apply_chat_template` writes it with the patched template, id for id, in one branch."""
    hash_, _, name = case.partition(" ")
    tools, script = SCRIPTS[case]
    found = []
    for number, wanted in enumerate((False, True)):
        model: dict[str, Any] = {"template_patches": wanted}
        form = load(hash_, tmp_path / str(number), **model)
        try:
            result = Player(form, tools).play(script)
            found.append(result.verdict)
        except RenderError:  # nothing reads its calls
            found.append("refused")
    assert found[0] in ("branched", "refused")
    assert found[1] in ("exact", "spaced"), result.why
    assert name in [each.name for each in patches_of(SOURCES[hash_].read_text(encoding="utf-8"))]


@pytest.mark.parametrize("hash_", slow_but(["a55ee1b1660128b7", "87a2728cb8dc9fe4"], "a55ee1b1660128b7"))
def test_empty_thinking_is_shown_as_the_generation_prompt_writes_it(hash_: str, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Hm?"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "é"},
    ]
    verdicts = []
    for number, wanted in enumerate((False, ["empty-thinking"], True)):
        kwargs = {"enable_thinking": False}
        form = load(hash_, tmp_path / str(number), template_patches=wanted, template_kwargs=kwargs)
        verdict = check_bridge(form, bytes([USER, ASSISTANT]), bytes([USER]), None)
        verdicts.append(verdict.bridged and not verdict.rewrites)
        written = form.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **kwargs)
        assert form.render(messages) == list(written)
    assert verdicts == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("hash_", sorted({hash_ for _, hash_ in CASES}))
def test_every_prompt_is_the_patched_templates_or_begins_a_branch(hash_: str, tmp_path: Path) -> None:
    form = load(hash_, tmp_path, template_patches=True)
    wrong = {name: result.why for name in SCENARIOS for result in play(form, name) if result.verdict == "WRONG"}
    assert wrong == {}


def test_every_case_has_a_script() -> None:
    tested = {*SCRIPTS, *(f"{hash_} empty-thinking" for hash_ in ("a55ee1b1660128b7", "87a2728cb8dc9fe4"))}
    assert tested == {f"{hash_} {patch.name}" for patch, hash_ in CASES}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (True, "no patch is known for the chat template of"),
        (["keep-thinking"], "`keep-thinking` is not a patch of this chat template (hash "),
        (["keep"], "`keep` is unknown; the patches are empty-thinking, keep-thinking, orphan-think, tool-calls"),
    ],
)
def test_a_patch_that_has_no_effect_is_refused(wanted: Any, words: str, tokenizer_dirs: dict[str, Path]) -> None:
    with pytest.raises(RenderError) as caught:
        load_format(ModelSpec(path=str(tokenizer_dirs["plain"]), template_patches=wanted), Path())
    assert words in str(caught.value)


def test_patches_and_a_family_renderer_are_refused(tokenizer_dirs: dict[str, Path]) -> None:
    with pytest.raises(RenderError, match="has no effect with `renderer: qwen3`"):
        load_format(ModelSpec(path=str(tokenizer_dirs["thinking"]), template_patches=True, renderer="qwen3"), Path())
