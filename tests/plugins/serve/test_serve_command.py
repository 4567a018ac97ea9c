"""`engine serve --api` as a process: the lines of the documentation, `kill -9`, a resume, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_episode_service import ASK, http, write_served
from typer.testing import CliRunner

from engine.cli.main import app
from engine.store.store import RunStore, find_run

ROOT = Path(__file__).parents[3]
TOKEN = "a secret token"


def documented(language: str) -> str:
    """The block of this language in the section about the service."""
    section = (ROOT / "docs/agents.md").read_text().split("## Programs that run elsewhere")[1].split("\n## ")[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


@contextmanager
def service(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start the command; its process, and the lines up to the address."""
    env = os.environ | {"EPISODE_ENGINE_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "engine.cli.main", "serve", "--api", "--quiet", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("Serving "):
                break
        else:
            raise AssertionError("\n".join(lines))
        yield process, lines
    finally:
        process.kill()
        process.wait()


def address(lines: list[str]) -> str:
    found = re.search(r"http://\S+:(\d+);", lines[-1])
    assert found is not None
    return f"http://127.0.0.1:{found[1]}"


def opened(lines: list[str]) -> dict[str, Any]:
    status, found, _ = http("POST", address(lines) + "/episodes", {}, TOKEN)
    assert status == 201, found
    return found  # type: ignore[no-any-return]


def chatted(episode: dict[str, Any]) -> None:
    body = {"model": "policy", "messages": [ASK]}
    assert http("POST", episode["base_url"] + "/chat/completions", body, episode["key"])[0] == 200


@pytest.mark.slow
def test_the_lines_of_the_documentation_work_as_they_are_written(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    (tmp_path / "spec.yaml").write_text(documented("yaml"))
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "question": "What is 17 + 25?"}\n')
    replies = yaml.safe_dump({"kind": "scripted", "replies": ["It is 42."]}, default_flow_style=True, width=10**6)
    changes = ["--set", f"model.path={tiny_tokenizer_dir}", "--set", f"backend={replies}"]
    with service(tmp_path, "spec.yaml", "--out", "runs", *changes) as (process, lines):
        assert not any(TOKEN in line for line in lines)
        script = documented("bash").replace("http://127.0.0.1:8700", address(lines))
        env = os.environ | {"EPISODE_ENGINE_TOKEN": TOKEN}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "It is 42." in done.stdout
        ended = json.loads(done.stdout[done.stdout.rindex('{"episode"') :])
        assert (ended["event"], ended["reward"], ended["failure"]) == ("exited", 1.5, None)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    with RunStore.open(find_run("latest", tmp_path / "runs"), readonly=True) as store:
        assert store.statuses() == {"a/0": "done"}
    result = CliRunner().invoke(app, ["replay", str(find_run("latest", tmp_path / "runs"))])
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_after_a_kill_what_was_finished_stays_and_what_was_open_begins_again(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    spec: dict[str, Any] = yaml.safe_load(documented("yaml")) | {
        "model": {"path": str(tiny_tokenizer_dir)},
        "backend": {"kind": "scripted", "replies": ["It is 42."]},
        "tasks": {"source": "inline", "rows": [{"id": name} for name in "abc"], "id": "id"},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    with service(tmp_path, "spec.yaml", "--out", "runs") as (process, lines):
        first, second = opened(lines), opened(lines)
        chatted(first)
        chatted(second)
        assert http("POST", first["url"] + "/end", {"reward": 1}, first["key"])[0] == 200
        process.send_signal(signal.SIGKILL)
        process.wait()
    with service(tmp_path, "--resume", "latest", "--out", "runs") as (process, lines):
        assert any(line.endswith("they begin again when they are opened: b/0") for line in lines)
        again = opened(lines)
        assert (again["episode"], again["key"] != second["key"]) == ("b/0", True)
        chatted(again)
        assert http("POST", again["url"] + "/end", {"reward": 0.5}, again["key"])[0] == 200
        last = opened(lines)
        chatted(last)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert "Open, so they begin again when they are opened: c/0" in process.stdout.read()
        assert process.wait(60) == 130
    with RunStore.open(find_run("latest", tmp_path / "runs"), readonly=True) as store:
        assert store.statuses() == {"a/0": "done", "b/0": "done", "c/0": "running"}
        assert [item.outcome.reward for item in store.trajectories()] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["spec.yaml", "--api", "--trainer", "verl"], "--trainer, --token-file and --ahead are for groups"),
        (["--api", "--host", "0.0.0.0", "spec.yaml"], "set EPISODE_ENGINE_TOKEN to a secret token"),
        (["--api"], "give a spec"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPISODE_ENGINE_TOKEN", raising=False)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_a_run_without_a_program_is_refused(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    path = write_served(tmp_path, tiny_tokenizer_dir, ["It is 42."])
    result = CliRunner().invoke(app, ["run", str(path), "--out", str(tmp_path / "runs")])
    assert result.exit_code == 1
    assert "open episodes with `engine serve --api`" in result.output
    assert list((tmp_path / "runs").iterdir()) == []
