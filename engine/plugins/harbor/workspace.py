"""A folder of files that several programs in the sandbox work on, one after the other.

    with Workspace(files, folders=["/app"], workdir="/app", env={}, memory=2**31, disk=2**30) as workspace:
        workspace.run("echo hello > file.txt", seconds=60)
        workspace.run("cat file.txt", seconds=60).output

Each program has a sandbox of its own (`sandbox.py`): the system's programs, read-only, no network, no other process. Beside them
it may write the top-level folders of the workspace, /tmp and its home folder, which stay for the next one. What a program starts in the background
ends with it.

Invariant: what programs write is never executed or followed outside of a sandbox; `fresh_folder` is empty when a program begins.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from engine.plugins.confinement import sandbox, system_calls
from engine.plugins.confinement.sandbox import ProgramResult, SandboxLimits

PROCESSES = 256
"""Maximum number of processes and threads of a program."""
MOST_OUTPUT = 65_536
"""Maximum bytes of a program's output that are read."""
MOST_READ = 65_536
"""Maximum bytes of a file that is read from a workspace."""
_LOOK = 1.0
"""Seconds between two counts of its files."""


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
        own = Path(sandbox.host_python()).parts[1]
        home = "/home" if own != "home" else "/root"
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
            if (self._root / own).exists():  # a program could lead bubblewrap out of the sandbox by a link in it
                raise RuntimeError(
                    f"the task has the folder /{own}, in which this machine's Python lies; use a Python in /usr"
                )
            self._own(self._root)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        found, waiting = 0, [self._folder]
        while waiting:
            try:
                with os.scandir(waiting.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(Path(entry.path))
                        found += max(sandbox.LEAST_FILE, entry.stat(follow_symlinks=False).st_blocks * 512)
            except OSError:  # it was removed meanwhile
                continue
        return found

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


def read_small(path: Path) -> bytes | None:
    """The first bytes of a regular file that a program wrote; None if there is none. Links are not followed."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(opened, "rb") as file:
        return file.read(MOST_READ) if stat.S_ISREG(os.fstat(opened).st_mode) else None
