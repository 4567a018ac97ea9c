"""Lengths of prompts: the same from one process, from two and from disk; other inputs are other entries."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from written_specs import save_spec

from engine.plugins.preparing.jobs import rendering_digest
from engine.plugins.preparing.overlong import PromptLengths
from engine.schemas.message import Message
from engine.schemas.model import ModelSpec
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.tokens.loading import load_format


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; jobs of one row each."""
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("engine.plugins.preparing.overlong.PART_BYTES", 1)
    return tmp_path / "cache"


def test_lengths_of_prompts(tmp_path: Path, tiny_tokenizer_dir: Path, cache: Path, jobs_done: list[str]) -> None:
    rows = [{"q": "Ünï 数字 word " * words + "<|im_end|>" * (words % 3)} for words in (3, 400, 5, 90, 401, 700)]
    spec = {
        "spec": "episode/v1",
        "name": "lengths",
        "model": {"path": str(tiny_tokenizer_dir)},
        "backend": {"kind": "scripted", "replies": []},
        "tasks": {"source": "inline", "rows": rows, "overlong": "drop"},
        "limits": {"episode_tokens": 300, "turn_tokens": 32},
        "prompt": [{"role": "system", "content": "Say no."}, {"role": "user", "content": "{{q}}"}],
        "machine": "single_turn",
    }
    path = save_spec(tmp_path / "spec.yaml", spec)
    loaded = load_spec(path)
    form = load_format(loaded.spec.model, loaded.base)
    tasks = load_tasks(loaded)
    said = [[{"role": "system", "content": "Say no."}, {"role": "user", "content": row["q"]}] for row in rows]
    wanted = [len(form.render([Message(**each) for each in messages], None)) for messages in said]
    for number, (count, done) in enumerate(((1, 6), (2, 0), (2, 6), (1, 0))):
        if number == 2:
            shutil.rmtree(cache)
        jobs_done.clear()
        found = PromptLengths(loaded, form, count, alone=0.0).of(tasks, 0)
        assert found.tolist() == wanted
        assert len(jobs_done) == done
    bounds = PromptLengths(loaded, form, 1).of(tasks, 10**6)
    assert (bounds >= wanted).all()


CHANGES: dict[str, Any] = {
    "tokenizer": lambda folder: _edit(folder / "tokenizer.json", '"added_tokens"', ' "added_tokens"'),
    "template": lambda folder: _edit(folder / "tokenizer_config.json", "You are", "You were"),
    "template file": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
    "processor": lambda folder: (folder / "preprocessor_config.json").write_text('{"min_pixels": 1}'),
    "config": lambda folder: (folder / "config.json").write_text('{"vocab_size": 5}'),
    "removed": lambda folder: (folder / "tokenizer_config.json").unlink(),
}


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Files as a model has them. They are only read, so they need not be a model's."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"added_tokens": []}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "You are {{ messages }}"}')
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_s_files_changes_the_digest(tmp_path: Path, model_folder: Path, change: str) -> None:
    model = ModelSpec(path="model")
    before = rendering_digest(model, tmp_path)
    assert rendering_digest(model, tmp_path) == before
    CHANGES[change](model_folder)
    assert rendering_digest(model, tmp_path) != before


@pytest.mark.parametrize(
    "field",
    [
        {"template_kwargs": {"enable_thinking": False}},
        {"tool_role": "user"},
        {"allow_special": True},
        {"tool_calls": "hermes"},
    ],
    ids=str,
)
def test_a_change_of_the_spec_s_model_changes_the_digest(
    tmp_path: Path, model_folder: Path, field: dict[str, Any]
) -> None:
    plain, other = ModelSpec(path="model"), ModelSpec(path="model", **field)
    assert rendering_digest(plain, tmp_path) != rendering_digest(other, tmp_path)
    shutil.copytree(model_folder, tmp_path / "elsewhere")
    assert rendering_digest(plain, tmp_path) == rendering_digest(ModelSpec(path="elsewhere"), tmp_path)


def test_a_change_of_the_spec_s_own_template_changes_the_digest(tmp_path: Path, model_folder: Path) -> None:
    model = ModelSpec(path="model", chat_template="own.jinja")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    before = rendering_digest(model, tmp_path)
    (tmp_path / "own.jinja").write_text("{{ messages[0] }}")
    assert rendering_digest(model, tmp_path) != before
