"""Agent programs in the sandbox: the endpoint is reached, and nothing else is."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from agent_kit import play, write_spec
from command_line import trajectories_of
from other_user import other_user
from waiting import wait_until

from engine.errors import SpecError
from engine.plugins.agents import command
from engine.plugins.agents.confined import confine
from engine.plugins.agents.spec import AgentSandbox
from engine.plugins.confinement.sandbox import refusal
from engine.spec.load import load_spec
from engine.store import find_run

needs_sandbox = pytest.mark.skipif(bool(refusal()), reason=refusal())
PROBES = """
import ctypes, signal, socket
libc, said = ctypes.CDLL(None, use_errno=True), {}
def probe(name, call):
    try:
        said[name] = str(call())
    except Exception as error:
        said[name] = type(error).__name__
def checked(value):
    if value == -1:
        raise OSError(ctypes.get_errno(), "no")
def fill():
    count = 0
    try:
        for folder in ("/tmp", "/work"):
            for number in range(40):
                with open(f"{folder}/{number}", "wb") as file:
                    count += file.write(bytes(1_000_000))
    except OSError:
        pass
    for folder in ("/tmp", "/work"):
        for number in range(40):
            if os.path.exists(f"{folder}/{number}"):
                os.remove(f"{folder}/{number}")
    return count
def forks():
    pids = []
    try:
        for _ in range(100):
            if not (pid := os.fork()):
                signal.pause()
            pids.append(pid)
    except OSError:
        pass
    for pid in pids:
        os.kill(pid, 9), os.waitpid(pid, 0)
    return len(pids)
def descriptors():
    held = []
    try:
        while len(held) < 100_000:
            held.append(os.dup(1))
    except OSError:
        pass
    for fd in held:
        os.close(fd)
    return len(held)
one = chat(ASK)
probe("network", lambda: socket.create_connection(("127.0.0.1", PORT), 2))
probe("address", lambda: socket.create_connection(("8.8.8.8", 53), 2))
probe("spec folder", lambda: open("new", "w"))
probe("program", lambda: open("program.py", "a"))
probe("other file", lambda: open("/etc/passwd").read()[:4])
probe("secret", lambda: open("SECRET").read())
probe("processes", lambda: [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 100])
probe("root", os.getuid)
probe("endpoint moved", lambda: os.rename("/episode/endpoint", "/episode/other"))
probe("endpoint replaced", lambda: os.rename("/work/tmp", "/episode/endpoint"))
probe("endpoint removed", lambda: os.unlink("/episode/endpoint"))
probe("endpoint changed", lambda: os.chmod("/episode/endpoint", 0))
probe("task changed", lambda: open("/episode/task.json", "w"))
probe("task added", lambda: open("/episode/new", "w"))
probe("namespace", lambda: checked(libc.unshare(0x10000000)))
probe("memory file", lambda: os.memfd_create("x"))
probe("shared memory", lambda: checked(libc.shmget(0, 10**7, 0o1600)))
probe("shm", lambda: open("/dev/shm/x", "w"))
probe("memory", lambda: bytearray(10**9))
probe("descriptors", descriptors)
probe("forks", forks)
probe("disk", fill)
open("/tmp/scratch", "w").write("x")
open(os.path.expanduser("~/scratch"), "w").write("x")
chat(ASK, one, {"role": "user", "content": json.dumps(said)}, metadata={"large": "x" * 3_000_000})
reward(1.0)
"""
SANDBOX = {"disk": "20MB", "memory": "500MB", "processes": 12}


def check_probes(said: dict[str, str]) -> None:
    """Nothing of what the probes tried went past the sandbox."""
    for name, most in [("disk", 20_000_000), ("descriptors", 4096), ("forks", 12)]:
        assert 0 < int(said.pop(name)) <= most
    assert said.pop("root") != "0"
    assert said.pop("processes") == "[]"
    assert said.pop("network") == "ConnectionRefusedError"
    assert said.pop("memory") == "MemoryError"
    assert {said.pop(name) for name in ("other file", "secret")} == {"FileNotFoundError"}
    assert {name for name, error in said.items() if error not in ("OSError", "PermissionError")} == set()
    assert len(said) == 13


def allow(folder: Path, mode: int) -> None:
    folder.chmod(mode)


@needs_sandbox
@pytest.mark.slow
async def test_a_program_in_the_sandbox_reaches_the_endpoint_and_nothing_else(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    secret.write_text("secret")
    allow(tmp_path, 0o755)
    with socket.create_server(("127.0.0.1", 0)) as other:
        program = PROBES.replace("PORT", str(other.getsockname()[1])).replace("SECRET", str(secret))
        played = await play(tmp_path, tiny_tokenizer_dir, program, ["a", "b"], agent={"sandbox": SANDBOX})
    assert played.trajectory.outcome.reward == 1.0
    check_probes(json.loads(played.trajectory.messages[-2].text))


@needs_sandbox
@pytest.mark.slow
def test_another_user_than_root_has_the_same_sandbox(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with other_user() as user, socket.create_server(("127.0.0.1", 0)) as other:
        shutil.copytree(tiny_tokenizer_dir, user.folder / "model")
        program = PROBES.replace("PORT", str(other.getsockname()[1])).replace("SECRET", str(secret))
        spec = write_spec(user.folder, user.folder / "model", program, ["a", "b"], agent={"sandbox": SANDBOX})
        user.own()
        user.run("-m", "engine.cli.main", "run", str(spec), "--out", str(user.folder / "runs"))
        (trajectory,) = trajectories_of(find_run("latest", user.folder / "runs"))
        left = [root for root, _, _ in os.walk(user.temporary) if Path(root).parent.parent == user.temporary]
        assert left == [], "the run itself removes the folder of each program"
        wait_until(lambda: not list(user.temporary.iterdir()))  # its keeper removes the one around them
    assert trajectory.outcome.reward == 1.0
    check_probes(json.loads(trajectory.messages[-2].text))


@needs_sandbox
async def test_no_secret_of_an_episode_is_in_the_table_of_processes_or_readable_by_others(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(tmp_path, 0o755)
    temporary = tmp_path / ("temporary" * 12)  # longer than the address of a socket
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(command, "_kept", [])  # another keeper, whose folder is there
    program = """
one = chat(ASK)
while not os.path.exists("go"):
    time.sleep(0.01)
chat(ASK, one, {"role": "user", "content": os.environ["OPENAI_API_KEY"]})
reward()
"""
    agent = {"sandbox": {}, "env": {"SERVICE": "hunter2"}}
    playing = asyncio.create_task(play(tmp_path, tiny_tokenizer_dir, program, ["a", "b"], agent=agent))
    lines: set[bytes] = set()
    while b"python\0program.py\0" not in lines and not playing.done():
        await asyncio.sleep(0.01)
        lines |= _command_lines()
    closed = [Path(entry) for entry in os.scandir(temporary)]
    assert closed
    assert [path for path in closed if path.stat().st_mode & 0o077] == []
    (tmp_path / "go").touch()
    key = (await playing).trajectory.messages[-2].text
    assert len(key) > 20
    assert [line for line in lines if key.encode() in line or b"hunter2" in line] == []


def _command_lines() -> set[bytes]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.add(path.read_bytes())
    return found


@needs_sandbox
@pytest.mark.slow
async def test_a_program_sees_its_own_files_and_no_secret_store_task_or_other_episode_beside_them(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(tmp_path, 0o755)
    temporary = tmp_path / "temporary"
    hidden = [
        ".env",
        ".git/config",
        "old/run.db",
        "old/token",
        "runs2/x/run.json",
        "data.db",
        "data.db-wal",
        "part/.env",
    ]
    hidden += ["part/deep/cache.sqlite", "held_out/rows.jsonl", "questions.jsonl", ".shown/other", "other.yaml"]
    hidden += ["temporary/agent-other/task.json", "runs/other/token", "part/runs/run.db"]
    shown = ["part/data.json", "node_modules/.bin/tool", ".shown/file", "settings.yaml"]
    for name in hidden + shown:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("secret")
        (tmp_path / name).chmod(0o644)
    (tmp_path / "other.yaml").write_text("# a spec\nspec: episode/v1\nname: other\n")
    (tmp_path / "questions.jsonl").write_text('{"id": "a", "question": "Why?", "answer": "secret"}\n')
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(command, "_kept", [])  # another keeper, whose folder is there
    program = """
def readable(path):
    try:
        return bool(open(path).read())
    except OSError:
        return False
paths = [os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names]
one = chat(ASK)
walked = {"role": "user", "content": json.dumps(sorted(os.path.relpath(p) for p in paths if readable(p)))}
two = chat(ASK, one, walked)
chat(ASK, one, walked, two, {"role": "user", "content": json.dumps([p for p in HIDDEN if readable(p)])})
reward()
"""
    played = await play(
        tmp_path,
        tiny_tokenizer_dir,
        program.replace("HIDDEN", repr(hidden)),
        ["a", "b", "c"],
        agent={"sandbox": {"read": [".shown/file"]}},
        tasks={"source": "jsonl", "rows": None, "path": "questions.jsonl"},
        train={"eval": {"tasks": {"source": "jsonl", "path": "held_out"}}},
    )
    assert played.trajectory.outcome.reward == 1.0
    walked, opened = (
        json.loads(message.text) for message in played.trajectory.messages if message.text.startswith("[")
    )
    assert walked == sorted(["program.py", *shown])
    assert opened == []


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
async def test_empty_files_and_attributes_count_against_the_disk(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    allow(tmp_path, 0o755)
    program = """
chat(ASK)
reward(0.5)
for number in range(10**8):
    os.mknod(f"/tmp/{number}")
    os.setxattr(f"/tmp/{number}", "user.x", bytes(60_000))
"""
    agent = {"sandbox": {"disk": "40MB"}}
    played = await play(tmp_path, tiny_tokenizer_dir, program, ["a"], agent=agent)
    assert (played.records[-1].event, played.records[-1].status) == ("died", -9)
    assert played.records[-1].output.endswith(
        "(killed: it has more files than `disk` allows; each counts at least 4096 bytes)"
    )
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


@needs_sandbox
@pytest.mark.parametrize(
    ("command", "files", "words"),
    [
        (".venv/bin/python a.py", [".venv/bin/python"], r"names .venv/bin/python, and .venv is hidden: write `agent.sandbox.read: \[.venv\]`"),
        ("python a.py 'tasks.jsonl'", ["tasks.jsonl"], "names tasks.jsonl, and tasks.jsonl is hidden"),
        ("python a.py", [f".{number}" for number in range(1001)], "more than 1000 hidden files: give the spec and its program a folder"),
        ("python a.py", ["temporary"], "is also the folder of temporary files, which are of other episodes too: move the spec"),
    ],
    ids=["interpreter", "tasks", "many", "temporary"],
)  # fmt: skip
def test_what_the_sandbox_cannot_show_or_hide_is_refused(
    command: str, files: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(tmp_path, 0o755)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if files == ["temporary"]:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match=words):
        confine(AgentSandbox(), command, tmp_path, tmp_path, 1, {}, [tmp_path / "tasks.jsonl"])


def test_a_coroutine_has_no_sandbox(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    with pytest.raises(SpecError, match="`sandbox` belongs to `run`"):
        load_spec(write_spec(tmp_path, tiny_tokenizer_dir, "", ["a"], agent={"run": None, "use": "a:b", "sandbox": {}}))
