"""Tasks of Harbor's form: the instruction, a sandbox with the task's files, and the reward of its `tests/test.sh`.

    tasks: {source: harbor, path: tasks}
    environment: {adapter: harbor, use: shell, timeout: 15m}      # use: program, for an agent program
    machine: tools                                                # machine: agent

With `use: shell` the model has a tool `shell`. With `use: program` an agent program finds a command in EPISODE_SHELL,
which runs its arguments in the task's sandbox. At the end the tests run in a new sandbox with the same files, and
without the processes of the episode. Rewards are read as Harbor 0.25 does (`verifier/verifier.py`): all numbers of
/logs/verifier/reward.json, else the number in /logs/verifier/reward.txt. Without one of them the episode fails, unless
`with: {reward: exit_code}` makes it 1 for status 0 and else 0.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from engine.errors import AdapterError
from engine.plugins.confinement import sandbox, system_calls
from engine.plugins.confinement.sandbox import ProgramResult, SandboxLimits, host_python
from engine.plugins.harbor.dockerfile import PATH
from engine.plugins.harbor.folders import HarborTask, copied, files_of, read_task
from engine.processes.system import read_small
from engine.schemas.environment import EpisodeView, ProgramSettings, Reset, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

PROCESSES = 256
"""Maximum number of processes and threads of a program."""
MOST_OUTPUT = 65_536
"""Maximum bytes of a program's output that are read."""
MOST_READ = 65_536
"""Maximum bytes of a file that is read from a workspace."""
_LOOK = 1.0
"""Seconds between two counts of its files."""
MOST_SHOWN = 16_000
"""Maximum characters of a command's output that the model is shown: half from the beginning, half from the end."""


class Workspace:
    """The files of one episode.

    Args:
        files: Files to copy, each with its absolute path in the sandbox.
        folders: Absolute folders to make.
        workdir: The folder that programs start in.
        env: Variables of each program.
        memory: Maximum bytes of address space of each process.
        disk: Maximum bytes of all files.

    Raises:
        RuntimeError: There is no sandbox on this machine, or the task has a folder in which its Python lies.
        OSError: The files cannot be copied.
    """

    def __init__(
        self,
        files: Iterable[tuple[Path, str]],
        *,
        folders: Sequence[str],
        workdir: str,
        env: Mapping[str, str],
        memory: int,
        disk: int,
    ) -> None:
        if problem := sandbox.refusal():
            raise RuntimeError(f"no sandbox for the task's programs: {problem}")
        self._workdir, self._memory, self._disk = workdir, memory, disk
        python_root = Path(sandbox.host_python()).parts[1]
        home = "/home" if python_root != "home" else "/root"
        self._env = {"PATH": sandbox.PATH, "HOME": home, "LANG": "C.UTF-8", **env}
        self._folder = Path(tempfile.mkdtemp(prefix="workspace-"))
        self._uid: int | None = None
        try:
            if os.getuid() == 0:
                self._uid = sandbox.take_uid()
            self._root = self._folder / "root"
            for folder in ("/tmp", home, *folders):
                (self._root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            for source, place in files:
                self._copy(source, self._root / place.lstrip("/"))
            if (
                self._root / python_root
            ).exists():  # a program could lead bubblewrap out of the sandbox by a link in it
                raise RuntimeError(
                    f"the task has the folder /{python_root}, in which this machine's Python lies; use a Python in /usr"
                )
            self._own(self._root)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        command: str,
        seconds: float,
        *,
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, Path] | None = None,
    ) -> ProgramResult:
        """Run a shell command to its end or to a limit.

        Args:
            command: The command, for `/bin/sh -c`.
            seconds: Its time.
            env: Other variables.
            mounts: Folders that it may write besides those of the workspace, by their absolute path in the sandbox.

        Raises:
            OSError: It could not be started.
        """
        limits = SandboxLimits(seconds, self._memory, PROCESSES, self._disk, MOST_OUTPUT)
        inside = [*self._inside(limits), "/bin/sh", "-c", command]
        options = self._sandbox(env or {}, mounts or {})
        return sandbox.finish_sandboxed(options, inside, limits, size=self.size, look=_LOOK)

    def shell(self, seconds: float) -> Path:
        """A script that runs its arguments as one shell command in a sandbox, for programs outside of it.

        Args:
            seconds: CPU time of one command.
        """
        limits = SandboxLimits(seconds, self._memory, PROCESSES, self._disk, MOST_OUTPUT)
        read, calls = self._folder / "options", self._folder / "calls"
        read.write_bytes(b"\0".join(map(os.fsencode, [*self._sandbox({}, {}), "--seccomp", "4"])))
        calls.write_bytes(system_calls.filter_program())
        line = shlex.join([sandbox.bubblewrap(), "--args", "3", "--", *self._inside(limits), "/bin/sh", "-c"])
        path = self._folder / "shell"
        files = f"3<{shlex.quote(str(read))} 4<{shlex.quote(str(calls))}"
        path.write_text(f'#!/bin/sh\nexec {line} "$*" {files}\n', encoding="utf-8")
        path.chmod(0o700)
        return path

    def fresh_folder(self, name: str, files: Iterable[tuple[Path, str]] = ()) -> Path:
        """An empty folder for `mounts`, with copies of some files: each with its path in the folder."""
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for source, place in files:
            self._copy(source, folder / place)
        self._own(folder)
        return folder

    def size(self) -> int:
        """Bytes of all its files; a file or folder has `LEAST_FILE` at least."""
        total, waiting = 0, [self._folder]
        while waiting:
            try:
                with os.scandir(waiting.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(Path(entry.path))
                        total += max(sandbox.LEAST_FILE, entry.stat(follow_symlinks=False).st_blocks * 512)
            except OSError:  # it was removed meanwhile
                continue
        return total

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._uid is not None:
            sandbox.give_uid(self._uid)
            self._uid = None

    def _sandbox(self, env: Mapping[str, str], mounts: Mapping[str, Path]) -> list[str]:
        writable = {f"/{entry.name}": entry for entry in sorted(self._root.iterdir())} | dict(mounts)
        command = sandbox.system_of(self._uid is not None, {**self._env, **env}, writable)
        return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", self._workdir]

    def _inside(self, limits: SandboxLimits) -> list[str]:
        return sandbox.entering(sandbox.rlimits(limits, processes=True), self._uid)

    def _own(self, folder: Path) -> None:
        if self._uid is None:
            return
        os.chown(folder, self._uid, self._uid)
        for root, names, files in os.walk(folder):
            for name in (*names, *files):
                os.chown(Path(root) / name, self._uid, self._uid, follow_symlinks=False)

    @staticmethod
    def _copy(source: Path, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)
        place.chmod(source.stat().st_mode & 0o755 | 0o600)


class HarborEnvironment:
    """One episode of a task folder.

    Args:
        use: `shell`: the model has a tool `shell`. `program`: an agent program has a command.
        base: The spec's folder.
        reward: Where the reward comes from: files as in Harbor, or the exit status of the tests.
        seconds: Maximum time of one command of the tool.

    Raises:
        AdapterError: An argument is wrong.
    """

    def __init__(
        self, use: str, base: str = ".", reward: Literal["file", "exit_code"] = "file", seconds: float = 120.0
    ) -> None:
        if use not in ("shell", "program"):
            raise AdapterError(f"`use` is {use!r}; write `shell` or `program`")
        if reward not in ("file", "exit_code"):
            raise AdapterError(f"`reward` is {reward!r}; write `file` or `exit_code`")
        self._use, self._base, self._reward, self._seconds = use, Path(base), reward, seconds
        self._task: HarborTask | None = None
        self._workspace: Workspace | None = None
        self._deadline = 0.0

    def reset(self, task: Task, seed: int) -> Reset:
        """Make the task's files; the instruction is the first message.

        Raises:
            AdapterError: The task is not one of `source: harbor`.
            HarborError: Its folder cannot be read any more.
            RuntimeError: There is no sandbox on this machine.
        """
        if not isinstance(task.fields.get("folder"), str):
            raise AdapterError(
                f"task {task.id!r} has no field `folder`; write `tasks: {{source: harbor, path: FOLDER}}`"
            )
        harbor_task = read_task(self._base / task.fields["folder"])
        image = harbor_task.image
        path = image.env.get("PATH", PATH)
        if image.base == "python":  # which has a `python`, as this machine may not have in /usr
            path += f":{Path(host_python()).parent}"
        self._task = harbor_task
        self._workspace = Workspace(
            [pair for copy in image.copies for pair in copied(harbor_task.folder, copy)],
            folders=image.folders,
            workdir=image.workdir,
            env=image.env | {"PATH": path},
            memory=harbor_task.memory_mb * 2**20,
            disk=harbor_task.storage_mb * 2**20,
        )
        self._deadline = time.monotonic() + harbor_task.agent_seconds
        return Reset(messages=[Message(role="user", content=harbor_task.instruction)])

    def tools(self) -> list[Callable[..., Any]]:
        """The tool `shell`, if the model has it."""
        return [self.shell] if self._use == "shell" else []

    def program(self) -> ProgramSettings:
        """EPISODE_SHELL for the agent program, a command that runs its arguments in the task's sandbox, and the task's
        time."""
        assert self._task is not None
        assert self._workspace is not None
        seconds = self._task.agent_seconds
        return ProgramSettings(env={"EPISODE_SHELL": str(self._workspace.shell(seconds))}, seconds=seconds)

    def shell(self, command: str) -> str:
        """Run a shell command and show what it prints. Files stay; processes end with the command.

        Args:
            command: The command, for /bin/sh.
        """
        assert self._workspace is not None
        left = self._deadline - time.monotonic()
        if left <= 0:
            return "error: the time of this task is over"
        result = self._workspace.run(command, min(self._seconds, left))
        notes = {
            "time": f"(stopped: it ran longer than {min(self._seconds, left):g} s)",
            "output": "(stopped: it printed too much)",
            "disk": "(stopped: the files are too large)",
        }
        note = notes.get(result.stopped, "" if result.status == 0 else f"(exit status {result.status})")
        text = result.output.rstrip("\n")
        if len(text) > MOST_SHOWN:
            text = f"{text[: MOST_SHOWN // 2]}\n(…)\n{text[-MOST_SHOWN // 2 :]}"
        return "\n".join(filter(None, (text, note))) or "(no output)"

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        """Run the tests and return their rewards, for the last turn.

        Raises:
            AdapterError: They ran out of time, or wrote no reward that can be read.
        """
        task, workspace = self._task, self._workspace
        assert task is not None
        assert workspace is not None
        tests = task.folder / "tests"
        files = [(file, str(file.relative_to(tests))) for file in files_of(tests, task.folder)]
        tests_copy = workspace.fresh_folder("tests", files)
        (tests_copy / "test.sh").chmod(0o755)
        logs = workspace.fresh_folder("verifier")
        result = workspace.run(
            "/tests/test.sh",
            task.verifier_seconds,
            env=task.verifier_env,
            mounts={"/tests": tests_copy, "/logs/verifier": logs},
        )
        if result.stopped:
            raise AdapterError(f"the tests of {task.folder} were stopped ({result.stopped}): …{result.output[-500:]}")
        if self._reward == "exit_code":
            return [RewardEvent(turn="last", value=float(result.status == 0), source="tests")]
        rewards = _rewards(*(read_small(logs / name, MOST_READ) for name in ("reward.json", "reward.txt")))
        if rewards is None:
            raise AdapterError(
                f"the tests of {task.folder} ended with status {result.status} and wrote no number to "
                "/logs/verifier/reward.txt: "
                f"…{result.output[-500:]}"
            )
        return [RewardEvent(turn="last", name=name, value=value, source="tests") for name, value in rewards.items()]

    def close(self) -> None:
        """Remove the task's files."""
        if self._workspace is not None:
            self._workspace.close()


def _rewards(as_json: bytes | None, as_text: bytes | None) -> dict[str, float] | None:
    """Rewards by name; None if neither file holds finite numbers."""
    try:
        value = float(as_text or b"") if as_json is None else json.loads(as_json)
    except (ValueError, RecursionError):
        return None
    named = value if isinstance(value, dict) else {"reward": value}
    if not named or any(isinstance(item, bool) or not isinstance(item, int | float) for item in named.values()):
        return None
    return {name: float(item) for name, item in named.items()} if all(map(isfinite, named.values())) else None
