"""A tool-call format of a user's own, as a project would write it: `-> name {"argument": 1}`, one call a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.schemas.message import MalformedCall, ToolCall
from engine.tokens.toolcalls import Call, ParsedCalls, ToolCallFormat


class ArrowCalls(ToolCallFormat):
    """Reads and writes arrows."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ParsedCalls:
        """See `ToolCallFormat.parse`."""
        content: list[str] = []
        attempts: list[ToolCall | MalformedCall] = []
        for line in text.split("\n"):
            if not line.startswith("-> "):
                content.append(line)
                continue
            name, _, written = line[3:].partition(" ")
            try:
                arguments = json.loads(written)
            except ValueError:
                attempts.append(MalformedCall(raw=line, problem="Write -> name {json}."))
            else:
                attempts.append(ToolCall(id=f"{prefix}_{len(attempts)}", name=name, arguments=arguments))
        return ParsedCalls(content="\n".join(content).rstrip(), attempts=attempts)

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """See `ToolCallFormat.write`."""
        written = [f"-> {name} {json.dumps(arguments)}" for name, arguments in calls]
        return "\n".join([*([text] if text else []), *written])


class MumbledCalls(ArrowCalls):
    """Writes what it does not read."""

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """See `ToolCallFormat.write`."""
        return super().write(text, calls).replace("->", "..")


class BrokenCalls(ArrowCalls):
    """Cannot write."""

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """See `ToolCallFormat.write`."""
        raise KeyError("arrow")


class SilentCalls(ArrowCalls):
    """Writes nothing."""

    def write(self, text: str, calls: Sequence[Call]) -> Any:
        """See `ToolCallFormat.write`."""
        return None


class RaisingCalls(ArrowCalls):
    """Fails at every reply."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ParsedCalls:
        """See `ToolCallFormat.parse`."""
        raise KeyError("arrow")


class ListedCalls(ArrowCalls):
    """Returns something else."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> Any:
        """See `ToolCallFormat.parse`."""
        return [text]


class DictCalls(ArrowCalls):
    """Returns dicts in place of calls."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> Any:
        """See `ToolCallFormat.parse`."""
        return ParsedCalls(content=text, attempts=[{"name": "add", "arguments": {}}])  # type: ignore[list-item]


class NamelessCalls(ArrowCalls):
    """Makes calls whose fields have other types."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ParsedCalls:
        """See `ToolCallFormat.parse`."""
        return ParsedCalls(content=text, attempts=[ToolCall(id="call_0", name=None, arguments=[1])])  # type: ignore[arg-type]


class StoppingCalls(ArrowCalls):
    """Fails at one reply."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ParsedCalls:
        """See `ToolCallFormat.parse`."""
        if text == "stop":
            raise RuntimeError("stopped")
        return super().parse(text, tools, prefix)
