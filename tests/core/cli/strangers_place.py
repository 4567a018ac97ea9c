"""A place where specs of a stranger are validated, and what must not happen there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import engine_here
from hostile_folders import SECRET, VARIABLES

ROOT = Path(__file__).parents[3]


@dataclass
class Place:
    """Where specs are validated, and what must not happen there."""

    root: Path
    listener: socket.socket

    @property
    def work(self) -> Path:
        """The current folder: a checkout."""
        return self.root / "work"

    @property
    def outside(self) -> Path:
        """A folder that is not the stranger's."""
        return self.root / "outside"

    @property
    def canary(self) -> Path:
        """Made by whatever code of a spec is run."""
        return self.root / "canary"

    def run(self, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """`engine …`, as a job runs it; killed, and so failing, when it takes too long."""
        variables = {**os.environ, **VARIABLES, "CANARY": str(self.canary), "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-P", "-m", "engine.cli.main", *arguments],
            cwd=self.work,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=timeout,
            check=False,
        )

    def run_here(self, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
        """`engine …` with the same variables in this process, where no code of a spec runs in it."""
        for name, value in {**VARIABLES, "CANARY": str(self.canary)}.items():
            monkeypatch.setenv(name, value)
        return engine_here(*arguments, cwd=self.work)

    def touched(self) -> list[str]:
        """What happened that must not."""
        found = ["code was run"] if self.canary.exists() else []
        try:
            self.listener.accept()[0].close()
            found.append("a server was asked")
        except BlockingIOError:
            pass
        return found


@contextmanager
def opened(root: Path) -> Iterator[Place]:
    """A new place below `root`, with a file outside that holds a secret."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        found = Place(root, listener)
        found.work.mkdir()
        found.outside.mkdir()
        (found.outside / "secret.txt").write_text(f"{SECRET}: [\n")
        yield found
