"""A run's head says what it was made from, and gives the spec back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.errors import StoreError
from engine.spec.load import load_spec
from engine.store import RunHeader, RunStore, find_run, list_runs, new_run_id
from engine.store.header import package_versions

BASE = """
model: {path: tiny, chat_template: templates/chat.jinja}
backend: {kind: scripted, replies: [hello]}
tasks: {source: jsonl, path: rows.jsonl}
"""
SPEC = """
extends: base/base.yaml
spec: episode/v1
name: my-task
sampling: {temperature: 0.5}
limits: {tool_seconds: 500ms}
rollout: {seed: 7}
"""


def load(folder: Path, overrides: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
    (folder / "base").mkdir(exist_ok=True)
    (folder / "base" / "base.yaml").write_text(BASE)
    (folder / "spec.yaml").write_text(SPEC)
    return load_spec(folder / "spec.yaml", overrides)


def test_the_header_holds_the_resolved_spec_and_versions(tmp_path: Path) -> None:
    header = RunHeader.of(load(tmp_path, ("limits.user_turns=2",)), overrides=["limits.user_turns=2"])
    assert re.fullmatch(r"my-task-\d{8}-\d{6}-[0-9a-f]{4}", header.run_id)
    assert (header.name, header.overrides) == ("my-task", ["limits.user_turns=2"])
    assert header.spec["rollout"]["seed"] == 7
    assert header.spec["limits"]["user_turns"] == 2
    assert header.spec["limits"]["tool_seconds"] == 0.5
    assert header.spec["limits"]["assistant_turns"] == 8
    assert header.sources == {str(tmp_path / "spec.yaml"): SPEC, str(tmp_path / "base" / "base.yaml"): BASE}
    assert header.packages == package_versions()
    assert {"python", "numpy", "pydantic"} <= set(header.packages)


def test_a_stored_run_gives_its_spec_back_though_the_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load(Path(), ("limits.user_turns=2",))
    with RunStore.create("runs", RunHeader.of(loaded, overrides=["limits.user_turns=2"])) as store:
        folder = store.folder.absolute()
    (tmp_path / "spec.yaml").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with RunStore.open(folder, readonly=True) as store:
        again = store.loaded_spec()
    assert again.spec == loaded.spec
    assert (again.data, again.path) == (loaded.data, loaded.path)
    assert again.resolve("rows.jsonl", ("tasks", "path")) == tmp_path / "base" / "rows.jsonl"
    assert again.origin(("rollout", "seed")).line == 7
    assert again.origin(("limits", "user_turns")) == loaded.origin(("limits", "user_turns"))


def test_run_ids_of_one_name_sort_by_time() -> None:
    assert new_run_id("a", 0.0).startswith("a-19700101-000000-")
    assert new_run_id("a", 1e9) < new_run_id("a", 1e9 + 1)


def make_runs(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        RunStore.create(
            folder, RunHeader(run_id=name, name="n", created=100.0 - number, engine_version="0", spec={})
        ).close()


def test_a_run_is_found_by_folder_id_beginning_or_as_the_latest(tmp_path: Path) -> None:
    make_runs(tmp_path, "a-1", "a-2", "b-1")
    assert find_run("a-2", tmp_path) == tmp_path / "a-2"
    assert find_run("b", tmp_path) == tmp_path / "b-1"
    assert find_run(tmp_path / "a-1", "nowhere") == tmp_path / "a-1"
    assert find_run(tmp_path / "a-1" / "run.db", "nowhere") == tmp_path / "a-1"
    assert find_run("latest", tmp_path) == tmp_path / "a-1"
    assert list_runs(tmp_path) == [tmp_path / name for name in ("a-1", "a-2", "b-1")]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a", "`a` is the beginning of 2 runs in OUT: a-1, a-2; give more of it"),
        ("b-2", "no run `b-2` in OUT; did you mean `b-1`?"),
        ("zzzzzz", "no run `zzzzzz` in OUT; give a run's folder, its id, or `latest`"),
        ("", "no run `` in OUT; give a run's folder, its id, or `latest`"),
    ],
)
def test_a_word_that_means_no_run_is_told_what_would(tmp_path: Path, word: str, message: str) -> None:
    make_runs(tmp_path, "a-1", "a-2", "b-1")
    with pytest.raises(StoreError) as caught:
        find_run(word, tmp_path)
    assert str(caught.value).replace(str(tmp_path), "OUT") == message


def test_where_there_are_no_runs_it_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there are no runs in .*; `engine run SPEC` makes one"):
        find_run("latest", tmp_path / "none")


def test_a_header_says_whether_the_run_is_an_evaluation(tmp_path: Path) -> None:
    assert (RunHeader.of(load(tmp_path)).evaluation, RunHeader.of(load(tmp_path), evaluation=True).evaluation) == (
        False,
        True,
    )
