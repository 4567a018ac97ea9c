"""Temporary folders: however a run ends, none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from installed_plugins import needs_plugin
from waiting import wait_until

CODE = """
import time
from pathlib import Path

from engine.schemas.environment import Reset
from engine.schemas.message import Message


class Board:
    def reset(self, task, seed):
        if task.fields["hangs"]:
            Path("begun").touch()
            time.sleep(1e6)
        return Reset(messages=[Message(role="user", content="Hello.")])
"""
PROGRAM = """
import json, os, time, urllib.request
with open(os.environ["EPISODE_TASK_FILE"]) as file:
    hangs = json.load(file)["fields"]["hangs"]
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "Hello."}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
with open(os.environ["EPISODE_REWARD_FILE"], "w") as file:
    file.write("1.0")
if hangs:
    open("begun", "w").close()
    time.sleep(1e6)
"""
USERS: dict[str, dict[str, Any]] = {
    "worker": {"environment": {"use": "board:Board", "isolation": "process", "timeout": 600}, "machine": "single_turn"},
    "program": {"agent": {"run": f"exec {sys.executable} program.py", "timeout": 600}, "machine": "agent"},
}
"""What has temporary folders: a worker process with the spec's code, and an agent program."""
ENDS = {"end": [], "killed": [signal.SIGKILL], "stopped": [signal.SIGTERM], "at once": [signal.SIGTERM, signal.SIGTERM]}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "user",
    [pytest.param("worker", marks=needs_plugin("isolation")), pytest.param("program", marks=needs_plugin("agents"))],
)
def test_a_run_leaves_no_temporary_folder(user: str, end: str, tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "left",
        "model": {"path": str(tiny_tokenizer_dir)},
        "backend": {"kind": "scripted", "replies": ["Hello."]},
        "tasks": {"source": "inline", "rows": [{"id": "a", "hangs": end != "end"}], "id": "id"},
        **USERS[user],
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    (tmp_path / "board.py").write_text(CODE)
    (tmp_path / "program.py").write_text(PROGRAM)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    tmp_path.chmod(0o777)  # a worker may be another user
    engine = subprocess.Popen(
        [sys.executable, "-m", "engine.cli.main", "run", "spec.yaml"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        signals = ENDS[end]
        if signals:
            wait_until(lambda: (tmp_path / "begun").exists() or engine.poll() is not None)
            if user == "program" or os.getuid() == 0:  # else a worker has no folder of its own
                assert list(temporary.iterdir())
        for number in signals[:-1]:
            engine.send_signal(number)
            assert engine.stderr is not None
            assert any(line.startswith("Stopping") for line in engine.stderr)  # or the next one is pending with it
        for number in signals[-1:]:
            engine.send_signal(number)
        out, err = engine.communicate(timeout=120)
    finally:
        engine.kill()
    assert engine.returncode == {"end": 0, "killed": -9}.get(end, 143), out + err
    wait_until(lambda: not list(temporary.iterdir()))
