"""Agent programs in the sandbox: the endpoint is reached, and nothing else is."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from agent_kit import play, write_spec

from engine.errors import SpecError
from engine.isolation.sandbox import refusal
from engine.spec.load import load_spec

needs_sandbox = pytest.mark.skipif(bool(refusal()), reason=refusal())
PROBES = """
import socket
found = {}
def probe(name, call):
    try:
        found[name] = str(call())
    except Exception as error:
        found[name] = type(error).__name__
one = chat(ASK)
probe("network", lambda: socket.create_connection(("127.0.0.1", PORT), 2))
probe("address", lambda: socket.create_connection(("8.8.8.8", 53), 2))
probe("spec folder", lambda: open("spec.yaml", "a"))
probe("other file", lambda: open("/etc/passwd").read()[:4])
probe("secret", lambda: open("SECRET").read())
probe("processes", lambda: [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 100])
probe("root", os.getuid)
open("/tmp/scratch", "w").write("x")
open(os.path.expanduser("~/scratch"), "w").write("x")
chat(ASK, one, {"role": "user", "content": json.dumps(found)}, metadata={"large": "x" * 3_000_000})
reward(1.0)
"""


def allow(folder: Path, mode: int) -> None:
    folder.chmod(mode)


@needs_sandbox
async def test_a_program_in_the_sandbox_reaches_the_endpoint_and_nothing_else(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    secret.write_text("secret")
    allow(tmp_path, 0o755)
    with socket.create_server(("127.0.0.1", 0)) as other:
        program = PROBES.replace("PORT", str(other.getsockname()[1])).replace("SECRET", str(secret))
        played = await play(tmp_path, tiny_tokenizer_dir, program, ["a", "b"], agent={"sandbox": {}})
    assert played.trajectory.outcome.reward == 1.0
    found = json.loads(played.trajectory.messages[-2].text)
    assert found.pop("root") != "0"
    assert found.pop("processes") == "[]"
    assert found.pop("spec folder") in ("OSError", "PermissionError")
    assert found == {
        "network": "ConnectionRefusedError",
        "address": "OSError",
        "other file": "FileNotFoundError",
        "secret": "FileNotFoundError",
    }


@needs_sandbox
@pytest.mark.parametrize(
    ("end", "event", "status"),
    [
        pytest.param("os.kill(os.getpid(), 9)", "died", -9, marks=pytest.mark.slow),
        pytest.param(
            "subprocess.Popen(['sleep', '600'], start_new_session=True); sys.exit(3)", "died", 3, marks=pytest.mark.slow
        ),
        pytest.param("time.sleep(600)", "timeout", None, marks=pytest.mark.slow),
    ],
)
async def test_a_program_in_the_sandbox_ends_as_others_do(
    tmp_path: Path, tiny_tokenizer_dir: Path, end: str, event: str, status: int | None
) -> None:
    allow(tmp_path, 0o755)
    agent: dict[str, Any] = {"sandbox": {"processes": 16}, "timeout": "6s"}
    played = await play(
        tmp_path, tiny_tokenizer_dir, f"import subprocess\nchat(ASK)\nreward(0.5)\n{end}", ["a"], agent=agent
    )
    assert played.records[-1].event == event
    assert played.records[-1].status == status
    assert played.trajectory.outcome.reward == 0.5


@needs_sandbox
@pytest.mark.slow
async def test_a_folder_that_the_program_could_not_read_is_named(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("other users are themselves in the sandbox")
    allow(tmp_path, 0o700)
    played = await play(tmp_path, tiny_tokenizer_dir, "chat(ASK)", ["a"], agent={"sandbox": {}})
    failure = played.trajectory.outcome.failure
    assert failure is not None
    assert failure.kind == "agent_not_started"
    assert f"cannot read {tmp_path}: chmod o+rx it" in failure.message


def test_a_coroutine_has_no_sandbox(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    with pytest.raises(SpecError, match="`sandbox` belongs to `run`"):
        load_spec(write_spec(tmp_path, tiny_tokenizer_dir, "", ["a"], agent={"run": None, "use": "a:b", "sandbox": {}}))
