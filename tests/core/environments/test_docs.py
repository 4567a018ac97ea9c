"""The guide's code is real: its examples are run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import run_to_store

from engine.schemas.trajectory import Trajectory
from engine.spec.load import load_spec
from engine.validate import check_spec

GUIDE = Path(__file__).parents[3] / "docs" / "environments.md"
BLOCK = re.compile(r"^```(?:python|yaml)\n# (\S+\.(?:py|yaml))(?::[^\n]*)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every file that the guide prints."""
    folder = tmp_path_factory.mktemp("guide")
    for name, text in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def run(spec: Path, tokenizer: Path) -> Trajectory:
    out = spec.parent / "runs" / spec.stem
    with run_to_store(spec, out, settings=[f"model.path={tokenizer}"]) as store:
        (trajectory,) = store.trajectories()
    return trajectory


def test_the_guide_prints_whole_files(folder: Path) -> None:
    assert sorted(file.name for file in folder.glob("*.*")) == [
        "counter.py",
        "desk.py",
        "guess.py",
        "guess.yaml",
        "reader.py",
        "reader.yaml",
        "vault.py",
        "vault.yaml",
    ]


@pytest.mark.parametrize("name", ["vault.yaml", "reader.yaml", "guess.yaml"])
def test_its_specs_are_valid(folder: Path, name: str) -> None:
    assert [str(item) for item in check_spec(load_spec(folder / name)) if item.severity == "error"] == []


def test_the_vault_opens_at_its_own_steps(folder: Path, tiny_tokenizer_dir: Path) -> None:
    episode = run(folder / "vault.yaml", tiny_tokenizer_dir)
    assert [(message.role, message.text) for message in episode.messages] == [
        ("user", "Guess the number, 1 to 15. Ask `compare`, then answer <open>N</open>."),
        ("assistant", ""),
        ("tool", "the secret is higher"),
        ("assistant", "<open>11</open>"),
        ("user", "It stays shut."),
        ("assistant", "<open>12</open>"),
    ]
    assert [event for _, event, _ in episode.path] == [
        "ready",
        "tool_calls",
        "results",
        "answered",
        "shut",
        "answered",
        "open",
    ]
    assert [turn.rewards for turn in episode.turns] == [{}, {}, {"opened": 1.0, "brevity": -0.03}]
    assert episode.outcome.solved


def test_a_game_is_one_function(folder: Path, tiny_tokenizer_dir: Path) -> None:
    episode = run(folder / "guess.yaml", tiny_tokenizer_dir)
    assert [message.text for message in episode.messages if message.role == "user"] == [
        "Guess my number, from 1 to 15. Write <guess>7</guess>.",
        "Higher.",
        "I see no guess.",
    ]
    assert [turn.rewards for turn in episode.turns] == [{}, {"format": -0.1}, {"won": 1.0}]
    assert episode.outcome.solved


def test_a_function_without_a_generator_keeps_its_state_in_facts(folder: Path, tiny_tokenizer_dir: Path) -> None:
    text = (folder / "guess.yaml").read_text().replace("guess:guess", "counter:counter").replace("most: 15", "most: 9")
    (folder / "counter.yaml").write_text(re.sub("replies: .*]}", "replies: [a, abc, ab]}", text))
    episode = run(folder / "counter.yaml", tiny_tokenizer_dir)
    assert [turn.rewards["longer"] for turn in episode.turns] == [1.0, 1.0, -1.0]


def test_the_reader_pays_the_turn_that_found_the_book(folder: Path, tiny_tokenizer_dir: Path) -> None:
    episode = run(folder / "reader.yaml", tiny_tokenizer_dir)
    assert [message.text for message in episode.messages if message.role == "tool"] == [
        "A walk of 10 miles.",
        "16.093 km",
    ]
    assert [message.text for message in episode.messages if message.role == "user"] == [
        "How long is The Long Walk?",
        "How far is that in kilometres?",
    ]
    assert [turn.rewards for turn in episode.turns] == [{"fee": -0.1, "thanks": 0.5}, {}, {}, {"thanks": 0.5}]
    assert [(posting.turn, posting.op, posting.source) for posting in episode.postings] == [
        (0, "add", "tool:look_up"),
        (3, "add", "user"),
        (3, "transfer", "user"),
        (0, "transfer", "user"),
    ]
    assert episode.facts == {"found": True, "asked": True}
    assert episode.outcome.solved
