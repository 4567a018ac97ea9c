"""No template is silently wrong: hostile and random templates against what `apply_chat_template` of transformers writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest
from chat_kit import make_tokenizer
from exactness import Player
from hostile_templates import HOSTILE, episode, random_template

from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

Make = Callable[[str], ChatTemplate]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small", "")


def with_template(folder: Path, source: str, at: Path) -> ChatTemplate:
    """A tokenizer's chat format with another template."""
    (at / "chat_template.jinja").write_text(source)
    return load_format(ModelSpec(path=str(folder), chat_template=str(at / "chat_template.jinja")), Path())


@pytest.fixture(scope="module")
def hostile(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The chat format with a hostile template; made once for each."""
    return cache(lambda name: with_template(folder, HOSTILE[name], tmp_path_factory.mktemp("hostile")))


def wrong_turns(form: ChatTemplate, episodes: int, seed: int = 0) -> list[str]:
    """What went wrong in random episodes."""
    results = [Player(form, False).play(episode(Random(1000 * number + seed))) for number in range(episodes)]
    assert any(result.verdict != "refused" for result in results) or episodes < 10, results[0].why
    return [result.why for result in results if result.verdict == "WRONG"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_never_silently_wrong(hostile: Make, name: str) -> None:
    assert wrong_turns(hostile(name), 8) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer", "episodes"),
    [("qwen3", 60), *(pytest.param(name, 300, marks=pytest.mark.exhaustive) for name in ("small", "qwen3"))],
)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_never_silently_wrong_in_many_episodes(
    folder: Path, shipped: Make, tmp_path: Path, name: str, tokenizer: str, episodes: int
) -> None:
    own = folder if tokenizer == "small" else Path(shipped(tokenizer).fast.name_or_path)
    assert wrong_turns(with_template(own, HOSTILE[name], tmp_path), episodes, seed=1) == []


@pytest.mark.parametrize("seed", range(6))
def test_a_random_template_is_never_silently_wrong(folder: Path, tmp_path: Path, seed: int) -> None:
    source = random_template(Random(seed))
    assert wrong_turns(with_template(folder, source, tmp_path), 5) == [], source


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [*range(4), *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(4, 20))]
)
def test_random_templates_are_never_silently_wrong(folder: Path, tmp_path: Path, part: int) -> None:
    for seed in range(100 + 4 * part, 104 + 4 * part):
        source = random_template(Random(seed))
        form = with_template(folder, source, tmp_path)
        results = [Player(form, False).play(episode(Random(1000 * number + seed))) for number in range(100)]
        assert [result.why for result in results if result.verdict == "WRONG"] == [], source


KEYED = {
    "first line depends on words of a later user": ("hurry",),
    "the newest of /think and /no_think in any message": ("/no_think", "/think"),
    "depends on the last message": ("?",),
    "asks for an answer in one mode": ("answer",),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_keyed_and_what_is_rendered_each_time(hostile: Make, name: str) -> None:
    form = hostile(name)
    assert (form.bridges.whole is None) == (name in KEYED)
    if name in KEYED:
        assert form.source.keys.literals == KEYED[name]  # type: ignore[attr-defined]
