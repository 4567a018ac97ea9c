"""A program that is a shell command: its environment, its folder with task and reward, its process."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.plugins.agents.confined import HOME, INSIDE, SOCKET, Confined, confine
from engine.plugins.agents.keeper import REWARD, remove
from engine.plugins.agents.process import MOST_OUTPUT, ProgramProcess, programs_folder
from engine.plugins.agents.program import Endpoint
from engine.plugins.agents.rewards import PATH as REWARD_PATH
from engine.plugins.agents.server import Listener, server_of_loop
from engine.plugins.agents.spec import AgentSandbox

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "SYSTEMROOT", "TMPDIR", "VIRTUAL_ENV")
"""Variables of the engine that a program gets. Others may be secret."""
_LONGEST_VARIABLE = 100_000
"""Characters of a task that fits into a variable; the operating system refuses longer ones."""
TASK_FILE = "task.json"


class CommandProgram:
    """A shell command. See `ProgramBody`.

    Args:
        command: The command.
        base: The folder that it runs in.
        env: Variables that it gets besides those of the engine.
        task: Its task.
        episode: The episode's id.
        sandbox: Its sandbox; None: it runs without one.
        answers: Files and folders that a sandbox hides from it.
    """

    def __init__(
        self,
        command: str,
        base: Path,
        env: Mapping[str, str],
        task: Mapping[str, Any],
        episode: str,
        sandbox: AgentSandbox | None = None,
        answers: Sequence[Path] = (),
    ) -> None:
        self._sandbox, self._answers = sandbox, answers
        self._confined: Confined | None = None
        self._socket: Listener | None = None
        self._command, self._base, self._env, self._task, self._episode = command, base, env, task, episode
        self._folder: Path | None = None
        self._process: ProgramProcess | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit status."""

    async def start(self, endpoint: Endpoint) -> None:
        """Start it. Raises OSError if that is not possible."""
        self._folder = folder = Path(tempfile.mkdtemp(prefix="", dir=programs_folder()))
        task = json.dumps(self._task, ensure_ascii=False)
        (folder / TASK_FILE).write_text(task, encoding="utf-8")
        shown, written = (folder, folder) if self._sandbox is None else (Path(INSIDE), Path(HOME))
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        env |= {
            "OPENAI_BASE_URL": f"{endpoint.address}/v1",
            "OPENAI_API_KEY": endpoint.key,
            "OPENAI_MODEL": endpoint.model,
            "ANTHROPIC_BASE_URL": endpoint.address,
            "ANTHROPIC_API_KEY": endpoint.key,
            "ANTHROPIC_MODEL": endpoint.model,
            "EPISODE_ID": self._episode,
            "EPISODE_TASK_FILE": str(shown / TASK_FILE),
            "EPISODE_REWARD_FILE": str(written / REWARD),
            "EPISODE_REWARD_URL": f"{endpoint.address}{REWARD_PATH}",
            "NO_PROXY": "127.0.0.1",
        }
        if len(task) <= _LONGEST_VARIABLE:
            env["EPISODE_TASK"] = task
        env |= self._env
        command, sandbox = ["/bin/sh", "-c", self._command], dict[str, Any]()
        if self._sandbox is not None:
            self._socket = await server_of_loop().listen_on_file(folder / SOCKET)
            port = int(endpoint.address.rpartition(":")[2])
            self._confined = await asyncio.to_thread(
                confine, self._sandbox, self._command, self._base, folder, port, env, self._answers
            )
            command, env, sandbox = self._confined.command, {}, self._confined.for_keeper()
        self._process = process = ProgramProcess(of_shell=self._sandbox is not None)
        self.ended = process.ended
        await process.start(command, self._base, env, endpoint.key, sandbox)

    @property
    def output(self) -> str:
        """The end of what it wrote to stdout and stderr."""
        return "" if self._process is None else self._process.output

    async def stop(self) -> None:
        """Kill it with everything that it started."""
        if self._process is not None:
            await self._process.stop()

    async def reward(self) -> str | None:
        """What it wrote to its reward file; None if there is no file, or a link."""
        if self._sandbox is not None:
            return None if self._process is None else self._process.reward
        return await asyncio.to_thread(self._read_reward)

    def _read_reward(self) -> str | None:
        assert self._folder is not None
        path = self._folder / REWARD
        if not path.is_file() or path.is_symlink():
            return None
        with path.open("rb") as file:
            return file.read(MOST_OUTPUT).decode("utf-8", "replace")

    async def close(self) -> None:
        """Remove its folder, and give back what its sandbox has."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._confined is not None:
            self._confined.close()
            self._confined = None
        if self._folder is not None:
            await asyncio.to_thread(remove, self._folder)
            self._folder = None
