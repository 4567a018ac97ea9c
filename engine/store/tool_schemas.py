"""An episode -> the schemas of the tools that it was shown, kept in `tools.jsonl` of the run's folder.

Invariant: the first line has the tools of every episode that has no line of its own. So a run whose episodes share
their tools has one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from engine.errors import StoreError
from engine.store.private import private_file

FILE = "tools.jsonl"


class ToolSchemas:
    """Writes, and reads, which tools an episode was shown.

        schemas = ToolSchemas(folder)
        schemas.note("task-1/0", toolbox.schemas)       # before its first record
        schemas.of("task-1/0")

    Args:
        folder: Of the run.
        lines: What `lines` of another object gave; by default those of the file in the folder.
    """

    def __init__(self, folder: Path, lines: Iterable[bytes] | None = None) -> None:
        """Raises: OSError: the file cannot be read."""
        self._path = folder / FILE
        self._shared: bytes | None = None
        self._own: dict[str, bytes] = {}
        if lines is None:
            lines = self._path.read_bytes().splitlines() if self._path.exists() else ()
        for line in lines:
            try:
                read = json.loads(line)
                self._add(read["episode_id"], orjson.dumps(read["tools"]))
            except (ValueError, TypeError, KeyError):  # a kill cut it off; its episode began again
                continue

    def lines(self, episodes: Iterable[str]) -> list[bytes]:
        """The lines of a file that has the tools of these episodes."""
        if self._shared is None:
            return []
        of_episodes = [
            ("", self._shared),
            *((episode, self._own[episode]) for episode in episodes if episode in self._own),
        ]
        return [b'{"episode_id":' + orjson.dumps(name) + b',"tools":' + tools + b"}" for name, tools in of_episodes]

    def _add(self, episode_id: str, tools: bytes) -> None:
        if self._shared is None:
            self._shared = tools
        elif tools != self._shared or episode_id in self._own:
            self._own[episode_id] = tools

    def note(self, episode_id: str, schemas: Sequence[dict[str, Any]]) -> None:
        """Write the tools of an episode, if they are not those that are read for it already.

        Raises:
            StoreError: the file cannot be written.
        """
        tools = orjson.dumps(list(schemas))
        if tools == self._own.get(episode_id, self._shared):
            return
        self._add(episode_id, tools)
        try:
            with private_file(self._path).open("ab") as file:
                # A line break before it, so that a line that a kill cut off spoils no other.
                file.write(b'\n{"episode_id":' + orjson.dumps(episode_id) + b',"tools":' + tools + b"}\n")
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error

    def of(self, episode_id: str) -> str:
        """The tools of an episode in OpenAI's form, as the JSON text of a list; empty if it has none, or none are
        known."""
        tools = self._own.get(episode_id, self._shared)
        return "" if tools in (None, b"[]") else tools.decode()
