"""`engine view`: its arguments, and the file that `--export` writes."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
from command_line import engine_here
from listing_kit import fill, new_run
from slow_cases import slow_but_each

from engine.store import RunStore


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six tasks with two samples each, all finished."""
    with new_run(tmp_path_factory.mktemp("runs")) as store:
        asyncio.run(fill(store))
    return store.folder


def data_of(file: Path) -> dict[str, object]:
    """The data of a file of `--export`."""
    found = re.search(r'<script type="application/json" id="offline-data">(.*?)</script>', file.read_text(), re.DOTALL)
    assert found is not None
    data: dict[str, object] = json.loads(found[1])
    return data


def export(run: Path, folder: Path, *arguments: str) -> tuple[dict[str, object], str]:
    """Write a file; its data, and what the command said."""
    code, told, problems = engine_here("view", run, "--export", "x.html", *arguments, cwd=folder)
    assert code == 0, told + problems
    return data_of(folder / "x.html"), told + problems


def test_a_file_holds_the_chosen_episodes_their_tokens_and_groups(run: Path, tmp_path: Path) -> None:
    data, told = export(run, tmp_path, "--filter", 'outcome.solved && task.level == "hard"')
    assert [row["episode"] for row in data["rows"]] == ["t5/0", "t5/1"]  # type: ignore[index, attr-defined]
    documents = data["documents"]
    assert isinstance(documents, dict)
    names = {key.split("\n")[0] for key in documents}
    assert names == {"sources", "episode", "tokens", "group", "machine"}
    assert [each["episode"] for each in documents[f"group\n{run.name}\nt5"]["samples"]] == ["t5/0", "t5/1"]
    assert "2 of 2 episodes" in told
    assert "left out" not in told


@pytest.mark.parametrize("room", slow_but_each(4, range(2_000, 120_000, 19_000)))
def test_a_file_is_never_larger_than_the_limit_and_says_what_is_left_out(run: Path, tmp_path: Path, room: int) -> None:
    empty, _ = export(run, tmp_path, "--filter", "outcome.reward > 1000.0")
    assert empty["rows"] == []
    limit = (tmp_path / "x.html").stat().st_size + room
    data, told = export(run, tmp_path, "--max-size", f"{limit}B")
    assert (tmp_path / "x.html").stat().st_size <= limit
    rows = data["rows"]
    assert isinstance(rows, list)
    documents = data["documents"]
    assert isinstance(documents, dict)
    with RunStore.open(run, readonly=True) as store:
        branches = {each.episode_id: len(each.branches) for each in store.trajectories()}
    kept = {row["episode"] for row in rows}
    whole = {
        name for name in kept if all(f"tokens\n{run.name}\n{name}\n{at}" in documents for at in range(branches[name]))
    }
    assert all(f"episode\n{run.name}\n{name}" in documents for name in kept)
    note = documents["sources"]["note"] or ""
    assert (f"{12 - len(kept)} of 12" in note) == (len(kept) < 12)
    assert (f"the tokens of episodes that do not fit into {limit / 1e6:g} MB: {len(kept - whole)} of 12" in note) == (
        kept != whole
    )
    assert ("left out" in told) == bool(note)


def test_a_limit_below_the_pages_themselves_is_an_error_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    code, _, problems = engine_here("view", run, "--export", "x.html", "--max-size", "10kB", cwd=tmp_path)
    assert code == 2
    assert "raise --max-size" in problems
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--filter", "outcome.solved"], "belong to --export"),
        (["--export", "x.html", "--max-size", "big"], "--max-size"),
        (["--export", "x.html", "--filter", "outcome.rewrd > 1"], "did you mean"),
        (["nothing-like-this"], "nothing-like-this"),
    ],
)
def test_a_wrong_argument_is_refused(run: Path, tmp_path: Path, arguments: list[str], told: str) -> None:
    names = [] if arguments == ["nothing-like-this"] else [run]
    code, out, problems = engine_here("view", *names, *arguments, cwd=tmp_path)
    assert code == 2
    assert told in out + problems


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named_with_the_extra(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    imported = (
        "engine.plugins.view.web",
        "engine.plugins.view.web",
        f"{package}.",
    )  # also the package's parts: an import finds them first
    for name in [each for each in sys.modules if each.startswith(imported)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, _, problems = engine_here("view", run, cwd=tmp_path)
    assert code == 2
    assert f"needs the package {package}" in problems
    assert "episode-engine[view]" in problems


def test_runs_that_cannot_be_read_are_named_and_the_others_are_shown(run: Path, tmp_path: Path) -> None:
    for name in ("broken", "fine"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "broken" / "run.db").write_text("not a database")
    for file in run.iterdir():
        (tmp_path / "runs" / "fine" / file.name).write_bytes(file.read_bytes())
    code, told, problems = engine_here("view", "--export", "x.html", cwd=tmp_path)
    assert code == 0, told + problems
    assert "not shown" in problems
    assert "12 of 12 episodes" in told
