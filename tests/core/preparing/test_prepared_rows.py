"""Lengths of prompts and facts of SFT rows: the same from one process, from two and from disk; other inputs are other entries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import slow_but
from written_specs import save_spec

from engine.plugins.sft.row_facts import facts_of, open_rows
from engine.preparing import processes
from engine.runner.prompt_lengths import PromptLengths
from engine.schemas.message import Message
from engine.schemas.model import ModelSpec
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.tokens.inputs import rendering_digest
from engine.tokens.loading import load_format


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; jobs of one row each."""
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("engine.runner.prompt_lengths.PART_BYTES", 1)
    monkeypatch.setattr("engine.plugins.sft.row_facts.PART_BYTES", 1)
    return tmp_path / "cache"


@pytest.fixture
def jobs_done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the jobs that are done in any process, and not read from disk."""
    done: list[str] = []
    put = processes.PreparedCache.put
    monkeypatch.setattr(
        processes.PreparedCache, "put", lambda self, key, value: (done.append(key), put(self, key, value))
    )
    return done


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


@pytest.mark.parametrize("suffix", slow_but([".jsonl", ".parquet"], ".parquet"))
def test_facts_of_rows(tmp_path: Path, cache: Path, jobs_done: list[str], suffix: str) -> None:
    random = np.random.default_rng(0)
    rows = [_row(number, random.integers(0, 1000, 5 + number).tolist()) for number in range(7)]
    path = tmp_path / f"rows{suffix}"
    _write(path, rows)
    kept = []
    for number, (count, done) in enumerate(((1, 7), (2, 0), (2, 7), (1, 0))):
        if number == 2:
            shutil.rmtree(cache)
        jobs_done.clear()
        kept.append(list(facts_of(path, open_rows(path), count, alone=0.0)))
        assert len(jobs_done) == done
    assert kept[1:] == kept[:1] * 3
    for place, (facts, row) in enumerate(zip(kept[0], rows, strict=True)):
        assert (facts.number, facts.run, facts.episode) == (place + 1, "run", f"e{place}")
        assert (facts.tokens, facts.largest_id) == (len(row["input_ids"]), max(row["input_ids"]))
        assert (facts.trained, facts.trainable) == (sum(row["loss_mask"]), bool(row["trainable"]))
        assert (facts.reward, facts.rewards) == (row["outcome"]["reward"], {"a": 0.5, "b": float(place)})
        assert facts.images == [f"sha256:{place}"]
    assert len({facts.identity for facts in kept[0]}) == 7
    _write(path, [*rows[:3], _row(3, [1, 2, 3]), *rows[4:]])
    assert [facts.tokens for facts in facts_of(path, open_rows(path), 1)] == [5, 6, 7, 3, 9, 10, 11]


def _row(number: int, ids: list[int]) -> dict[str, Any]:
    mask = [0, *([1] * (len(ids) - 1))]
    rewards = [{"name": "a", "value": 0.5}, {"name": "b", "value": float(number)}, {"name": "a", "value": 9.0}]
    return {
        "run_id": "run",
        "task_id": "t",
        "episode_id": f"e{number}",
        "branch": 0,
        "trainable": number != 2,
        "input_ids": ids,
        "loss_mask": mask,
        "turn_ids": mask,
        "outcome": {"reward": None if number == 4 else number / 3, "rewards": rewards},
        "images": [{"image": f"sha256:{number}", "start": 0, "end": 1}],
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)


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
