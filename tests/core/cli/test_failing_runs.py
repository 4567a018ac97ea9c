"""A run that fails as a whole: it stops, says why once, and exits with 3."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from slow_cases import slow_after, slow_but
from typer.testing import CliRunner
from written_specs import scripted_spec

from engine.cli.main import app
from engine.store import RunStore, list_runs

SPEC_CODE = '''
from pathlib import Path

from engine.schemas.environment import UserTurn


class User:
    """Raises while the file `broken` is there, in every `every`-th episode; in ways that take turns with `ways: 2`."""

    def __init__(self, folder, every=1, ways=1):
        self.folder, self.every, self.ways = Path(folder), every, ways

    def respond(self, view):
        number = int(view.task.id[1:])
        if (self.folder / "broken").exists() and number % self.ways:
            return "no turn; return a UserTurn"
        if (self.folder / "broken").exists() and number % self.every == 0:
            return {}["missing"]
        return UserTurn(satisfied=True, solved=True)


class Board:
    def __init__(self, folder):
        if (Path(folder) / "broken").exists():
            raise OSError("no licence")

    def reset(self, task, seed):
        from engine.schemas.environment import Reset
        return Reset()


def scorer(folder):
    raise RuntimeError("no such grader")


def add(a: int, b: int) -> int:
    return {1, 2}  # not JSON
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "failing_code.py").write_text(SPEC_CODE)
    (tmp_path / "broken").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write_spec(folder: Path, tokenizer: Path, *, tasks: int = 40, every: int = 1, **more: Any) -> Path:
    spec: dict[str, Any] = {
        **scripted_spec("failing", tokenizer, ["It is 42."], tasks),
        "user": {"use": "failing_code:User", "with": {"folder": str(folder), "every": every}},
        "limits": {"assistant_turns": 2, "turn_tokens": 64},
        "rollout": {"concurrency": 4, "live_episodes": 4},
        **more,
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in spec.items() if value is not None}, sort_keys=False))
    return path


def engine(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "400", "TERM": "dumb"})


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def run_of(folder: Path) -> RunStore:
    return RunStore.open(list_runs(folder / "runs")[-1], readonly=True)


def test_a_run_whose_every_episode_fails_in_one_way_stops_and_says_why(folder: Path, tiny_tokenizer_dir: Path) -> None:
    spec = write_spec(folder, tiny_tokenizer_dir, tasks=400)
    found = engine("run", spec, "-q")
    assert found.exit_code == 3, found.output
    place = f"{spec}:{line_of(spec, 'failing_code:User')}:"
    assert (
        f"Stopped: the first 16 finished episodes failed with one cause, user_error (user) at {place}" in found.stderr
    )
    assert "raised KeyError: 'missing'" in found.stderr
    assert re.search(rf"\n(\d+) of \1 episodes failed: \1 user_error \(user\) at {place}", found.stderr)
    assert found.stderr.count("Traceback (most recent call last)") == 1
    assert 'return {}["missing"]' in found.stderr
    assert f"user_error (user) at {place}" in found.stdout  # the summary's table
    with run_of(folder) as store:
        assert 16 <= len(store.finished()) <= 16 + 4
        assert store.status == "interrupted"


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_small_run_fails_as_a_whole_when_all_of_it_does(folder: Path, tiny_tokenizer_dir: Path, tasks: int) -> None:
    found = engine("run", write_spec(folder, tiny_tokenizer_dir, tasks=tasks), "-q")
    assert found.exit_code == 3
    assert f"the first {tasks} finished episode" in found.stderr
    with run_of(folder) as store:
        assert len(store.finished()) == tasks


@pytest.mark.parametrize(
    ("changes", "cause", "entry"),
    [
        ({"user": None, "environment": {"use": "failing_code:Board"}}, "environment_error (environment)", "Board"),
        (
            {"user": None, "machine": "single_turn", "rewards": {"scorer": {"use": "failing_code:scorer"}}},
            "environment_error (environment)",
            "scorer",
        ),
    ],
    ids=["environment", "scorer"],
)
def test_the_cause_names_the_entry_that_failed(
    folder: Path, tiny_tokenizer_dir: Path, changes: dict[str, Any], cause: str, entry: str
) -> None:
    if "environment" in changes:
        changes = changes | {"environment": changes["environment"] | {"with": {"folder": str(folder)}}}
        changes["machine"] = "single_turn"
    spec = write_spec(folder, tiny_tokenizer_dir, **changes)
    found = engine("run", spec, "-q")
    assert found.exit_code == 3, found.output
    assert f"{cause} at {spec}:{line_of(spec, f'failing_code:{entry}')}:" in found.stderr


@pytest.mark.parametrize("command", slow_after(1, ["run", "eval"]))
@pytest.mark.parametrize(("ways", "keep_going"), [(2, False), (1, True)])
def test_a_run_whose_every_episode_fails_is_not_a_success(
    folder: Path, tiny_tokenizer_dir: Path, command: str, ways: int, keep_going: bool
) -> None:
    """Nothing stops it: `--keep-going`, or there are several causes."""
    user = {"use": "failing_code:User", "with": {"folder": str(folder), "ways": ways}}
    spec = write_spec(folder, tiny_tokenizer_dir, tasks=18, user=user)
    found = engine(command, spec, "-q", *["--keep-going"] * keep_going)
    assert found.exit_code == 1, found.output
    place = f"(user) at {spec}:{line_of(spec, 'failing_code:User')}:"
    line = next(line for line in found.stderr.splitlines() if line.startswith("18 of 18 episodes failed: "))
    causes = line.removeprefix("18 of 18 episodes failed: ").split(", ")
    assert {cause.partition(place)[0].strip() for cause in causes} == (
        {"18 user_error"} if ways == 1 else {"9 user_error", "9 user_bad_reply"}
    ), line
    assert re.search(r"\nThe first one: .*(raised KeyError: 'missing'|UserTurn)", found.stderr), found.stderr
    (run,) = list_runs(folder / "runs")
    assert f"Correct it, then: engine run --resume runs/{run.name} --retry-failed all\n" in found.stderr
    with run_of(folder) as store:
        assert len(store.finished()) == 18
    assert engine("run", "--resume", run, "-q").exit_code == 1  # nothing to do, and nothing better
    (folder / "broken").unlink()
    assert engine("run", "--resume", run, "--retry-failed", "all", "-q").exit_code == 0


@pytest.mark.parametrize("every", [2, 15])
def test_a_run_in_which_others_succeed_goes_on(folder: Path, tiny_tokenizer_dir: Path, every: int) -> None:
    found = engine("run", write_spec(folder, tiny_tokenizer_dir, every=every), "-q")
    assert found.exit_code == 0, found.output
    row = next(line for line in found.stdout.splitlines() if "user_error (user) at" in line)
    assert f" {-(-40 // every)} " in row
    assert "raised KeyError: 'missing'" in row


@pytest.mark.parametrize("blame", slow_but(["user", "all"], "user"))
def test_failed_episodes_are_run_again_on_request(folder: Path, tiny_tokenizer_dir: Path, blame: str) -> None:
    engine("run", write_spec(folder, tiny_tokenizer_dir, every=4), "-q")
    (run,) = list_runs(folder / "runs")
    with run_of(folder) as store:
        failed = [row.id for row in store.episodes() if row.failure]
        fine = {row.id: store.trajectory(row.id).json() for row in store.episodes() if not row.failure}
        old = {key: [entry.json() for entry in store.journal(key)] for key in failed}
    assert len(failed) == 10
    (folder / "broken").unlink()
    for others in ("backend", "environment", "tool"):
        assert engine("run", "--resume", run, "--retry-failed", others, "-q").exit_code == 0
    with run_of(folder) as store:
        assert [row.id for row in store.episodes() if row.failure] == failed  # not what was asked for
    found = engine("run", "--resume", run, "--retry-failed", blame, "-q")
    assert found.exit_code == 0, found.output
    assert "10 failed episodes are run again" in found.stdout
    assert "40 episodes" in found.stdout
    with run_of(folder) as store:
        rows = {row.id: row for row in store.episodes()}
        assert not [row for row in rows.values() if row.failure]
        assert {key: rows[key].attempt for key in rows} == {key: int(key in failed) for key in rows}
        assert {key: store.trajectory(key).json() for key in fine} == fine
        assert {key: [entry.json() for entry in store.journal(key, 0)] for key in failed} == old
        assert len(list(store.trajectories())) == 40
    exported = engine("export", run, "--format", "jsonl", "--out", folder / "rows.jsonl")
    assert exported.exit_code == 0, exported.output
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert len({row["episode_id"] for row in lines}) == len(lines) == 40


def test_retry_failed_without_a_run_is_wrong_usage(folder: Path, tiny_tokenizer_dir: Path) -> None:
    found = engine("run", write_spec(folder, tiny_tokenizer_dir), "--retry-failed", "user")
    assert found.exit_code == 2
    assert not list_runs(folder / "runs")


@pytest.mark.parametrize(("failing", "code"), [(4, 0), (5, 3)])
def test_a_run_with_more_than_a_tenth_failed_by_its_backend_says_so(
    folder: Path, tiny_tokenizer_dir: Path, failing: int, code: int
) -> None:
    (folder / "broken").unlink()
    cases = [{"task": f"t{39 - n}", "replies": [{"error": "no memory"}]} for n in range(failing)]
    (folder / "replies.yaml").write_text(yaml.safe_dump({"replies": ["It is 42."], "cases": cases}))
    backend = {"kind": "scripted", "replies": "replies.yaml"}
    found = engine("run", write_spec(folder, tiny_tokenizer_dir, backend=backend), "-q")
    assert found.exit_code == code, found.output
    assert (f"The backend failed {failing} of 40 episodes" in found.stderr) == (code == 3)
    assert ("--retry-failed backend" in found.stderr) == (code == 3)
    assert "scripted_error (backend)" in found.stdout


def test_help_names_the_exit_statuses() -> None:
    found = engine("run", "--help")
    words = " ".join(found.output.replace("│", " ").split())
    for said in ("0 when every episode", "1 when the spec", "2 when the command line", "3 when no server", "130 after"):
        assert said in words, words


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        *(
            (command, arguments, words)
            for command in ("run", "train")
            for arguments, words in (
                ([], "give a spec to"),
                (["--resume", "latest", "spec.yaml"], "leave out SPEC"),
                (["spec.yaml", "--no-such-option"], "No such option"),
            )
        ),
    ],
)
def test_a_wrong_command_line_exits_with_2(command: str, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, [command, *arguments])
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_a_resume_refuses_a_limit() -> None:
    result = CliRunner().invoke(app, ["run", "--resume", "latest", "--limit", "2"])
    assert result.exit_code == 2
    assert "--resume continues a run with its own spec; leave out SPEC and --limit" in result.output
