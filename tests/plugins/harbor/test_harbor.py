"""Task folders of Harbor's form: what is read, what is refused and where, and episodes in their sandboxes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from agent_kit import CLIENT
from stopping import Resumed
from written_specs import save_spec

from engine.errors import SpecError
from engine.plugins.confinement.sandbox import refusal
from engine.plugins.harbor.dockerfile import PATH, Copy, DockerfileError, read_dockerfile
from engine.plugins.harbor.environment import _rewards
from engine.plugins.harbor.folders import HarborError, read_task
from engine.schemas.trajectory import Trajectory
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.validate import check_spec

needs_sandbox = pytest.mark.skipif(bool(refusal()), reason=f"no sandbox on this machine: {refusal()}")
TEST = '#!/bin/bash\nif [ "$(cat sum.txt)" = 42 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n'
COMMAND = "awk '{s+=$1} END {print s}' numbers.txt > sum.txt"


def write_task(folder: Path, **files: str | None) -> Path:
    """A task folder: numbers to add up. `files` are by path with `__` for `/`; None: left out."""
    content: dict[str, str | None] = {
        "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 120\n[verifier]\ntimeout_sec = 30\n',
        "instruction.md": "<!-- canary -->\n\nWrite the sum of numbers.txt to sum.txt.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY numbers.txt ./\n",
        "environment/numbers.txt": "1\n2\n39\n",
        "tests/test.sh": TEST,
    }
    for name, text in files.items():
        content[name.replace("__", "/").replace("_toml", ".toml").replace("_md", ".md").replace("_sh", ".sh")] = text
    for name, text in content.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def write_spec(folder: Path, tokenizer: Path, replies: list[Any], **changes: Any) -> Path:
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "harbor",
        "model": {"path": str(tokenizer), "tool_calls": "hermes"},
        "backend": {"kind": "scripted", "replies": replies},
        "tasks": {"source": "harbor", "path": "tasks", "id": "name"},
        "environment": {"adapter": "harbor", "use": "shell", "timeout": "100s"},
        "machine": "tools",
        "limits": {"turn_tokens": 300, "assistant_turns": 4, "tool_calls": 4, "tool_seconds": "60s"},
    }
    return save_spec(folder / "spec.yaml", spec | changes)


async def run(folder: Path, tokenizer: Path, replies: list[Any], **changes: Any) -> Trajectory:
    """Run the only task, and check that its replay is the same."""
    path = write_spec(folder, tokenizer, replies, **changes)
    assert [str(item) for item in check_spec(load_spec(path)) if item.severity == "error"] == []
    spec = Resumed(path)
    await spec.run(folder / "runs")
    with spec.store(folder / "runs") as store:
        (trajectory,) = store.trajectories()
    assert await spec.differences(folder / "runs") == []
    return trajectory


def shell(command: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "shell", "arguments": {"command": command}}]}


@needs_sandbox
async def test_the_model_works_in_the_sandbox_and_the_tests_pay(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    write_task(tmp_path / "tasks/sum")
    trajectory = await run(
        tmp_path, tiny_tokenizer_dir, [shell(COMMAND), shell("cat sum.txt; pwd; ls /tests"), "Done."]
    )
    assert trajectory.outcome.reward == 1.0
    assert [message.text for message in trajectory.messages if message.role in ("user", "tool")] == [
        "Write the sum of numbers.txt to sum.txt.",
        "(no output)",
        "42\n/app\nls: cannot access '/tests': No such file or directory\n(exit status 2)",
    ]


@needs_sandbox
async def test_a_program_works_in_the_sandbox_by_a_command(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    write_task(tmp_path / "tasks/sum")
    program = """
import subprocess
said = chat({"role": "user", "content": TASK["messages"][-1]["content"]})["content"]
found = subprocess.run([os.environ["EPISODE_SHELL"], said], capture_output=True, text=True)
assert (found.returncode, found.stdout) == (0, ""), found
assert subprocess.run([os.environ["EPISODE_SHELL"], "exit 7"]).returncode == 7
"""
    (tmp_path / "program.py").write_text(
        CLIENT.replace('ASK = {"role": "user", "content": TASK["fields"]["question"]}', "") + program
    )
    trajectory = await run(
        tmp_path,
        tiny_tokenizer_dir,
        [COMMAND],
        agent={"run": "exec python program.py"},
        machine="agent",
        environment={"adapter": "harbor", "use": "program", "timeout": "100s"},
    )
    assert trajectory.outcome.failure is None
    assert (trajectory.outcome.event, trajectory.outcome.reward) == ("exited", 1.0)


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "given", "kind"),
    [
        ("exit 0", "file", "adapter_error"),
        ("exit 0", "exit_code", 1.0),
        ("exit 3", "exit_code", 0.0),
        ("echo nan > /logs/verifier/reward.txt", "file", "adapter_error"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "file", "adapter_error"),
        ("sleep 60", "exit_code", "adapter_error"),
        ('echo \'{"a": 0.5, "b": 1}\' > /logs/verifier/reward.json; echo 9 > /logs/verifier/reward.txt', "file", 1.5),
    ],
)
async def test_rewards_are_read_as_harbor_does(
    test: str, given: str, kind: float | str, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    write_task(tmp_path / "tasks/sum", tests__test_sh=test, task_toml="[verifier]\ntimeout_sec = 5\n")
    environment = {"adapter": "harbor", "use": "shell", "timeout": "100s", "with": {"reward": given}}
    trajectory = await run(tmp_path, tiny_tokenizer_dir, ["Done."], environment=environment)
    failure = trajectory.outcome.failure
    if isinstance(kind, str):
        assert failure is not None
        assert (failure.kind, failure.blame) == (kind, "environment")
    else:
        assert (failure, trajectory.outcome.reward) == (None, kind)


@needs_sandbox
@pytest.mark.slow
async def test_what_the_model_leaves_behind_does_not_reach_the_tests(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """A forged reward, a test of its own, a process in the background, and more files than there is room for."""
    write_task(tmp_path / "tasks/sum", task_toml="[environment]\nstorage_mb = 20\n[verifier]\ntimeout_sec = 30\n")
    replies = [
        shell("mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo $?"),
        shell("(while true; do echo 42 > /app/sum.txt; sleep 0.1; done) & sleep 0.5; rm sum.txt; ln -s /etc/passwd x; head -c 30000000 /dev/zero > big"),
        shell("for i in 1 2 3 4 5 6; do head -c 9000000 /dev/zero > big$i; done; sleep 3"),
        "Done.",
    ]  # fmt: skip
    trajectory = await run(tmp_path, tiny_tokenizer_dir, replies)
    told = [message.text for message in trajectory.messages if message.role == "tool"]
    assert "Read-only file system" in told[0]
    assert "(stopped: the files are too large)" in told[2]
    assert trajectory.outcome.reward == 0.0


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("FROM ubuntu:24.04\nRUN apt-get update", 2, "builds an image"),
        ("FROM ubuntu:24.04\n\n# x\nRUN mkdir a \\\n  && make", 4, "builds an image"),
        ("FROM ghcr.io/acme/swe:1", 1, "is not a base"),
        ("FROM ubuntu AS one\nFROM ubuntu", 2, "two stages"),
        ("WORKDIR /app", 1, "before `FROM`"),
        ("FROM debian\nCOPY --from=build a b", 2, "not supported"),
        ("FROM debian\nADD https://example.org/x /app/x", 2, "needs a network"),
        ("FROM debian\nADD files.tar.gz /app", 2, "unpacks"),
        ("FROM debian\nCOPY ../x /app/x", 2, "leaves the folder"),
        ("FROM debian\nCOPY x /usr/bin/x", 2, "the sandbox's own"),
        ("FROM debian\nWORKDIR /app/../etc", 2, "the sandbox's own"),
        ("FROM debian\nUSER nobody", 2, "builds an image"),
        ("FROM debian\nCOPY x $PLACE", 2, "has no value"),
        ("FROM debian\nCOPY <<EOF /app/x", 2, "here-documents"),
        ("FROM debian\nCOPY 'x /app", 2, "cannot be read"),
        ("", 1, "no `FROM`"),
    ],
)
def test_other_images_are_refused_with_their_line(text: str, line: int, words: str) -> None:
    with pytest.raises(DockerfileError, match=words) as caught:
        read_dockerfile(text)
    assert caught.value.line == line


def test_a_base_with_files_is_read() -> None:
    text = """
# syntax=docker/dockerfile:1
FROM --platform=linux/amd64 python:3.12-slim
"""
    with pytest.raises(DockerfileError, match="is not a base"):
        read_dockerfile(text)
    found = read_dockerfile(
        """
# comment
FROM docker.io/library/python:3.12-slim@sha256:00 AS base
ENV HOME=/root PLACE="/srv/my data"
ENV OLD form
ENV PATH=/app/bin:$PATH
WORKDIR /app
WORKDIR sub
COPY --chown=root:root a.txt b.txt ./
COPY ["c d", "${PLACE}/e"]
RUN mkdir -p logs /data
CMD ["bash"]
"""
    )
    assert found.copies == [
        Copy("a.txt", "/app/sub", True, 9),
        Copy("b.txt", "/app/sub", True, 9),
        Copy("c d", "/srv/my data/e", False, 10),
    ]
    path = f"/app/bin:{PATH}"
    assert found.env == {"HOME": "/root", "PLACE": "/srv/my data", "OLD": "form", "PATH": path}
    assert found.base == "python"
    assert (found.workdir, found.folders) == ("/app/sub", ["/app", "/app/sub", "/app/sub/logs", "/data"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("x = ", "not TOML"),
        ("agent = 3", "`agent` is not a table"),
        ("[agent]\ntimeout_sec = -1", "`timeout_sec` is -1"),
        ("[environment]\ndocker_image = 'a/b'", "`environment.docker_image`"),
        ("[environment]\ngpus = 1", "`environment.gpus`"),
        ("[environment]\nallow_internet = true", "no network"),
        ("[agent]\nnetwork_mode = 'public'", "no network"),
        ("[environment]\nos = 'windows'", "`environment.os`"),
        ("[verifier]\nenvironment_mode = 'separate'", "`verifier.environment_mode`"),
        ("[verifier.env]\nKEY = '${OPENAI_API_KEY}'", "takes a variable of this machine"),
        ("[[steps]]\nname = 'one'", "`steps`"),
        ("[task]\nname = 3", "`task.name`"),
    ],
)
def test_what_the_sandbox_does_not_have_is_refused(config: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(HarborError, match=words) as caught:
        read_task(write_task(tmp_path, task_toml=config))
    assert caught.value.path == tmp_path / "task.toml"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("apt-get update", "apt-get update"),
        ("apt-get -y install curl", "apt-get -y install"),
        ("uvx -w pytest==8.4.1 pytest /tests/test_outputs.py", "uvx"),
        ("cd /x && pip3 install --quiet pytest", "pip3 install"),
        ("curl -LsSf https://example.org/x | sh", "curl"),
        ("curl http://localhost:8000/health", ""),
        ("# apt-get update", ""),
        ("python3 check.py  # instead of curl", ""),
        ("pytest /tests", ""),
    ],
)
def test_tests_that_need_a_network_are_refused_at_the_line(line: str, words: str, tmp_path: Path) -> None:
    """Without one, Harbor's usual `if uvx …; then … else echo 0` would pay 0 for every solution."""
    folder = write_task(tmp_path, tests__test_sh=f"#!/bin/bash\n\n{line}\n")
    if not words:
        read_task(folder)
        return
    with pytest.raises(HarborError, match=f"`{words}` needs a network") as caught:
        read_task(folder)
    assert (caught.value.path, caught.value.line) == (folder / "tests/test.sh", 3)


def _hostile(folder: Path, kind: str) -> Path:
    """Make a task folder hostile; the path that is wrong."""
    place = folder / {"dockerfile": "environment/Dockerfile", "copied": "environment/numbers.txt"}.get(
        kind.partition(" ")[0], "tests/extra"
    )
    if place.exists():
        place.unlink()
    match kind.split()[-1]:
        case "out":
            place.symlink_to("/etc/passwd")
        case "nowhere":
            place.symlink_to("missing")
        case "circle":
            place.symlink_to(place)
        case "pipe":
            os.mkfifo(place)
        case "folder":
            (folder / "elsewhere").mkdir()
            place.symlink_to(folder / "elsewhere")
        case "huge":
            with place.open("wb") as file:
                file.truncate(1 << 40)
    return place


@pytest.mark.parametrize("kind", [f"{part} {what}" for part in ("dockerfile", "copied", "tests")
                                  for what in ("out", "nowhere", "circle", "pipe", "folder", "huge")])  # fmt: skip
def test_a_hostile_folder_is_an_error_with_its_path(kind: str, tmp_path: Path) -> None:
    write_task(tmp_path)
    place = _hostile(tmp_path, kind)
    with pytest.raises(HarborError) as caught:
        read_task(tmp_path)
    assert caught.value.path in (place, place.parent)


@pytest.mark.parametrize("name", ["task_toml", "instruction_md", "environment__Dockerfile", "tests__test_sh"])
def test_a_missing_part_is_named(name: str, tmp_path: Path) -> None:
    write_task(tmp_path, **{name: None, "task_toml": None if name == "task_toml" else ""})
    with pytest.raises(HarborError, match="is missing") as caught:
        read_task(tmp_path)
    assert caught.value.path.name == name.rpartition("__")[2].replace("_", ".")


def test_validate_and_load_name_every_refused_folder(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    write_task(tmp_path / "tasks/a")
    write_task(tmp_path / "tasks/b", environment__Dockerfile="FROM ubuntu\nRUN make\n")
    write_task(tmp_path / "tasks/c", task_toml="[environment]\ngpus = 8\n")
    loaded = load_spec(write_spec(tmp_path, tiny_tokenizer_dir, ["Done."]))
    found = [(str(item.origin), item.rule) for item in check_spec(loaded) if item.severity == "error"]
    places = [f"{tmp_path}/tasks/b/environment/Dockerfile:2:1", f"{tmp_path}/tasks/c/task.toml:1:1"]
    assert found == [(place, "tasks.unreadable") for place in places]
    with pytest.raises(SpecError, match="builds an image") as caught:
        load_tasks(loaded)
    assert [str(item.origin) for item in caught.value.diagnostics] == places


def test_task_folders_that_do_not_run_here_may_be_left_out(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    write_task(tmp_path / "tasks/b", environment__Dockerfile="FROM ubuntu\nRUN make\n")
    tasks = {"source": "harbor", "path": "tasks", "id": "name", "unsupported": "drop"}
    loaded = load_spec(write_spec(tmp_path, tiny_tokenizer_dir, ["Done."], tasks=tasks))
    with pytest.raises(SpecError, match="none of the 1 task folders runs here"):
        load_tasks(loaded)
    write_task(tmp_path / "tasks/a")
    assert [task.id for task in load_tasks(loaded)] == ["a"]
    assert [str(item) for item in check_spec(loaded) if item.severity != "info"] == []
    write_task(tmp_path / "tasks/c", task_toml="x =")
    with pytest.raises(SpecError, match="not TOML"):
        load_tasks(loaded)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment": None}, "nothing runs the tests"),
        ({"environment": {"adapter": "harbor", "use": "shell", "timeout": "30s"}}, "may take 30 s"),
        ({"environment": {"adapter": "harbor", "use": "program", "timeout": "100s"}}, "is for agent programs"),
        ({"environment": {"adapter": "harbor", "use": "bash", "timeout": "100s"}}, "neither `shell` nor `program`"),
        ({"tasks": {"source": "inline", "rows": [{"folder": "x"}]}}, "runs only tasks of `source: harbor`"),
    ],
)
def test_the_source_and_its_environment_belong_together(
    changes: dict[str, Any], words: str, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    write_task(tmp_path / "tasks/a")
    path = write_spec(tmp_path, tiny_tokenizer_dir, ["Done."], **changes)
    (found,) = [item for item in check_spec(load_spec(path)) if item.rule == "tasks.harbor"]
    assert words in found.message


@pytest.mark.parametrize(
    ("as_json", "as_text", "rewards"),
    [
        (None, b"0.5\n", {"reward": 0.5}),
        (b'{"a": 1, "b": 0.25}', b"9", {"a": 1.0, "b": 0.25}),
        (b"2", None, {"reward": 2.0}),
        (None, None, None), (None, b"", None), (None, b"inf", None), (b"[1]", None, None), (b"{}", None, None),
        (b'{"a": "1"}', None, None), (b'{"a": true}', None, None), (b'{"a": 1e999}', None, None), (None, b"\xff", None),
    ],
)  # fmt: skip
def test_reward_files(as_json: bytes | None, as_text: bytes | None, rewards: dict[str, float] | None) -> None:
    assert _rewards(as_json, as_text) == rewards
